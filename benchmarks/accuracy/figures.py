"""Errors, and the bars they are held against: the arithmetic of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.accuracy.rows import Pair, Row, limit_ratio
from explorer.estimator.host import NCCL_BYTES
from explorer.profile import CATEGORIES
from explorer.units import MiB

PINNED_LEAST_BYTES = MiB
"""A job that pins less than this pins nothing: a few bytes of flags have no relative error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Errors of one quantity over some rows, as fractions, and the most that each statistic may be."""

    name: str
    errors: tuple[float, ...]
    """Signed: estimated above measured is positive."""
    names: tuple[str, ...] = ()
    """Of the rows, in the errors' order."""
    bars: Mapping[str, float] = field(default_factory=dict)
    """"median", "95th percentile" or "worst" → the most it may be."""

    @property
    def statistics(self) -> dict[str, float]:
        """Of the errors' sizes; empty where there are none. The 95th percentile is the nearest rank: a row's own error, never a mean of two."""
        if not self.errors:
            return {}
        sizes = np.abs(self.errors)
        return {"median": float(np.median(sizes)), "95th percentile": float(np.percentile(sizes, 95, method="inverted_cdf")), "worst": float(sizes.max())}

    @property
    def worst_row(self) -> str:
        """The row that is farthest off; empty where there are none."""
        return self.names[int(np.abs(self.errors).argmax())] if self.names else ""

    @property
    def missed(self) -> list[str]:
        """The statistics that are above their bar."""
        found = self.statistics
        return [name for name, most in self.bars.items() if name in found and found[name] > most]


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """So many of so many rows, and the largest share that may be."""

    name: str
    count: int
    rows: int
    most: float

    @property
    def share(self) -> float:
        """0 where there are no rows."""
        return self.count / self.rows if self.rows else 0.0

    @property
    def missed(self) -> list[str]:
        """"share" where it is above the bar."""
        return ["share"] if self.share > self.most else []


def relative(estimated: float, measured: float) -> float:
    """The error as a fraction of what was measured."""
    return estimated / measured - 1


def _figure(name: str, found: Iterable[tuple[str, float]], bars: Mapping[str, float]) -> Figure:
    """Of (row, error)."""
    both = list(found)
    return Figure(name=name, errors=tuple(error for _, error in both), names=tuple(row for row, _ in both), bars=bars)


# --- peak allocated, phases, reserved


def peak_allocated(pairs: Sequence[Pair], name: str = "peak allocated", bars: Mapping[str, float] | None = None) -> Figure:
    """The highest allocated bytes of the whole run."""
    found = ((p.row.name, relative(p.profile.peak.allocated_bytes, p.row.peak["allocated_bytes"])) for p in pairs)
    return _figure(name, found, {"median": 0.005, "95th percentile": 0.02, "worst": 0.05} if bars is None else bars)


def under_estimates(pairs: Sequence[Pair]) -> Count:
    """Rows whose peak is estimated more than 1 % too low."""
    low = [p for p in pairs if p.profile.peak.allocated_bytes < 0.99 * p.row.peak["allocated_bytes"]]
    return Count(name="peak under-estimated by more than 1 %", count=len(low), rows=len(pairs), most=0.02)


_PHASES = (
    ("init, peak", "first", "init", "peak_allocated_bytes", True),
    ("forward, peak", "steady", "forward", "peak_allocated_bytes", False),
    ("forward, end", "steady", "forward", "end_allocated_bytes", True),
    ("backward, peak", "steady", "backward", "peak_allocated_bytes", False),
    ("backward, end", "steady", "backward", "end_allocated_bytes", True),
    ("step, peak", "steady", "step", "peak_allocated_bytes", True),
    ("step, end", "steady", "step", "end_allocated_bytes", False),
    ("first step: forward, peak", "first", "forward", "peak_allocated_bytes", False),
    ("first step: backward, peak", "first", "backward", "peak_allocated_bytes", False),
    ("first step: step, peak", "first", "step", "peak_allocated_bytes", False),
)
"""(name, step, phase, reading, whether a bar was set for it)."""


def phases(pairs: Sequence[Pair]) -> list[Figure]:
    """Allocated bytes at the peak and at the end of every phase."""
    return [_phase(pairs, *which) for which in _PHASES]


def _phase(pairs: Sequence[Pair], name: str, step: str, phase: str, reading: str, barred: bool) -> Figure:
    both = [(p.row.name, *found) for p in pairs if (found := p.phase(step, phase)) is not None]
    return _figure(name, ((row, relative(getattr(ours, reading), theirs[reading])) for row, ours, theirs in both if theirs[reading]), {"median": 0.01} if barred else {})


def reserved(pairs: Sequence[Pair]) -> Figure:
    """The most that PyTorch held of the device, of rows without a limit."""
    found = ((p.row.name, relative(p.profile.peak.reserved_bytes, p.row.peak["reserved_bytes"])) for p in pairs if p.row.capacity_bytes is None)
    return _figure("peak reserved", found, {"median": 0.01, "95th percentile": 0.03, "worst": 0.05})


