"""JSON objects as people paste them: comments, trailing and missing commas, Python's words, `1e8` and `500_000_000`, cut off at the end. No torch.

What JSON itself would refuse is taken and told (`Slip`); what cannot be a value (a name, a call) is left out and told. Nothing is ever run.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from explorer.dsconfig.literals import Bindings

DEEPEST = 64
MOST_TOKENS = 80_000
"""Over all attempts on one text: a configuration has some hundred."""

MOST_SLIPS = 40
"""Told of one object; after so many it is no configuration."""


class Slip(NamedTuple):
    """Something that a JSON parser would stop at."""

    at: int
    text: str
    python: bool = False
    """Python takes it as it is."""


class NotAnObject(ValueError):
    """What stands there is none."""


_SKIP = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*[^*]{0,4000}(?:\*(?!/)[^*]{0,4000}){0,50}\*/)+")
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"|\'((?:[^\'\\\n]|\\.)*)\'|[“”]([^“”\n]*)[“”]')
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]{0,60}(?:\.[\d_]{0,60})?|\.\d{1,60})(?:[eE][+-]?\d{1,9})?(?![\w.])")
_WORD = re.compile(r"[A-Za-z_][\w.-]*")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_EXPRESSION = re.compile(r"[^,}\]\n{\[]{1,200}")
_TO_INT = re.compile(r"int\(\s{0,9}([\d_.]{1,60}(?:[eE][+]?\d{1,9})?)\s{0,9}\)")


@dataclass(slots=True)
class Reader:
    """One text; `read(position)` may be called for every brace in it."""

    text: str
    bindings: Bindings
    """The names that the text gives to values."""
    at: int = 0
    slips: list[Slip] = field(default_factory=list)
    tokens: int = 0

    def read(self, start: int) -> dict[str, Any]:
        """The object that begins at `start`; `at` is then its end. Raises NotAnObject."""
        self.at, self.slips = start, []
        value = self._value(0)
        if not isinstance(value, dict):
            raise NotAnObject
        return value

    def line(self, slip: Slip, start: int) -> int:
        """The line that it is on, from 1, counted from `start`."""
        return self.text.count("\n", start, slip.at) + 1

    def _slip(self, text: str, python: bool = False) -> None:
        if len(self.slips) < MOST_SLIPS:
            self.slips.append(Slip(self.at, text, python))

    def _skip(self) -> str:
        """Past white space and comments; the character there, "" at the end."""
        self.tokens += 1
        if self.tokens > MOST_TOKENS:
            raise NotAnObject
        match = _SKIP.match(self.text, self.at)
        if match:
            if any(mark in match[0] for mark in ("//", "#", "/*")) and not any("comment" in slip.text for slip in self.slips):
                self._slip("has comments, which JSON does not allow", python=match[0].lstrip().startswith("#"))
            self.at = match.end()
        return self.text[self.at : self.at + 1]

    def _value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise NotAnObject
        character = self._skip()
        if character == "{":
            return self._object(depth)
        if character and character in "[(":
            return self._list(depth, "]" if character == "[" else ")")
        if (match := _STRING.match(self.text, self.at)) is not None:
            self.at = match.end()
            return _unescaped(match)
        if (match := _NUMBER.match(self.text, self.at)) is not None:
            self.at = match.end()
            return self._number(match[0])
        if (match := _WORD.match(self.text, self.at)) is not None and match[0] in _WORDS:
            self.at = match.end()
            if match[0] not in ("true", "false", "null"):
                self._slip(f"writes {match[0]} as Python does", python=True)
            return _WORDS[match[0]]
        if (match := _TO_INT.match(self.text, self.at)) is not None:
            self.at = match.end()
            return int(self._number(match[1]))
        raise NotAnObject

    def _number(self, text: str) -> int | float:
        plain = text.replace("_", "")
        if "_" in text:
            self._slip(f"writes {text} with underscores", python=True)
        if len(plain) > 40:
            raise NotAnObject
        try:
            number = float(plain) if any(c in plain for c in ".eE") else int(plain)
        except ValueError:  # several points
            raise NotAnObject from None
        if number in (float("inf"), float("-inf")):
            raise NotAnObject
        return number

    def _object(self, depth: int) -> dict[str, Any]:
        self.at += 1
        found: dict[str, Any] = {}
        while True:
            character = self._commas("}")
            if character == "}":
                self.at += 1
                return found
            if not character:
                self._slip("ends before the object does")
                return found
            key = self._key(bool(found))
            if self._skip() != ":":
                if self.at >= len(self.text):
                    self._slip(f"ends after {json.dumps(key)}")
                    return found
                raise NotAnObject
            self.at += 1
            start = self.at
            try:
                value = self._value(depth + 1)
            except NotAnObject:
                value = self._named(start)
                if value is None:
                    self._leave_out(key, start)
                    continue
            if key in found:
                self._slip(f"gives {json.dumps(key)} twice, which DeepSpeed refuses; the last is taken")
            found[key] = value

    def _key(self, nested: bool) -> str:
        match = _STRING.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
            if not match[0].startswith('"'):
                self._slip(f"writes {match[0][:60]} in other quotes than JSON's", python=match[0].startswith("'"))
            return _unescaped(match).strip()
        match = _WORD.match(self.text, self.at)
        if match is None:
            raise NotAnObject
        self.at = match.end()
        self._slip(f"writes the key {match[0][:60]} without quotes")
        return match[0]

    def _named(self, start: int) -> Any:
        """What a name in the place of a value stands for; None where that is no plain value."""
        self.at = start
        self._skip()
        match = _WORD.match(self.text, self.at)
        held = self.bindings.before(start).get(match[0]) if match is not None else None
        if not isinstance(held, ast.Constant):
            return None
        self.at = match.end()
        return held.value

    def _leave_out(self, key: str, start: int) -> None:
        """A value that is none: a name, a call. What follows it is read on."""
        self.at = start
        self._skip()
        match = _EXPRESSION.match(self.text, self.at)
        if match is None or self.tokens > MOST_TOKENS:
            raise NotAnObject
        self.at = match.end()
        self._slip(f"gives {json.dumps(key)} as {match[0].strip()[:60]}, which is no value; it is left out")

    def _list(self, depth: int, closing: str) -> list[Any]:
        if closing == ")":
            self._slip("writes a list in round brackets", python=True)
        self.at += 1
        found: list[Any] = []
        while True:
            character = self._commas(closing)
            if character == closing:
                self.at += 1
                return found
            if not character:
                self._slip("ends before the list does")
                return found
            found.append(self._value(depth + 1))

    def _commas(self, closing: str) -> str:
        """Past the comma between two entries, telling one too many and one too few."""
        before = self.text[self.at - 1 : self.at]
        character = self._skip()
        commas = 0
        while character == ",":
            commas += 1
            self.at += 1
            character = self._skip()
        first = before in ("{", "[", "(") and not commas
        if commas > 1 or commas and (character == closing or before in ("{", "[", "(")):
            self._slip("has a comma too many", python=commas == 1 and before not in ("{", "[", "("))
        elif not commas and not first and character and character != closing:
            self._slip("lacks a comma between two entries")
        return character


def _unescaped(match: re.Match[str]) -> str:
    if match[1] is not None:
        try:
            return json.loads(match[0], strict=False)
        except ValueError:
            return match[1]
    return match[2] if match[2] is not None else match[3]
