"""Expandable segments: one range of addresses per stream and pool, mapped page by page (c10/cuda/CUDACachingAllocator.cpp, "Note [Expandable Segments]").

Small blocks have pages of 2 MiB, large ones of 20 MiB. Blocks of a range are a chain of mapped ones, in use or free, and gaps,
which are not mapped; the last is an endless gap. Free neighbours merge, and so do gaps. Where memory runs out, the whole pages
inside **every** free block are unmapped, not those at the end alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

from explorer.estimator.allocator import (
    ADDRESS,
    AFTER,
    BEFORE,
    FREE,
    LARGE_SEGMENT,
    MINIMUM,
    SEGMENT,
    SIZE,
    SMALL,
    SMALL_SEGMENT,
    UNLIMITED,
    Allocator,
    Collecting,
    Options,
    _Block,
    device_request,
)

GAP = -1
"""SEGMENT of a block that is not mapped: it is neither in use nor in a pool."""
ENDLESS = 1 << 61
"""Bytes of a range: PyTorch takes addresses for 1 1/8 of the card, and another range where they do not do, which no job here reaches."""


def make(options: Options, limits: Sequence[int] = (UNLIMITED,)) -> Allocator:
    """The allocator that the options ask for."""
    if options.expandable_segments:
        return Expandable(options, limits)
    return Collecting(options, limits) if options.collect_above and options.fraction else Allocator(options, limits)


class Expandable(Allocator):
    """The allocator with expandable segments."""

    def __init__(self, options: Options, limits: Sequence[int] = (UNLIMITED,)) -> None:
        super().__init__(options, limits)
        self.simple = 0
        self.gaps: dict[int, list[tuple[int, _Block]]] = {}
        """Of each range, by address."""

    def fitting(self, size: int, stream: int) -> int:
        """As `get_free_block`: a block that could grow counts as large as it could become, so a larger one that cannot goes first."""
        pool = self.pools[stream * 2 + (size <= SMALL)]
        i = bisect_left(pool, (size,))
        if i == len(pool):
            return -1
        while i + 1 < len(pool) and _could_be(pool[i + 1][2]) < _could_be(pool[i][2]):
            i += 1
        return i if self._may_serve(pool[i][0], size) else -1

    def kept(self, have: int, size: int) -> int:
        return size if have - size >= MINIMUM else have

    def _segment(self, size: int, key: int) -> _Block | None:
        """Map what a request lacks (`try_allocate_expandable_block`).

        PyTorch compares a per-process limit with what cudaMalloc would be asked for, though fewer or more bytes are mapped.
        """
        needed = device_request(size) if self.options.fraction else self._lacking(self._start(size, key), size, key)
        if not self._room(needed, size, key):
            return None
        block = self._start(size, key)
        if block[SEGMENT] == GAP:
            block = self._map(block, min(size, block[SIZE]), key)
        while block[SIZE] < size:
            gap = block[AFTER]
            block = self._map(gap, min(size - block[SIZE], gap[SIZE]), key)
        del self.pools[key][bisect_left(self.pools[key], (block[SIZE], block[ADDRESS]))]
        return block

    def _start(self, size: int, key: int) -> _Block:
        """The gap with the lowest address at which `size` bytes are free or not mapped, or the free block right before it (`find_expandable_block`)."""
        gaps = self.gaps.setdefault(key, [])
        if not gaps:
            gaps.append((0, [ENDLESS, 0, False, None, None, key, GAP, 0]))
        for _, gap in gaps:
            before = gap[BEFORE]
            start = before if before is not None and before[FREE] else gap
            room, block = 0, start
            while room < size and block is not None and (block[FREE] or block[SEGMENT] == GAP):
                room += block[SIZE]
                block = block[AFTER]
            if room >= size:
                return start
        raise AssertionError("the last gap has no end")

    def _lacking(self, start: _Block, size: int, key: int) -> int:
        """Bytes to map so that `size` bytes from `start` on are."""
        have = lacking = 0
        while have < size:
            mapped = start[SIZE] if start[FREE] else min(start[SIZE], _pages(size - have, key))
            lacking += 0 if start[FREE] else mapped
            have += mapped
            start = start[AFTER]
        return lacking

    def _map(self, gap: _Block, size: int, key: int) -> _Block:
        """Map the first pages of a gap; the free block that they are part of now (`map_block`)."""
        gaps = self.gaps[key]
        del gaps[bisect_left(gaps, (gap[ADDRESS],))]
        mapped = min(gap[SIZE], _pages(size, key))
        if mapped < gap[SIZE]:
            rest = [gap[SIZE] - mapped, gap[ADDRESS] + mapped, False, gap, gap[AFTER], key, GAP, 0]
            _link(gap, rest, gap[AFTER])
            insort(gaps, (rest[ADDRESS], rest))
        gap[SIZE], gap[SEGMENT] = mapped, 0
        self.reserved += mapped
        self.changes += 1
        return self.free(gap)

    def release(self) -> None:
        """Unmap the whole pages inside every free block (`release_cached_blocks`)."""
        self.changes += 1
        for key in sorted(self.pools, key=lambda key: (key & 1, key)):
            for _, _, block in list(self.pools[key]):
                self._unmap(block, key)

    def _unmap(self, block: _Block, key: int) -> None:
        page, address, end = _page(key), block[ADDRESS], block[ADDRESS] + block[SIZE]
        first, last = -(-address // page) * page, end // page * page
        if first >= last:
            return
        pool = self.pools[key]
        del pool[bisect_left(pool, (block[SIZE], address))]
        if first > address:
            _link(block[BEFORE], left := [first - address, address, True, None, None, key, 0, 0], block)
            insort(pool, (left[SIZE], address, left))
        if last < end:
            _link(block, right := [end - last, last, True, None, None, key, 0, 0], block[AFTER])
            insort(pool, (right[SIZE], last, right))
        block[ADDRESS], block[SIZE], block[FREE], block[SEGMENT] = first, last - first, False, GAP
        self.reserved -= last - first
        self._merge_gaps(block, self.gaps[key])

    def _merge_gaps(self, gap: _Block, gaps: list[tuple[int, _Block]]) -> None:
        """A new gap, one with those beside it."""
        for near in (gap[BEFORE], gap[AFTER]):
            if near is None or near[SEGMENT] != GAP:
                continue
            del gaps[bisect_left(gaps, (near[ADDRESS],))]
            gap[SIZE] += near[SIZE]
            if near is gap[BEFORE]:
                gap[ADDRESS] = near[ADDRESS]
                _link(near[BEFORE], gap, gap[AFTER])
            else:
                _link(gap[BEFORE], gap, near[AFTER])
        insort(gaps, (gap[ADDRESS], gap))

    def _release_large(self, size: int, key: int) -> bool:
        """Only segments of cudaMalloc go back one by one."""
        return False

    def layout(self) -> tuple[Any, ...]:
        gaps = tuple((key, tuple((address, gap[SIZE]) for address, gap in gaps)) for key, gaps in sorted(self.gaps.items()))
        return *super().layout(), gaps

    def _cached(self) -> list[_Block]:
        return [*super()._cached(), *(gap for gaps in self.gaps.values() for _, gap in gaps)]

    def _copy_more(self, other: Allocator, copies: Mapping[int, _Block]) -> None:
        other.gaps = {key: [(address, copies[id(gap)]) for address, gap in gaps] for key, gaps in self.gaps.items()}


def _page(key: int) -> int:
    return SMALL_SEGMENT if key & 1 else LARGE_SEGMENT


def _pages(size: int, key: int) -> int:
    """Bytes in whole pages of a pool."""
    return -(-size // _page(key)) * _page(key)


def _could_be(block: _Block) -> int:
    """Bytes of a free block and the gap behind it."""
    after = block[AFTER]
    return block[SIZE] + (after[SIZE] if after is not None and after[SEGMENT] == GAP else 0)


def _link(before: _Block | None, block: _Block, after: _Block | None) -> None:
    """Put a block between two."""
    block[BEFORE], block[AFTER] = before, after
    if before is not None:
        before[AFTER] = block
    if after is not None:
        after[BEFORE] = block
