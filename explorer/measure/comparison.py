"""Two records side by side: what memory differs, and what differs in the jobs and in what they ran on, key by key. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from explorer.jsonfile import differences
from explorer.measure.recordfile import Record
from explorer.profile import Difference, difference

_NO_DIFFERENCE = ("schema", "date")
"""Keys that say nothing of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One key that two records give differently; None stands for one that is not given."""

    key: str
    """With dots between levels: "deepspeed.zero_optimization.stage"."""
    first: Any
    second: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two records and what differs between them."""

    first: Record
    second: Record
    memory: Difference
    """What the second has beyond the first, in bytes."""
    setups: tuple[Change, ...]
    environments: tuple[Change, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; `changes` maps each key to its two values."""
        return {
            "first": self.first.name,
            "second": self.second.name,
            "peak_allocated_bytes": self.memory.peak_allocated_bytes,
            "peak_reserved_bytes": self.memory.peak_reserved_bytes,
            "by_category": dict(self.memory.by_category),
            "changes": {change.key: [change.first, change.second] for change in self.setups},
            "environment": {change.key: [change.first, change.second] for change in self.environments},
        }


def compare(first: Record, second: Record) -> Comparison:
    """What the second record has beyond the first, and what was different in its job and its machine."""
    return Comparison(
        first=first,
        second=second,
        memory=difference(second.profile, first.profile),
        setups=_changes(first.setup.to_job(), second.setup.to_job()),
        environments=_changes(first.profile.environment, second.profile.environment),
    )


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Change, ...]:
    return tuple(Change(key=".".join(keys), first=one, second=other) for keys, one, other in differences(first, second) if keys[-1] not in _NO_DIFFERENCE)
