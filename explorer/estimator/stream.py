"""The one ordered event stream: every block's life from init to the steady step, with who owns it and why.

The allocator, the timeline and the naming of a failing request all read this and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from explorer.profile import BETWEEN, CATEGORIES, Category, Phase, Step

Provenance = Literal["derived", "traced", "assumed"]
PROVENANCES: tuple[Provenance, ...] = ("derived", "traced", "assumed")
COMPUTE, REDUCE, GATHER = range(3)
"""CUDA streams: PyTorch's allocator keeps one pool for each."""


class Mark(NamedTuple):
    """One run of a phase: positions [start, end) in the order. A phase that runs once per micro-batch has several."""

    start: int
    end: int
    step: Step
    phase: Phase


@dataclass(frozen=True, slots=True)
class Stream:
    """Columns by block (numbered from 1; index block − 1) and the order of events: +block allocates, −block frees."""

    bytes: np.ndarray
    """int64, as requested."""
    categories: np.ndarray
    """int8, index into CATEGORIES."""
    provenance: np.ndarray
    """int8, index into PROVENANCES."""
    streams: np.ndarray
    """int8: COMPUTE, REDUCE or GATHER."""
    owners: Sequence[str]
    """A module's or a DeepSpeed buffer's name."""
    order: np.ndarray
    """int64."""
    marks: tuple[Mark, ...]

    @property
    def steady(self) -> int:
        """Position in the order where the steady step begins, after what comes between steps; the order's length where there is none."""
        return next((mark.start for mark in self.marks if mark.step == "steady" and mark.phase not in BETWEEN), len(self.order))

    @property
    def steps(self) -> int:
        """Steps in the steady part: one, or one of each batch where their lengths vary."""
        return max(1, sum(mark.step == "steady" and mark.phase == "step" for mark in self.marks))

    def carried(self) -> dict[int, int]:
        """Block that the steady step finds and frees → the block of the same bytes, stream and owner that it leaves in its place.

        With them the step can follow on itself: DeepSpeed's rules find what the step before left.
        """
        step, made, freed = self.order[self.steady :], *np.zeros((2, len(self.bytes) + 1), bool)
        made[step[step > 0]] = freed[-step[step < 0]] = True
        found, left = np.flatnonzero(freed & ~made), np.flatnonzero(made & ~freed)
        places: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        for block in left.tolist():
            places[self._kind(block)].append(block)
        return {block: places[self._kind(block)].pop(0) for block in found.tolist()}

    def _kind(self, block: int) -> tuple[int, int, str]:
        return int(self.bytes[block - 1]), int(self.streams[block - 1]), self.owners[block - 1]


_CATEGORY = {name: i for i, name in enumerate(CATEGORIES)}
_KINDS = {name: i * len(CATEGORIES) for i, name in enumerate(PROVENANCES)}
_STREAM = len(CATEGORIES) * len(PROVENANCES)


class Writer:
    """Builds a Stream. Blocks of zero bytes are kept out: PyTorch allocates nothing for them."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.kinds: list[int] = []
        """Category, provenance and stream of each block as one number, which is quicker to keep than three."""
        self.owners: list[str] = []
        self.order: list[int] = []
        self.marks: list[Mark] = []

    def allocate(self, n_bytes: int, category: Category, owner: str, provenance: Provenance = "derived", stream: int = COMPUTE) -> int:
        """Allocate a block and return its number (0, which `free` ignores, for no bytes)."""
        if n_bytes <= 0:
            return 0
        self.bytes.append(n_bytes)
        self.kinds.append(_CATEGORY[category] + _KINDS[provenance] + stream * _STREAM)
        self.owners.append(owner)
        number = len(self.bytes)
        self.order.append(number)
        return number

    def free(self, *blocks: int) -> None:
        """Free blocks, in the order given."""
        for block in blocks:
            if block:
                self.order.append(-block)

    def transient(self, n_bytes: int, owner: str, stream: int = COMPUTE) -> None:
        """A temporary that is gone before anything else happens."""
        self.free(self.allocate(n_bytes, "temporary", owner, stream=stream))

    def reserve(self, sizes: np.ndarray, categories: Sequence[int], owners: Sequence[str]) -> int:
        """Number blocks of a tape without allocating them; returns what to add to a tape's block numbers."""
        base = len(self.bytes)
        self.bytes.extend(sizes.tolist())
        traced = _KINDS["traced"] + COMPUTE * _STREAM
        self.kinds.extend([category + traced for category in categories])
        self.owners.extend(owners)
        return base

    def rename(self, block: int, category: Category) -> None:
        """Give a block of a tape another category: a gradient, once it is one."""
        self.kinds[block - 1] += _CATEGORY[category] - self.kinds[block - 1] % len(_CATEGORY)

    def stream_of(self, block: int) -> int:
        """The CUDA stream whose pool a block comes from."""
        return self.kinds[block - 1] // _STREAM

    def mark(self, start: int, step: Step, phase: Phase) -> None:
        """A phase ran from position `start` to here."""
        self.marks.append(Mark(start, len(self.order), step, phase))

    def stream(self) -> Stream:
        """What was written."""
        streams, rest = np.divmod(np.array(self.kinds, dtype=np.int16), _STREAM)
        provenance, categories = np.divmod(rest, len(_CATEGORY))
        return Stream(
            bytes=np.array(self.bytes, dtype=np.int64),
            categories=categories.astype(np.int8),
            provenance=provenance.astype(np.int8),
            streams=streams.astype(np.int8),
            owners=self.owners,
            order=np.array(self.order, dtype=np.int64),
            marks=tuple(self.marks),
        )
