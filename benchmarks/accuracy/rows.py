"""The measured rows, each with today's estimate beside it. No torch where the tape ships.

A row of `rows.jsonl` is what the probe read on an H200 for one job. Three keys say what a row is for: "held_out": true (an
architecture nobody looked at while the rules were written), "limit_of": NAME (the job of row NAME again, under
`capacity_gib`), "largest": true (the job at the micro-batch that the estimate called the largest that fits).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from explorer import Setup, estimate
from explorer.catalog import find_model
from explorer.dsconfig import resolve
from explorer.errors import BadInput, CouldNotRun
from explorer.estimator.largest import largest_micro_batch
from explorer.profile import PhaseMemory, Profile
from explorer.units import GiB

ROWS = Path(__file__).parent / "rows.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured job. Sizes in bytes."""

    name: str
    setup: Mapping[str, Any]
    peak: Mapping[str, Any]
    steps: Mapping[str, list[Mapping[str, Any]]]
    at_peak: Mapping[str, int] | None
    failed: bool
    """Ran out of memory."""
    host: Mapping[str, int]
    environment: Mapping[str, Any]
    held_out: bool
    limit_of: str | None
    largest: bool

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """A line of rows.jsonl."""
        return cls(
            name=data["name"], setup=data["setup"], peak=data["peak"], steps=data["steps"], at_peak=data.get("at_peak"),
            failed=data.get("failure") is not None, host=data.get("host", {}), environment=data.get("environment", {}),
            held_out=bool(data.get("held_out")), limit_of=data.get("limit_of"), largest=bool(data.get("largest")),
        )

    @property
    def capacity_bytes(self) -> int | None:
        """The limit it ran under, None where it had the whole card."""
        limit = self.setup.get("capacity_gib")
        return None if limit is None else int(limit * GiB)

    @property
    def stood_in(self) -> bool:
        """Whether one GPU stood in for a rank of several, with a process group that loads no NCCL."""
        return self.setup.get("world_size", 1) > 1

    def phase(self, step: str, phase: str) -> Mapping[str, Any] | None:
        """That phase of that step, None where the run did not reach it."""
        return next((p for p in self.steps.get(step, ()) if p["phase"] == phase), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A row and its estimate."""

    row: Row
    profile: Profile | None
    """None where there is no estimate: `error` says why."""
    error: str = ""
    largest: int | None = None
    """Today's largest micro-batch, of a "largest" row only."""

    def phase(self, step: str, phase: str) -> tuple[PhaseMemory, Mapping[str, Any]] | None:
        """(estimated, measured) of one phase, None where either has none."""
        ours, theirs = self.profile.phase(step, phase), self.row.phase(step, phase)
        return None if ours is None or theirs is None else (ours, theirs)

    @property
    def family(self) -> str:
        """The architecture, as the catalog calls it."""
        return find_model(self.row.setup["model"]).family

    @property
    def mode(self) -> tuple[str, str, str]:
        """(stage, what is offloaded, precision)."""
        settings = resolve(Setup.from_job(self.row.setup))
        offloaded = [name for name, part in (("optimizer", settings.offload_optimizer), ("parameters", settings.offload_param)) if part is not None]
        autocast = settings.config.get("torch_autocast")
        mixed = isinstance(autocast, Mapping) and bool(autocast.get("enabled"))
        return str(settings.stage), " + ".join(offloaded) or "none", "autocast" if mixed else settings.precision


def read(path: Path = ROWS) -> list[Row]:
    """All rows, in the file's order. Raises ValueError where two bear one name."""
    rows = [Row.from_json(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    names = [row.name for row in rows]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: two rows are named {next(n for n in names if names.count(n) > 1)!r}")
    return rows


def pair(row: Row) -> Pair:
    """The row with its estimate, or with the sentence that says why there is none."""
    try:
        setup = Setup.from_job(row.setup)
        return Pair(row=row, profile=estimate(setup, largest=False), largest=largest_micro_batch(setup) if row.largest else None)
    except (BadInput, CouldNotRun) as error:
        return Pair(row=row, profile=None, error=str(error).partition("\n")[0])


def pairs(rows: Iterable[Row], on_progress: Callable[[int], None] = lambda _: None) -> list[Pair]:
    """Every row with its estimate."""
    done = []
    for row in rows:
        done.append(pair(row))
        on_progress(len(done))
    return done


# --- which rows speak of what


def accuracy(all_pairs: Iterable[Pair]) -> list[Pair]:
    """Jobs that ran to their end, each once: not the same job under limits, not held-out architectures, not the largest batches."""
    return [p for p in all_pairs if _ran(p) and not (p.row.held_out or p.row.limit_of or p.row.largest)]


def held_out(all_pairs: Iterable[Pair]) -> list[Pair]:
    """Held-out architectures that ran to their end."""
    return [p for p in all_pairs if _ran(p) and p.row.held_out and not (p.row.limit_of or p.row.largest)]


def limited(all_pairs: Iterable[Pair]) -> list[Pair]:
    """Jobs whose verdict can be right or wrong: a limit was set, or they ran out of memory."""
    return [p for p in all_pairs if p.profile is not None and not p.row.largest and (p.row.limit_of or p.row.capacity_bytes is not None or p.row.failed)]


def largest_batches(all_pairs: Iterable[Pair]) -> list[Pair]:
    """Jobs at the largest micro-batch."""
    return [p for p in all_pairs if p.profile is not None and p.row.largest]


def without_estimate(all_pairs: Iterable[Pair]) -> list[Pair]:
    """Rows that no table can speak of."""
    return [p for p in all_pairs if p.profile is None]


def _ran(p: Pair) -> bool:
    return p.profile is not None and not p.row.failed


def limit_ratio(p: Pair, by_name: Mapping[str, Row]) -> float | None:
    """The limit as a multiple of the measured peak allocated without one; None where no run to its end tells that peak."""
    base = by_name.get(p.row.limit_of or "", p.row)
    capacity = p.row.capacity_bytes
    return None if capacity is None or base.failed else capacity / base.peak["allocated_bytes"]
