"""The page's state in its address: `?model=gpt2&micro_batch=8&stage=3`, so that a link brings the same page back.

Only what differs from the opening page is written. A job that the controls cannot say whole travels as `job`, and a pasted config as
`config`: both are JSON, compressed, in URL-safe base64.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from explorer.errors import BadInput
from explorer.setup import Setup
from explorer.ui import fields

LONGEST_QUERY = 8_000
"""Characters; browsers and servers take at least this much in an address."""
_LARGEST_TEXT_BYTES = 1 << 20


def write(base: Setup, values: Mapping[str, Any], setup: Setup | None) -> str:
    """The query that brings this state back, without "?"; values that are wrong are carried as typed."""
    opening = fields.read(fields.default_setup())
    changed = {name: value for name, value in values.items() if _text(value) != _text(opening[name])}
    if setup is not None and base != fields.default_setup() and not _same(setup, changed, opening):
        return urlencode({"job": pack(setup.canonical)})
    return urlencode({_short(name): _packed(name, value) for name, value in changed.items()})


def _same(setup: Setup, changed: Mapping[str, Any], opening: Mapping[str, Any]) -> bool:
    try:
        return fields.write(fields.default_setup(), {**opening, **changed}) == setup
    except BadInput:
        return False


def _short(name: str) -> str:
    return "config" if name == "config_text" else name


def _packed(name: str, value: Any) -> str:
    return pack(value) if name == "config_text" else _text(value)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def read(query: str) -> tuple[Setup | None, dict[str, Any], list[str]]:
    """(the job if the address carries one, control values, sentences about what could not be read)."""
    given = dict(parse_qsl(query.removeprefix("?")[: LONGEST_QUERY * 2], keep_blank_values=True))
    notices: list[str] = []
    setup = _job(given.pop("job", None), notices)
    values: dict[str, Any] = {}
    for key, text in given.items():
        name = "config_text" if key == "config" else key
        if name in fields.FIELDS:
            _take(fields.FIELDS[name], text, values, notices)
    return setup, values, notices


def _job(packed: str | None, notices: list[str]) -> Setup | None:
    if packed is None:
        return None
    try:
        return Setup.from_job(json.loads(unpack(packed)))
    except (ValueError, RecursionError) as error:
        notices.append(f"The job in this address could not be read ({error}); the page opens with its own.")
        return None


def _take(field: fields.Field, text: str, values: dict[str, Any], notices: list[str]) -> None:
    if field.kind == "switch":
        values[field.name] = text.lower() in ("true", "1", "on", "yes")
        return
    if field.name == "config_text":
        try:
            values[field.name] = unpack(text)
        except ValueError as error:
            notices.append(f"The config in this address could not be read ({error}).")
        return
    if field.options and text not in field.options:
        notices.append(f"{field.name} in this address is {text[:40]!r}; the choices are {', '.join(field.options)}. The page keeps {field.default}.")
        return
    values[field.name] = text[:200] if text or not field.optional else None


def pack(text: str) -> str:
    """Text for an address."""
    return base64.urlsafe_b64encode(zlib.compress(text.encode(errors="replace"), 9)).decode().rstrip("=")


def unpack(packed: str) -> str:
    """The text again. Raises ValueError where it is not `pack`'s, or is too large."""
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)), _LARGEST_TEXT_BYTES)
    except (ValueError, zlib.error):
        raise ValueError("it is damaged") from None
    if not inflate.eof:
        raise ValueError("it is cut short or too large")
    return data.decode("utf-8", errors="replace")
