"""An error on its way from one process to another. No torch."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path

from explorer.errors import BadInput, CouldNotRun


def described(error: BaseException) -> dict[str, str]:
    """What crosses over. What is neither BadInput nor CouldNotRun is a crash, and goes to this process's log whole."""
    if isinstance(error, BadInput):
        return {"kind": "bad_input", "field": error.field, "text": str(error).removeprefix(f"{error.field}: ")}
    if isinstance(error, CouldNotRun):
        return {"kind": "could_not_run", "field": "", "text": str(error)}
    traceback.print_exception(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).strip().splitlines() or [""])[0][:400]
    return {"kind": "crash", "field": "", "text": f"{type(error).__name__}: {first} ({Path(where.filename).name}:{where.lineno})"}


def raised(error: Mapping[str, str], who: str = "") -> Exception:
    """The error on this side; `who` goes before its text."""
    if error["kind"] == "bad_input":
        return BadInput(error["field"], error["text"])
    return CouldNotRun(who + error["text"])
