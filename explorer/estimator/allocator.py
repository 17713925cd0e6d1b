"""A model of PyTorch's CUDA caching allocator: blocks, segments, splitting, merging, release-and-retry (c10/cuda/CUDACachingAllocator.cpp).

Requests are rounded to 512 bytes. Small ones (≤ 1 MiB) are cut from 2 MiB segments, middling ones (< 10 MiB) from 20 MiB
segments, others get segments of their own rounded to 2 MiB. A free block is split only if the rest is worth keeping, so
*allocated* can exceed what was asked. Each CUDA stream has its own free blocks. `expandable.py` has expandable segments, and
`addresses.py` where cudaMalloc puts a segment: of free blocks of one size PyTorch takes the one with the lowest address.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from explorer.estimator.addresses import Addresses

MINIMUM = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT = 10 << 20
PAGE = 2 << 20
"""What a segment of its own is rounded to."""
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Options:
    """PYTORCH_CUDA_ALLOC_CONF, as far as it is modelled, and who sets the limit."""

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    collect_above: float | None = None
    """`garbage_collection_threshold`: of what may be reserved. PyTorch collects under a per-process limit only."""
    divisions: tuple[int, ...] = ()
    """`roundup_power2_divisions` of sizes from 1, 2, 4, … MiB on; () rounds to 512 bytes alone."""
    fraction: bool = True
    """Whether the limit is a per-process one, which PyTorch itself compares with; else the device ends there."""


class Parting(Exception):
    """A request that some of an allocator's limits leave room for and others do not. Nothing has changed but what was released."""

    def __init__(self, needed: int) -> None:
        self.needed = needed
        """Limits from this on are on one side."""
        super().__init__(needed)


_Block = list
"""[bytes, address, whether free, neighbour before, neighbour after, pool, bytes of its segment, age]: a list, since there are a hundred
thousand of them in an estimate and Python makes lists fastest."""
SIZE, ADDRESS, FREE, BEFORE, AFTER, POOL, SEGMENT, AGE = range(8)

_Pool = list[tuple[int, int, _Block]]
"""Free blocks by (size, address): tuples, which Python compares in C; addresses differ, so blocks are never compared."""


