"""Values in Python text: constants, collections of them, arithmetic on numbers, and the names that the text gives to such. Read by `ast`, never run. No torch."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

LONGEST = 1 << 16
"""Of a bracket, in characters."""
_DEEPEST, _MOST_BITS = 60, 128
_MOST_BINDINGS, _MOST_PARSED = 500, 100_000

Names = Mapping[str, ast.expr]
"""Name → what it stands for: an `ast.Constant`, or a collection as it was written."""


def parsed(source: str) -> ast.expr | None:
    """An expression; None where the text is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def written(node: ast.AST) -> str:
    """The expression as Python writes it, its beginning where it is long."""
    try:
        return ast.unparse(node)[:60]
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets without end
        return "too long"


# --- brackets and lines

_TOKEN = re.compile(r"\"\"\"|'''|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|#[^\n]*|[()\[\]{}\n]")
_STEP = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def closing(text: str, start: int) -> int | None:
    """Where the bracket that was opened before `start` closes, or the text ends; None for brackets within brackets without end."""
    return _end(text, start, 1, of_line=False)


def _line_end(text: str, start: int) -> int | None:
    """Where a statement ends: the end of its line, outside all brackets."""
    return _end(text, start, 0, of_line=True)


def _end(text: str, start: int, depth: int, *, of_line: bool) -> int | None:
    """Where the brackets that are open, `depth` of them, have closed: after the last, or before the end of its line."""
    stop = min(len(text), start + LONGEST)
    for match in _TOKEN.finditer(text, start, stop):
        depth += _STEP.get(match[0], 0)
        if depth > _DEEPEST:
            return None
        if depth <= 0 and of_line == (match[0] == "\n"):
            return match.start() if of_line else match.end()
    return stop


# --- values

def literal(node: ast.AST, names: Names, depth: int = 0) -> Any:
    """The value of a constant, of a collection of them, of arithmetic on numbers, of a name for such. ValueError for anything else.

    Names within a collection stand for constants only: one collection in another, over and over, would grow without end.
    """
    if depth > 30:
        raise ValueError
    match node:
        case ast.Constant(value=int() as value) if value.bit_length() > _MOST_BITS:
            raise ValueError
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id=name) if name in names and (depth == 0 or isinstance(names[name], ast.Constant)):
            return literal(names[name], names, depth + 1)
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return [literal(part, names, depth + 1) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {_key(key, names, depth): literal(value, names, depth + 1) for key, value in zip(keys, values, strict=True)}
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords) if all(keyword.arg for keyword in keywords):
            return {keyword.arg: literal(keyword.value, names, depth + 1) for keyword in keywords}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, names, depth)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() | ast.Add() | ast.Sub() | ast.FloorDiv() as op, right=right):
            return _arithmetic(op, _number(left, names, depth), _number(right, names, depth))
        case ast.Call(func=ast.Name(id="int" | "float" as name), args=[argument], keywords=[]):
            return (int if name == "int" else float)(_number(argument, names, depth))
    raise ValueError


def keywords(call: ast.Call, names: Names) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of the keyword arguments, `**` taken apart where what follows it is a dictionary or the name of one; else its name is "**"."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value
            continue
        given = names.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else keyword.value
        match given:
            case ast.Dict(keys=keys, values=values):
                yield from ((key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else "**", value) for key, value in zip(keys, values, strict=True))
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=inner):
                yield from ((each.arg or "**", each.value) for each in inner)
            case _:
                yield "**", keyword.value


def _key(node: ast.AST | None, names: Names, depth: int) -> str:
    key = literal(node, names, depth + 1) if node is not None else None
    if not isinstance(key, str):
        raise ValueError
    return key


def _number(node: ast.AST, names: Names, depth: int) -> int | float:
    value = literal(node, names, depth + 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30 or value != value:
        raise ValueError
    return value


def _arithmetic(op: ast.operator, left: int | float, right: int | float) -> int | float:
    if isinstance(op, ast.Div | ast.FloorDiv) and right == 0:
        raise ValueError
    match op:
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return left // right
        case ast.Add():
            return left + right
    return left - right


# --- names

class _Binding(NamedTuple):
    start: int
    indent: int
    name: str
    """Empty for a line that begins a function or a class."""
    node: ast.expr | None
    """None for what cannot be a value."""


_BINDING = re.compile(r"^(?:(?:>>>|\.\.\.) ?)?([ \t]*)(?:(?:async[ \t]+)?(?:def|class)[ \t]|([A-Za-z_]\w{0,60})[ \t]*(?::[^=\n]{1,80})?(\*\*|//|[-+*/%|&@])?=(?!=))", re.MULTILINE)


_INDENT = re.compile(r"(?:(?:>>>|\.\.\.) ?)?([ \t]*)")


class Bindings:
    """The names that a text gives to values, `BATCH = 32`, in its order."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._read: dict[int, _Reading] = {}

    @cached_property
    def _all(self) -> tuple[_Binding, ...]:
        return tuple(_bindings(self.text))

    def before(self, position: int) -> Names:
        """What each name stands for there. A name that was last set deeper than that line, in a branch say, may stand for anything, and is left out."""
        depth = len(_INDENT.match(self.text, self.text.rfind("\n", 0, position) + 1)[1])
        reading = self._read.get(depth)
        if reading is None or reading.position > position:
            reading = self._read[depth] = _Reading(depth)
        reading.go_on(self._all, position)
        return dict(reading.names)


class _Reading:
    """The bindings gone through so far, by the eyes of lines of one depth."""

    def __init__(self, depth: int) -> None:
        self.depth, self.position, self.count = depth, 0, 0
        self.names: dict[str, ast.expr] = {}
        self.indents: dict[str, int] = {}

    def go_on(self, bindings: Sequence[_Binding], position: int) -> None:
        self.position = position
        while self.count < len(bindings) and bindings[self.count].start < position:
            self._take(bindings[self.count])
            self.count += 1

    def _take(self, binding: _Binding) -> None:
        if not binding.name:  # a function: what another one named ended with it
            self.names = {name: held for name, held in self.names.items() if self.indents[name] <= binding.indent}
            return
        held = _held(binding.node, self.names) if binding.node is not None and binding.indent <= self.depth else None
        if held is None:
            self.names.pop(binding.name, None)
        else:
            self.names[binding.name], self.indents[binding.name] = held, binding.indent


def _held(node: ast.expr, names: Names) -> ast.expr | None:
    if isinstance(node, ast.Dict | ast.List | ast.Tuple) or isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return node
    try:
        value = literal(node, names)
    except ValueError:
        return None
    return ast.Constant(value) if not isinstance(value, list | dict) else names[node.id] if isinstance(node, ast.Name) else None


def _bindings(text: str) -> Iterator[_Binding]:
    at = read = count = 0
    while count < _MOST_BINDINGS and (match := _BINDING.search(text, at)) is not None:
        at, count = match.end(), count + 1
        if not match[2]:
            yield _Binding(match.start(), len(match[1]), "", None)
            continue
        end = _line_end(text, match.end())
        source = text[match.end() : end].strip() if end is not None else ""
        read += len(source)
        keyword = source.endswith(",") and match[1]  # of a call that began above
        at = max(at, end or 0)
        if not keyword:
            yield _Binding(match.start(), len(match[1]), match[2], parsed(source) if source and not match[3] and read <= _MOST_PARSED else None)