def categories(pairs: Sequence[Pair]) -> list[Figure]:
    """Each category at the peak, its error as a fraction of the peak."""
    known = [p for p in pairs if p.row.at_peak is not None]
    return [_figure(name, ((p.row.name, _of_peak(p, name)) for p in known), {"median": 0.01, "worst": 0.03}) for name in CATEGORIES]


def _of_peak(p: Pair, category: str) -> float:
    return (p.profile.at_peak.get(category, 0) - p.row.at_peak.get(category, 0)) / p.row.peak["allocated_bytes"]


# --- host


def host_pinned(pairs: Sequence[Pair]) -> Figure:
    """Pinned host memory, of rows that pin any or are said to."""
    both = [(p.row.name, p.profile.host.pinned_bytes, p.row.host["pinned_bytes"]) for p in pairs if "pinned_bytes" in p.row.host]
    found = ((row, relative(ours, theirs) if theirs else float("inf")) for row, ours, theirs in both if max(ours, theirs) >= PINNED_LEAST_BYTES)
    return _figure("host, pinned", found, {"worst": 0.02})


def host_resident(pairs: Sequence[Pair]) -> Figure:
    """Resident host memory of the process. A row that stood in for a rank of several loaded no NCCL."""
    found = ((p.row.name, relative(p.profile.host.resident_bytes - (NCCL_BYTES if p.row.stood_in else 0), p.row.host["resident_bytes"])) for p in pairs if p.row.host.get("resident_bytes"))
    return _figure("host, resident", found, {"worst": 0.10})


def host_offloaded(pairs: Sequence[Pair]) -> Figure:
    """The same, of jobs that keep DeepSpeed's tensors on the host."""
    offloaded = [p for p in pairs if p.profile.host.pinned_bytes + p.profile.host.pageable_bytes]
    return replace(host_resident(offloaded), name="host, resident, of offloaded jobs")


# --- verdicts


LIMITS = (0.97, 1.30)
"""Limits as multiples of the measured peak between which the bars on verdicts hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A verdict, the limit as a multiple of the peak (None: unknown), and what happened."""

    name: str
    ratio: float | None
    answer: str | None
    ran: bool

    @property
    def wrong(self) -> str:
        """"false fit", "false does-not-fit", or empty; tight is never wrong, only counted."""
        if self.answer == "fits" and not self.ran:
            return "false fit"
        return "false does-not-fit" if self.answer == "does not fit" and self.ran else ""


def judged(pairs: Iterable[Pair], by_name: Mapping[str, Row]) -> list[Judged]:
    """Every verdict that a run confirmed or refuted."""
    return [Judged(name=p.row.name, ratio=limit_ratio(p, by_name), answer=p.profile.verdict.answer, ran=not p.row.failed) for p in pairs]


def in_range(verdicts: Iterable[Judged]) -> list[Judged]:
    """Those the bars speak of; a limit whose ratio nobody knows counts too."""
    return [v for v in verdicts if v.ratio is None or LIMITS[0] <= v.ratio <= LIMITS[1]]


def verdict_counts(verdicts: Sequence[Judged]) -> list[Count]:
    """False fits, false does-not-fits, and the share of tight."""
    inside = in_range(verdicts)
    return [
        Count(name="called a fit, ran out of memory", count=sum(v.wrong == "false fit" for v in inside), rows=len(inside), most=0.0),
        Count(name="called does not fit, ran", count=sum(v.wrong == "false does-not-fit" for v in inside), rows=len(inside), most=0.0),
        Count(name="called tight", count=sum(v.answer == "tight" for v in inside), rows=len(inside), most=0.35),
    ]


def largest_that_failed(pairs: Sequence[Pair]) -> list[Pair]:
    """Rows that ran out of memory at a micro-batch that is within today's answer, which says that every one up to it fits."""
    return [p for p in pairs if p.row.failed and (p.largest or 0) >= p.row.setup["micro_batch"]]


# --- by what the jobs are


def grouped(pairs: Iterable[Pair], by: Callable[[Pair], object]) -> dict[object, list[Pair]]:
    """Pairs by some property of theirs, in the properties' order."""
    groups: dict[object, list[Pair]] = {}
    for p in pairs:
        groups.setdefault(by(p), []).append(p)
    return dict(sorted(groups.items(), key=lambda item: item[0] if isinstance(item[0], tuple) else (str(item[0]).lower(),)))


def worst(pairs: Sequence[Pair], n: int = 10) -> list[Pair]:
    """The n rows whose peak allocated is farthest off, worst first."""
    return sorted(pairs, key=lambda p: -abs(relative(p.profile.peak.allocated_bytes, p.row.peak["allocated_bytes"])))[:n]