class Allocator:
    """The allocator's state, under one limit or under several that have made no difference so far."""

    passes = True
    """Whether a block that is freed before anything else happens changes nothing."""

    def __init__(self, options: Options, limits: Sequence[int] = (UNLIMITED,)) -> None:
        self.options, self.limits = options, limits
        """Of what may be reserved, in ascending order."""
        self.most = options.max_split_bytes if options.max_split_bytes is not None else UNLIMITED
        """Blocks of this size and larger are never split, and serve only requests nearly as large."""
        self.simple = self.most
        """Below it the first block that is large enough is the best fit."""
        self.pools: dict[int, _Pool] = defaultdict(list)
        """By 2 × stream, and one more for small blocks."""
        self.reserved = self.changes = self.retries = 0
        """Bytes of the device; how often that changed; requests for which everything cached was released (`num_alloc_retries`)."""
        self.flushed = False
        """Whether everything cached was released for the request under way, which parted."""
        self.addresses = Addresses()

    def fitting(self, size: int, stream: int) -> int:
        """Position of the best fit among the free blocks of a request's pool; −1 where none fits (`get_free_block`)."""
        pool = self.pools[stream * 2 + (size <= SMALL)]
        i = bisect_left(pool, (size,))
        return i if i < len(pool) and self._may_serve(pool[i][0], size) else -1

    def _may_serve(self, have: int, size: int) -> bool:
        return have < self.most or size >= self.most and have < size + LARGE_SEGMENT

    def kept(self, have: int, size: int) -> int:
        """Bytes of a block of `have` that a request of `size` takes: all of it where the rest is not worth keeping (`should_split`)."""
        worth = have - size >= MINIMUM if size <= SMALL else have - size > SMALL and size < self.most
        return size if worth else have

    def allocate(self, size: int, stream: int) -> _Block | None:
        """A block of at least `size` (already rounded) bytes, or None where the limit leaves no room."""
        key = stream * 2 + (size <= SMALL)
        pool = self.pools[key]
        i = bisect_left(pool, (size,))
        if i < len(pool) and pool[i][0] < self.simple:
            block = pool.pop(i)[2]  # the usual case of `fitting`, without a call
        elif (i := self.fitting(size, stream)) >= 0:
            block = pool.pop(i)[2]
        else:
            block = self._segment(size, key)
            if block is None:
                return None
        have = block[SIZE]
        taken = have if have == size else self.kept(have, size)
        if taken != have:
            address = block[ADDRESS] + size
            rest = [have - size, address, True, block, block[AFTER], key, block[SEGMENT], 0]
            if rest[AFTER] is not None:
                rest[AFTER][BEFORE] = rest
            block[SIZE], block[AFTER] = size, rest
            insort(pool, (have - size, address, rest))
        block[FREE] = False
        return block

    def _segment(self, size: int, key: int) -> _Block | None:
        wanted = device_request(size)
        if not self._room(wanted, size, key):
            return None
        self.reserved += wanted
        self.changes += 1
        return [wanted, self.addresses.take(wanted), True, None, None, key, wanted, 0]

    def _room(self, wanted: int, size: int, key: int) -> bool:
        """Whether `wanted` more bytes may be reserved, after giving cached ones back where the limit asks for it (`malloc`)."""
        if self._beyond(wanted):
            if self.most != UNLIMITED and self._release_large(size, key) and not self._beyond(wanted):
                return True
            if not self.flushed:
                self.release()
                self.retries += 1
                self.flushed = True
            if self._beyond(wanted):
                return False
        self.flushed = False
        return True

    def _beyond(self, wanted: int) -> bool:
        """Whether so many bytes more are beyond the limits. Raises Parting where they are beyond some only."""
        needed = self.reserved + wanted
        if needed <= self.limits[0]:
            return False
        if needed <= self.limits[-1]:
            raise Parting(needed)
        return True

    def release(self) -> None:
        """Give whole free segments back to the device (`release_cached_blocks`, `empty_cache`)."""
        self.changes += 1
        for key in sorted(self.pools, key=lambda key: (key & 1, key)):  # large blocks first, streams in order
            pool = self.pools[key]
            for entry in pool:
                if _whole(entry):
                    self._give_back(entry[2])
            pool[:] = [entry for entry in pool if not _whole(entry)]

    def _give_back(self, block: _Block) -> None:
        """cudaFree of a segment, whose block is no longer in its pool."""
        self.reserved -= block[SEGMENT]
        self.changes += 1
        self.addresses.give(block[ADDRESS], block[SEGMENT])

    def _release_large(self, size: int, key: int) -> bool:
        """With max_split_size: give back one cached block that is large enough, else the largest ones until they are together.

        Returns whether they were (`release_available_cached_blocks`).
        """
        pool = self.pools[key]
        needed = max(size, self.most)
        i = bisect_left(pool, (needed,))
        if i < len(pool):
            self._give_back(pool.pop(i)[2])
            return True
        released = 0
        while pool and released < needed and pool[-1][0] >= self.most:
            released += pool[-1][0]
            self._give_back(pool.pop()[2])
        return released >= needed

    def free(self, block: _Block) -> _Block:
        """Return a block to its pool, merged with free neighbours."""
        size, address, _, before, after, key, _, _ = block
        pool = self.pools[key]
        if after is not None and after[FREE]:
            more = after[SIZE]
            del pool[bisect_left(pool, (more, after[ADDRESS]))]
            block[AFTER] = beyond = after[AFTER]
            if beyond is not None:
                beyond[BEFORE] = block
            size += more
        if before is not None and before[FREE]:
            less = before[SIZE]
            address = before[ADDRESS]
            del pool[bisect_left(pool, (less, address))]
            before[AFTER] = beyond = block[AFTER]
            if beyond is not None:
                beyond[BEFORE] = before
            size += less
            block = before
        block[SIZE], block[FREE] = size, True
        insort(pool, (size, address, block))
        return block

    def layout(self) -> tuple[Any, ...]:
        """What decides where blocks will go, as long as those in use lie where they lie: equal where that is equal."""
        pools = tuple((key, tuple(entry[:2] for entry in pool)) for key, pool in sorted(self.pools.items()) if pool)
        return self.reserved, pools, tuple(self.addresses.holes), tuple(self.addresses.starts)

    def copy(self, live: Mapping[int, _Block], limits: Sequence[int]) -> tuple[Allocator, dict[int, _Block]]:
        """The same state under other limits, and the copies of the blocks in use."""
        other = type(self)(self.options, limits)
        other.reserved, other.changes, other.retries, other.flushed = self.reserved, self.changes, self.retries, self.flushed
        other.addresses = self.addresses.copy()
        copies = {id(block): block.copy() for block in (*live.values(), *self._cached())}
        copies[id(None)] = None
        for copy in copies.values():
            if copy is not None:
                copy[BEFORE], copy[AFTER] = copies[id(copy[BEFORE])], copies[id(copy[AFTER])]
        for key, pool in self.pools.items():
            other.pools[key] = [(size, address, copies[id(block)]) for size, address, block in pool]
        self._copy_more(other, copies)
        return other, {number: copies[id(block)] for number, block in live.items()}

    def _cached(self) -> list[_Block]:
        """Blocks that are not in use."""
        return [entry[2] for pool in self.pools.values() for entry in pool]

    def _copy_more(self, other: Allocator, copies: Mapping[int, _Block]) -> None: ...


