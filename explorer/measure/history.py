"""Every allocation and free of a run, in order, and what each block was. No torch: it reads what run.py collected.

Marks are tiny allocations of sizes nothing else has, made by meter.py at each moment that matters; found again in the
history, they place that moment exactly, whatever the clocks say.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from explorer.profile import CATEGORIES

MARK_BYTES = 9_973
"""Size of the first mark's block; the k-th has `MARK_BYTES + MARK_STEP * (k % MARK_CYCLE)` bytes."""
MARK_STEP, MARK_CYCLE = 2, 4096


class Event(NamedTuple):
    """`size` bytes at `address` on `stream` allocated, or freed where `size` is negative."""

    size: int
    address: int
    stream: int = 0
    block: int = 0
    """Bytes of the block as the allocator counts them, at least as many; an allocation's only."""


@dataclass(slots=True)
class Mark:
    """A moment of the run: a label, and what some addresses were at that moment."""

    label: str
    owners: dict[int, str] = field(default_factory=dict)
    """Address → category, of blocks alive then."""
    position: int = -1
    """Events before it, once it has been found."""
    block: int = 0
    """Bytes that its own block took for a moment."""


def mark_size(index: int) -> int:
    """Bytes of the block that marks moment `index`."""
    return MARK_BYTES + MARK_STEP * (index % MARK_CYCLE)


def place(events: Sequence[Event], marks: Sequence[Mark]) -> list[Event]:
    """Set every mark's position and return the events without the marks' own. Marks whose block is missing keep −1."""
    kept: list[Event] = []
    waiting = 0
    i = 0
    while i < len(events):
        event = events[i]
        following = events[i + 1] if i + 1 < len(events) else None
        if waiting < len(marks) and event.size == mark_size(waiting) and following is not None and following.size < 0 and following.address == event.address:
            marks[waiting].position, marks[waiting].block = len(kept), event.block
            waiting += 1
            i += 2
            continue
        kept.append(event)
        i += 1
    return kept


@dataclass(slots=True)
class Blocks:
    """Columns by block: first and last event (the last is len(events) where it was never freed), the block's bytes, category."""

    start: np.ndarray
    end: np.ndarray
    size: np.ndarray
    address: np.ndarray
    stream: np.ndarray
    category: list[str]


def blocks(events: Sequence[Event]) -> Blocks:
    """Pair allocations with frees."""
    start, end, size, address, stream = [], [], [], [], []
    live: dict[int, int] = {}
    for i, event in enumerate(events):
        if event.size > 0:
            if event.address in live:  # its free was not seen
                end[live[event.address]] = i
            live[event.address] = len(start)
            start.append(i)
            end.append(len(events))
            size.append(event.block)
            address.append(event.address)
            stream.append(event.stream)
        elif event.size < 0 and event.address in live:
            end[live.pop(event.address)] = i
    columns = (np.array(x, dtype=np.int64) for x in (start, end, size, address, stream))
    return Blocks(*columns, category=[""] * len(start))


def name_blocks(found: Blocks, marks: Sequence[Mark], n_events: int, cut_short: int | None, gathers: Collection[int] = ()) -> None:
    """Give every block its category: what the engine called it at some mark; else by the stream it was made on (`gathers`: those
    that ZeRO-3 gathers parameters on) or the forward it outlived; else temporary.

    What a forward made and nothing ever freed is no activation but a workspace. `cut_short`: events before memory ran out, where
    it did: a forward that it ended is named by what lived then.
    """
    _by_owner(found, marks)
    for begin, finish in _forwards(marks, cut_short):
        inside = np.flatnonzero((found.start >= begin) & (found.start < finish) & (found.end >= finish) & ((found.end < n_events) | (cut_short is not None)))
        for i in inside:
            if not found.category[i] and int(found.stream[i]) not in gathers:
                found.category[i] = "activations"
    for i, category in enumerate(found.category):
        if not category:
            found.category[i] = "gathered" if int(found.stream[i]) in gathers else "temporary"


def _by_owner(found: Blocks, marks: Sequence[Mark]) -> None:
    """A mark names the block that lives at an address at that moment; addresses are used again, so it is looked up by time."""
    by_address: dict[int, tuple[list[int], list[int]]] = {}
    for i, (address, start) in enumerate(zip(found.address.tolist(), found.start.tolist(), strict=True)):
        starts, numbers = by_address.setdefault(address, ([], []))
        starts.append(start)
        numbers.append(i)
    ends = found.end.tolist()
    for mark in marks:
        if mark.position < 0:
            continue
        for address, category in mark.owners.items():
            starts, numbers = by_address.get(address, ((), ()))
            at = bisect_left(starts, mark.position) - 1
            if at >= 0 and ends[numbers[at]] >= mark.position and not found.category[numbers[at]]:
                found.category[numbers[at]] = category


def _forwards(marks: Sequence[Mark], cut_short: int | None) -> Iterable[tuple[int, int]]:
    """(first event, event after the last) of every forward and every recomputed forward, outermost ones.

    `cut_short`: events before memory ran out inside one.
    """
    begin, depth = -1, 0
    for mark in marks:
        if mark.position < 0:
            continue
        if mark.label in ("forward begins", "recompute begins"):
            if depth == 0:
                begin = mark.position
            depth += 1
        elif mark.label in ("forward ends", "recompute ends") and depth:
            depth -= 1
            if depth == 0:
                yield begin, mark.position
    if depth and cut_short is not None:
        yield begin, cut_short


def highest(found: Blocks, begin: int, end: int) -> int:
    """Events before the highest point of what was allocated within [begin, end]."""
    return begin + int(level(found, begin, end).argmax())


def highest_with_marks(found: Blocks, marks: Sequence[Mark], begin: int, end: int) -> int:
    """The most bytes allocated within [begin, end], the blocks of `marks` included: what a counter has seen."""
    curve = level(found, begin, end)
    return max(int(curve.max()), *(int(curve[m.position - begin]) + m.block for m in marks if begin <= m.position <= end), 0)


def categories_at(found: Blocks, at: int) -> dict[str, int]:
    """Category → bytes alive after `at` events."""
    alive = np.flatnonzero((found.start < at) & (found.end >= at))
    sums = dict.fromkeys(CATEGORIES, 0)
    for i in alive:
        category = found.category[i]
        if category in sums:
            sums[category] += int(found.size[i])
    return sums


def level(found: Blocks, begin: int, end: int) -> np.ndarray:
    """Allocated bytes after `begin` events and after each one up to `end`."""
    change = np.zeros(end + 2, dtype=np.int64)
    np.add.at(change, np.minimum(found.start + 1, end + 1), found.size)
    np.add.at(change, np.minimum(found.end + 1, end + 1), -found.size)
    return np.cumsum(change)[begin : end + 1]


def owners_of(named: Mapping[int, str]) -> dict[int, str]:
    """A copy without the null address, which empty tensors have."""
    return {address: category for address, category in named.items() if address}
