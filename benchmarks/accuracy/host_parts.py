"""Fit what CUDA's parts take of a process's host memory on the measured rows, and say how well that holds elsewhere.

    python -m benchmarks.accuracy.host_parts

Prints each part's bytes, fitted by least squares on the relative error of the resident memory, beside those that the estimate has;
and the errors of both, and of fits that have never seen the architecture they are asked about (leave one family out).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.accuracy.rows import Row, read
from explorer import Setup
from explorer.dsconfig.dataloader import loader
from explorer.estimator import host
from explorer.estimator.work import Work


@dataclass(frozen=True, slots=True)
class Reading:
    """One row that ran to its end: how often it has each part, the bytes of its tensors, and what was measured."""

    name: str
    family: str
    counts: tuple[float, ...]
    tensors_bytes: int
    measured_bytes: int

    @classmethod
    def of(cls, row: Row) -> Reading:
        """A row with resident memory. One that stood in for a rank of several loaded no NCCL."""
        work = Work(Setup.from_job(row.setup), None)
        found = dict(host.parts(work.rules, work.tape, work.model, work.setup.attention))
        found["nccl"] = not row.stood_in
        held = work.rules.host.pinned_bytes + work.rules.host.pageable_bytes
        pinned = host.loader_bytes(loader(work.setup), work.batch_bytes)
        return cls(row.name, work.model.family, tuple(float(found[part]) for part in host.PARTS), held + pinned, row.host["resident_bytes"])


def fit(readings: Sequence[Reading]) -> np.ndarray:
    """Bytes of each part, so that the squares of the relative errors are least."""
    measured = np.array([r.measured_bytes for r in readings], dtype=float)
    counts = np.array([r.counts for r in readings]) / measured[:, None]
    rest = np.array([r.measured_bytes - r.tensors_bytes for r in readings]) / measured
    return np.linalg.lstsq(counts, rest, rcond=None)[0]


def errors(readings: Sequence[Reading], parts: np.ndarray) -> np.ndarray:
    """Estimated ÷ measured − 1, of each."""
    return np.array([(np.dot(r.counts, parts) + r.tensors_bytes) / r.measured_bytes - 1 for r in readings])


def held_out(readings: Sequence[Reading]) -> np.ndarray:
    """The errors of fits that left the reading's own family out."""
    found = np.zeros(len(readings))
    for family in {r.family for r in readings}:
        inside = np.array([r.family == family for r in readings])
        others = fit([r for r in readings if r.family != family])
        found[inside] = errors([r for r in readings if r.family == family], others)
    return found


def main() -> None:
    """Print the fit."""
    readings = [Reading.of(row) for row in read() if not row.failed and row.host.get("resident_bytes")]
    fitted, used = fit(readings), np.array(list(host.PARTS.values()), dtype=float)
    print(f"{len(readings)} rows that ran to their end, {len({r.family for r in readings})} families", "", f"{'part':24}{'fitted, MB':>12}{'used, MB':>12}", sep="\n")
    for part, ours, theirs in zip(host.PARTS, fitted, used, strict=True):
        print(f"{part:24}{ours / 1e6:12.1f}{theirs / 1e6:12.1f}")
    print()
    for name, found in (("used", errors(readings, used)), ("fitted", errors(readings, fitted)), ("family left out", held_out(readings))):
        sizes = 100 * np.abs(found)
        p95 = np.percentile(sizes, 95, method="inverted_cdf")
        print(f"{name:24}median {np.median(sizes):.2f} %, 95th percentile {p95:.2f} %, worst {sizes.max():.2f} %, beyond 10 %: {int((sizes > 10).sum())}")
        for i in np.argsort(-sizes)[:12]:
            print(f"    {readings[i].name:32}{100 * found[i]:+8.1f} %")


if __name__ == "__main__":
    main()