class Collecting(Allocator):
    """With `garbage_collection_threshold`: before it asks the device for more, large cached segments that lay unused for longest go back."""

    passes = False

    def __init__(self, options: Options, limits: Sequence[int] = (UNLIMITED,)) -> None:
        super().__init__(options, limits)
        self.searches = [0, 0]
        """Requests so far, of large and of small blocks (`get_free_blocks_call_count`); a free block's AGE is the count when it became free."""

    def allocate(self, size: int, stream: int) -> _Block | None:
        small = size <= SMALL
        self.searches[small] += 1
        block = super().allocate(size, stream)
        if block is not None and (rest := block[AFTER]) is not None and rest[FREE]:
            rest[AGE] = self.searches[small]
        return block

    def free(self, block: _Block) -> _Block:
        block = super().free(block)
        block[AGE] = self.searches[block[POOL] & 1]
        return block

    def _room(self, wanted: int, size: int, key: int) -> bool:
        spare = int(self.options.collect_above * self.limits[0])
        if self.reserved > spare:
            if len(self.limits) > 1:  # how much is collected hangs on the limit
                raise Parting(self.limits[0] + 1)
            self._collect(self.reserved - spare)
        return super()._room(wanted, size, key)

    def _collect(self, wanted: int) -> None:
        """Give back whole segments as old as the average or older, again and again until `wanted` bytes are (`garbage_collect_cached_blocks`)."""
        pools = [self.pools[key] for key in sorted(self.pools) if not key & 1]
        found = True
        while found and wanted > 0:
            ages = [self._age(entry) for pool in pools for entry in pool if _whole(entry)]
            found = bool(ages)
            for pool in pools:
                oldest = [entry for entry in pool if _whole(entry) and self._age(entry) * len(ages) >= sum(ages)]
                for entry in oldest:
                    pool.remove(entry)
                    self._give_back(entry[2])
                    wanted -= entry[0]

    def _age(self, entry: tuple[int, int, _Block]) -> int:
        return self.searches[0] - entry[2][AGE]

    def _copy_more(self, other: Allocator, copies: Mapping[int, _Block]) -> None:
        other.searches = list(self.searches)


def _whole(entry: tuple[int, int, _Block]) -> bool:
    """Whether a free block is a whole segment."""
    return entry[2][BEFORE] is None and entry[2][AFTER] is None


def device_request(size: int) -> int:
    """What PyTorch asks the device for where no free block serves a request, which is what its out-of-memory text prints (`get_allocation_size`)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // PAGE) * PAGE


def rounded(n_bytes: np.ndarray, divisions: Sequence[int] = ()) -> np.ndarray:
    """Bytes of requests as the allocator counts them, 0 for none (`round_size`, `roundup_power2_next_division`)."""
    sizes = (n_bytes + MINIMUM - 1) // MINIMUM * MINIMUM
    if not any(count > 1 for count in divisions):
        return sizes
    floor = np.left_shift(1, np.frexp(np.maximum(n_bytes, 1).astype(np.float64))[1].astype(np.int64) - 1)
    counts = np.array(divisions, dtype=np.int64)[np.clip(np.log2(floor).astype(np.int64) - 20, 0, len(divisions) - 1)]
    part = np.maximum(floor // np.maximum(counts, 1), 1)
    upward = np.where(n_bytes == floor, n_bytes, (n_bytes + part - 1) // part * part)
    return np.where((counts > 1) & (n_bytes > MINIMUM * counts), upward, sizes)
