"""Public measurements that others published, set up here as jobs: what they read, and what is estimated for the same job.

`reports.json` holds a job, the figures as printed with their source, and a sentence why they may differ. Only reports that say
enough to be set up are there: docs/accuracy.md lists what was left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from explorer import Setup, estimate
from explorer.errors import BadInput, CouldNotRun
from explorer.profile import Profile

REPORTS = Path(__file__).parent / "reports.json"

READINGS: Mapping[str, Callable[[Profile], tuple[int, int]]] = {
    "peak allocated": lambda p: (p.peak.allocated_bytes,) * 2,
    "allocated after a step": lambda p: (p.phase("steady", "step").end_allocated_bytes,) * 2,
    "peak reserved": lambda p: (p.peak.reserved_bytes,) * 2,
    "unsaid": lambda p: (p.peak.allocated_bytes, p.peak.reserved_bytes + p.outside_pytorch_bytes),
}
"""What a report read → (lowest, highest) of the same in a Profile. A report that does not say what it read may mean anything from peak
allocated to what nvidia-smi shows, which is reserved bytes, CUDA context and NCCL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One published figure beside ours, in bytes."""

    id: str
    what: str
    source: str
    reading: str
    reported_bytes: float
    ours_bytes: tuple[int, int] | None
    """(lowest, highest), alike where the reading is a definite one; None where there is no estimate."""
    why: str

    @property
    def error(self) -> float | None:
        """Ours against theirs, as a fraction, from the nearer end of the range; 0 within it."""
        if self.ours_bytes is None:
            return None
        nearest = min(max(self.reported_bytes, self.ours_bytes[0]), self.ours_bytes[1])
        return nearest / self.reported_bytes - 1


def readings(path: Path = REPORTS) -> list[Reading]:
    """Every published figure with its estimate; a model without a shipped tape is recorded, which needs torch."""
    result = []
    for report in json.loads(path.read_text(encoding="utf-8")):
        try:
            profile = estimate(Setup.from_job(report["job"]), largest=False)
        except (BadInput, CouldNotRun):
            profile = None
        for read in report["read"]:
            ours = None if profile is None else READINGS[read["what"]](profile)
            result.append(Reading(id=report["id"], what=report["what"], source=report["source"], reading=read["what"], reported_bytes=read["bytes"], ours_bytes=ours, why=report["why"]))
    return result
