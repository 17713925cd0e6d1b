"""JSON as people bring it: a file, a pipe, a pasted text or a Python object in; plain lists and dictionaries out. No torch.

Whatever passes here can be written to a file and read back by any program.
"""

from __future__ import annotations

import json
import math
import os
import select
import stat
import time
from collections.abc import Iterator, Mapping
from os import PathLike, fsdecode
from os.path import isdir
from pathlib import Path
from typing import Any

from explorer.errors import BadInput, one_line, shown

LARGEST_BYTES = 1 << 20
_DEEPEST = 64
_MOST_BITS = 4096
_TOO_LARGE = "is too large to be a configuration (over 1 MiB)"
_TOO_DEEP = f"is nested too deeply to be a configuration (over {_DEEPEST} levels)"


def read_json(path: str | Path, field: str) -> Any:
    """The value of a JSON file or pipe; BadInput naming `field` where it is missing, too large, or broken."""
    return decode_json(read_bytes(path, field), field, one_line(path, 200))


def read_bytes(path: str | Path, field: str) -> bytes:
    """The content of a file or pipe, one byte beyond LARGEST_BYTES at most; BadInput naming `field` where it cannot be read."""
    name = one_line(path, 200)
    if not name:
        raise BadInput(field, "cannot read a file without a name; give a JSON file")
    if isdir(path):
        raise BadInput(field, f"{name} is a directory, not a file; give a JSON file")
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISBLK(mode) or stat.S_ISCHR(mode) and _is_terminal(path):
            raise BadInput(field, f"{name} is a device, not a file; give a JSON file")
        if stat.S_ISFIFO(mode):
            return _of_pipe(path, field, name)
        with Path(path).open("rb") as file:
            return file.read(LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        if isinstance(error, BadInput):
            raise
        raise BadInput(field, f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None


def _is_terminal(path: str | Path) -> bool:
    """Whether reading it would wait for somebody to type."""
    device = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        return os.isatty(device)
    finally:
        os.close(device)


_WRITER_S, _CONTENT_S = 0.5, 10.0
"""How long a pipe is waited for: until somebody writes to it at all, and until there is something to read."""


def _of_pipe(path: str | Path, field: str, name: str) -> bytes:
    """What is written to a named pipe, which opening without a writer would wait for without end."""
    begun, found = time.monotonic(), bytearray()
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while len(found) <= LARGEST_BYTES:
            try:
                part = os.read(pipe, LARGEST_BYTES + 1 - len(found))
            except BlockingIOError:  # there is a writer, who has not written yet
                if time.monotonic() - begun > _CONTENT_S:
                    raise BadInput(field, f"{name} is a pipe from which nothing came for {_CONTENT_S:.0f} s; give a file") from None
                select.select([pipe], [], [], 0.1)
                continue
            if part:
                found += part
            elif found or time.monotonic() - begun > _WRITER_S:
                break
            else:
                time.sleep(0.01)
    finally:
        os.close(pipe)
    if not found:
        raise BadInput(field, f"{name} is a pipe to which nothing is written; give a file")
    return bytes(found)


def decode_json(content: bytes, field: str, name: str) -> Any:
    """The value of a JSON file's content; `name` is the file's, for the sentence of a BadInput."""
    if len(content) > LARGEST_BYTES:
        raise BadInput(field, f"{name} {_TOO_LARGE}")
    try:
        return parse_json(content.decode("utf-8-sig"), field)
    except UnicodeDecodeError:
        raise BadInput(field, f"{name} is not text in UTF-8") from None


def parse_json(text: str, field: str) -> Any:
    """A JSON text's value; BadInput naming the line where it breaks, or the key that it gives twice."""

    def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise BadInput(field, f"gives {shown(key)} twice in one object; keep one of them")
            found[key] = value
        return found

    if len(text) > LARGEST_BYTES:
        raise BadInput(field, _TOO_LARGE)
    if not text.strip("\ufeff \t\r\n"):
        raise BadInput(field, "is empty; give a JSON object")
    try:
        return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=section)
    except json.JSONDecodeError as error:
        raise BadInput(field, f"is not valid JSON: {error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise BadInput(field, _TOO_DEEP) from None
    except BadInput:
        raise
    except ValueError:  # an integer of thousands of digits
        raise BadInput(field, "holds a number too long to be read") from None


def plain(value: Any, field: str) -> Any:
    """A copy of a value in JSON's own types; NumPy's numbers, paths, tuples and other mappings are taken. BadInput naming `field` for the rest."""
    copied = _plain(value, field, 0)
    if len(json.dumps(copied, ensure_ascii=False)) > LARGEST_BYTES:
        raise BadInput(field, _TOO_LARGE)
    return copied


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(keys down to it, the first's value, the second's) wherever two objects part, the first one's order before the second's; None for what is not there."""
    for key in [*first, *(k for k in second if k not in first)]:
        one, other = first.get(key), second.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from (((key, *rest), a, b) for rest, a, b in differences(one, other))
        elif one != other:
            yield (key,), one, other


def scalar(value: Any) -> Any:
    """A number or truth of NumPy's, or a path, as Python's own; anything else as it is."""
    if isinstance(value, PathLike):
        return fsdecode(value)
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _plain(value: Any, field: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise BadInput(field, _TOO_DEEP)
    if isinstance(value, Mapping):
        return {_key(k, field): _plain(v, field, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, field, depth + 1) for v in value]
    if isinstance(value, set | frozenset):
        return [_plain(v, field, depth + 1) for v in sorted(value, key=repr)]
    value = scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(field, "holds NaN or an infinity, which JSON has no form for")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:  # which Python refuses to write in digits
        raise BadInput(field, "holds a number too long to be read")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise BadInput(field, f"holds an object of type {type(value).__name__}, which JSON has no form for")


def _key(key: Any, field: str) -> str:
    """JSON's keys are texts; numbers and truths become what json.dumps makes of them."""
    key = scalar(key)
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    raise BadInput(field, f"has a key of type {type(key).__name__}, which JSON has no form for")
