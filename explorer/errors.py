"""The two ways a job can end without an answer, each with the exit code other programs rely on; and how a person's values are quoted in them."""

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any


class BadInput(ValueError):
    """What was asked cannot be: one sentence that names the field and the way out (exit code 2)."""

    exit_code = 2

    def __init__(self, field: str, sentence: str) -> None:
        self.field = one_line(field, 120)
        sentence = one_line(sentence, 800)
        super().__init__(f"{self.field}: {sentence}" if self.field else sentence)


class CouldNotRun(RuntimeError):
    """What was asked is fine, but not here and now: no GPU, a missing extra, a time limit (exit code 5)."""

    exit_code = 5


def missing_extra(what: str, package: str) -> CouldNotRun:
    """The sentence for a package of the `[probe]` extra that is not installed."""
    return CouldNotRun(f"{what} needs {package}, which is not installed: pip install 'deepspeed-memory-explorer[probe]'")


def shown(value: Any, most: int = 60) -> str:
    """A value as JSON writes it, since that is where the person wrote it; cut at `most` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=lambda other: f"<{type(other).__name__}>")
    except (ValueError, TypeError, RecursionError):  # holds itself, keys that are no text, or levels without end
        text = f"<{type(value).__name__}>"
    return one_line(text, most)


def one_line(text: object, most: int) -> str:
    """Printable text on one line: what could move a cursor, or has no form in UTF-8, is escaped; cut at `most` characters."""
    line = " ".join(str(text)[: 4 * most].split())
    line = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in line)
    return line if len(line) <= most else line[: most - 1] + "…"


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean "…"?` for a slip of the pen, nothing where no name is near."""
    near = difflib.get_close_matches(str(word)[:100], list(known), 1, 0.6)
    return f"; did you mean {shown(near[0])}?" if near else ""


def reason(error: BaseException, most: int = 300) -> str:
    """What another library's error says, without the types that it tried in turn (pydantic's and transformers' validation errors)."""
    text = str(error) or type(error).__name__
    if isinstance(error, KeyError):  # whose text is the bare key
        text = f"{type(error).__name__}: {text}"
    text = re.sub(r"^(Class v|V)alidation error for \w+ '\w+': \w+: ", "", text.partition(" Errors: ")[0])
    return one_line(re.sub(r"<class '(\w+)'>", r"\1", text), most)
