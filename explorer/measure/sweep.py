"""Many probes from one file: a job, and lists of values to try in it. Each result is written as it comes, so a sweep that was stopped goes on. No torch.

    {"job": {"model": "gpt2", "micro_batch": 8}, "grid": {"micro_batch": [8, 16], "deepspeed.zero_optimization.stage": [1, 2]}}

A grid is every combination of its lists; a list of grids is one after the other.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from explorer.errors import BadInput, CouldNotRun, nearest, shown
from explorer.jsonfile import parse_json, read_json
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import human, pytorch_size

SCHEMA = 1
MOST_JOBS = 1000
"""A sweep of more is a slip: at ten seconds a job it would take hours."""
_KEYS = {"schema", "job", "grid"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One job of a sweep."""

    change: Mapping[str, Any]
    """Key of the job, dots between levels → its value; None leaves the key out."""
    job: Mapping[str, Any]

    @property
    def label(self) -> str:
        """What sets it apart: "micro_batch 320, stage 3"."""
        short = ((key.removeprefix("deepspeed.").removeprefix("zero_optimization."), value) for key, value in self.change.items())
        return ", ".join(f"{key} {value if isinstance(value, str) else shown(value)}" for key, value in short) or "the job as it is"

    @property
    def name(self) -> str:
        """One text for all equal jobs, in whatever order their keys were written."""
        return json.dumps(self.job, sort_keys=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one job of a sweep came to: a profile, or the sentence why there is none and its exit code."""

    point: Point
    profile: Profile | None = None
    error: str | None = None
    exit_code: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A line of the rows' file."""
        found = {"error": self.error, "exit_code": self.exit_code} if self.profile is None else {"profile": self.profile.to_record()}
        return {"schema": SCHEMA, "kind": "sweep row", "change": dict(self.point.change), "job": dict(self.point.job), "seconds": self.seconds, **found}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """The row of a line; KeyError or TypeError where it is none."""
        if data["kind"] != "sweep row" or data["schema"] != SCHEMA:
            raise KeyError("kind")
        profile = Profile.from_json(data["profile"]) if "profile" in data else None
        return cls(point=Point(change=data["change"], job=data["job"]), profile=profile, error=data.get("error"), exit_code=data.get("exit_code", 0), seconds=data["seconds"])


# --- the file


def read(path: str | Path) -> list[Point]:
    """The jobs of a sweep file, in order, each once. Raises BadInput."""
    return points(read_json(path, "sweep"))


def points(sweep: Any) -> list[Point]:
    """The jobs of a sweep, in order, each once. Raises BadInput; that a job itself is wrong is told when its turn comes."""
    if not isinstance(sweep, Mapping):
        raise BadInput("sweep", f"is {shown(sweep)}; give an object with \"job\" and \"grid\"")
    for key in sweep:
        if key not in _KEYS:
            raise BadInput(f"sweep.{key}", f"is not a key of a sweep{nearest(key, _KEYS)}; it has \"job\" and \"grid\"")
    if sweep.get("schema", SCHEMA) != SCHEMA:
        raise BadInput("sweep.schema", f"is {shown(sweep['schema'])}; this version reads schema {SCHEMA}")
    job, grid = sweep.get("job"), sweep.get("grid")
    if not isinstance(job, Mapping):
        raise BadInput("sweep.job", f"is {shown(job)}; give the job that all have in common, as an object")
    grids = grid if isinstance(grid, list) else [grid]
    for one in grids:
        _check(one)
    count = sum(prod(len(values) for values in one.values()) for one in grids)
    if count > MOST_JOBS:
        raise BadInput("sweep.grid", f"gives {count} jobs; at most {MOST_JOBS} in one sweep")
    found: dict[str, Point] = {}
    for one in grids:
        for values in itertools.product(*one.values()):
            point = _point(job, dict(zip(one, values, strict=True)))
            found.setdefault(point.name, point)
    return list(found.values())


def _check(grid: Any) -> None:
    if not isinstance(grid, Mapping):
        raise BadInput("sweep.grid", f"is {shown(grid)}; give an object such as {{\"micro_batch\": [8, 16]}}, or a list of them")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise BadInput(f"sweep.grid.{key}", f"is {shown(values)}; give a list of values, such as [8, 16]")


def _point(job: Mapping[str, Any], change: dict[str, Any]) -> Point:
    changed = deepcopy(dict(job))
    for key, value in change.items():
        *parents, last = key.split(".")
        section = changed
        for name in parents:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise BadInput(f"sweep.grid.{key}", f"has no place in the job: {name} is {shown(section)}, not an object")
        section.pop(last, None)
        if value is not None:
            section[last] = value
    return Point(change=change, job=changed)


# --- the rows


def kept(path: Path) -> dict[str, Row]:
    """Name → row of every job in the rows' file. A last line that was cut short is removed from it. Raises BadInput where it is another file."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    try:
        rows = [Row.from_json(parse_json(line, "rows")) for line in whole.splitlines()]
    except (BadInput, KeyError, TypeError, AttributeError):
        raise BadInput("out", f"{path} holds something else than a sweep's rows; name another file") from None
    if whole != text:
        if not whole and not text.startswith("{"):
            raise BadInput("out", f"{path} holds something else than a sweep's rows; name another file")
        part = path.with_name(f"{path.name}.part")
        part.write_text(whole, encoding="utf-8")
        part.replace(path)
    return {row.point.name: row for row in rows}


def run(jobs: list[Point], path: Path, probe: Callable[[Setup], Profile], begins: Callable[[int, Point, bool], None]) -> Iterator[Row]:
    """The row of each job, in order. One that was measured before is taken from the file at `path`; any other is run, and added to it.

    `begins(number, point, known)` is told of each before its turn.
    """
    known = kept(path)
    for number, point in enumerate(jobs):
        row = known.get(point.name)
        measured = row is not None and row.profile is not None
        begins(number, point, measured)
        if not measured:
            row = _run(point, probe)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row.to_json()) + "\n")
        yield Row(point=point, profile=row.profile, error=row.error, exit_code=row.exit_code, seconds=row.seconds)


def _run(point: Point, probe: Callable[[Setup], Profile]) -> Row:
    started = time.monotonic()
    try:
        profile = probe(Setup.from_job(point.job))
    except Exception as error:
        mine = isinstance(error, BadInput | CouldNotRun)
        sentence = str(error) if mine else f"this is a fault of the explorer, not of the job: {type(error).__name__}: {error}"
        return Row(point=point, error=sentence, exit_code=error.exit_code if mine else CouldNotRun.exit_code, seconds=round(time.monotonic() - started, 1))
    return Row(point=point, profile=profile, seconds=round(time.monotonic() - started, 1))


# --- the table

_HEAD = ("job", "peak allocated", "in", "peak reserved", "host", "result")


def table(rows: list[Row]) -> str:
    """The rows as a table, in Markdown's form."""
    lines = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    texts = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([texts[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *texts[1:]])


def _cells(row: Row) -> tuple[str, ...]:
    if row.profile is None:
        return row.point.label, "", "", "", "", f"no result: {row.error}".replace("|", "/")
    peak = row.profile.peak
    where = f"{peak.allocated_phase}, {peak.allocated_step} step"
    return row.point.label, human(peak.allocated_bytes), where, human(peak.reserved_bytes), human(row.profile.host.resident_bytes), result(row.profile)


def result(profile: Profile) -> str:
    """What became of it, in a few words."""
    failure = profile.verdict.failure
    if failure is not None:
        return f"out of memory in {failure.phase} of the {failure.step} step, at a request of {pytorch_size(failure.requested_bytes)}"
    return profile.verdict.answer or f"ran on the {profile.measured_on or 'machine'}"
