"""A model of PyTorch's CUDA caching allocator: blocks, segments, splitting, merging, release-and-retry (c10/cuda/CUDACachingAllocator.cpp).

Requests are rounded to 512 bytes. Small ones (≤ 1 MiB) are cut from 2 MiB segments, middling ones (< 10 MiB) from 20 MiB
segments, others get segments of their own rounded to 2 MiB. A free block is split only if the rest is worth keeping, so
*allocated* can exceed what was asked. Each CUDA stream has its own free blocks. Expandable segments are one growing
segment per pool and stream, mapped in whole pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MINIMUM = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT = 10 << 20
PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """PYTORCH_CUDA_ALLOC_CONF, as far as it is modelled."""

    expandable_segments: bool = False
    max_split_bytes: int | None = None


UNLIMITED = 1 << 62


class Parting(Exception):
    """A request for memory of the device that some of an allocator's limits leave room for and others do not. Nothing has changed but what was released."""

    def __init__(self, needed: int) -> None:
        self.needed = needed
        """Bytes that would be reserved."""
        super().__init__(needed)


_Block = list
"""[bytes, address, whether free, neighbour before, neighbour after, pool, bytes of its segment]: a list, since there are a hundred
thousand of them in an estimate and Python makes lists fastest."""
SIZE, ADDRESS, FREE, BEFORE, AFTER, POOL, SEGMENT = range(7)

_Pool = list[tuple[int, int, _Block]]
"""Free blocks by (size, address): tuples, which Python compares in C; addresses differ, so blocks are never compared."""


class Allocator:
    """The allocator's state, under one limit or under several that have made no difference so far. Addresses are made up: only their order within and among segments matters."""

    def __init__(self, options: Options, limits: Sequence[int] = (UNLIMITED,)) -> None:
        self.options, self.limits = options, limits
        """Of what may be reserved, in ascending order."""
        self.expandable = options.expandable_segments
        self.most = options.max_split_bytes if options.max_split_bytes is not None and not self.expandable else 1 << 62
        """Blocks of this size and larger are never split, and serve only requests nearly as large."""
        self.pools: dict[int, _Pool] = defaultdict(list)
        self.tails: dict[int, _Block] = {}
        """Expandable segments: the last block of each pool's one segment."""
        self.reserved = 0
        self.next_address = 0

    def fitting(self, size: int, stream: int) -> int:
        """Position of the best fit among the free blocks of a request's pool; −1 where none fits."""
        pool = self.pools[stream * 2 + (size <= SMALL)]
        i = bisect_left(pool, (size,))
        if i == len(pool):
            return -1
        have = pool[i][0]
        if have >= self.most and size > SMALL and (size < self.most or have >= size + LARGE_SEGMENT):
            return -1
        return i

    def kept(self, have: int, size: int) -> int:
        """Bytes of a block of `have` that a request of `size` takes: all of it where the rest is not worth keeping."""
        worth = have - size >= MINIMUM if size <= SMALL or self.expandable else have - size > SMALL and size < self.most
        return size if worth else have

    def allocate(self, size: int, stream: int) -> _Block | None:
        """A block of at least `size` (already rounded) bytes, or None where the limit leaves no room."""
        key = stream * 2 + (size <= SMALL)
        pool = self.pools[key]
        i = bisect_left(pool, (size,))
        if i < len(pool) and pool[i][0] < self.most:
            block = pool.pop(i)[2]  # the usual case of `fitting`, without a call
        elif (i := self.fitting(size, stream)) >= 0:
            block = pool.pop(i)[2]
        else:
            block = self._segment(size, key, size <= SMALL)
            if block is None:
                return None
        have = block[SIZE]
        taken = have if have == size else self.kept(have, size)
        if taken != have:
            address = block[ADDRESS] + size
            rest = [have - size, address, True, block, block[AFTER], key, block[SEGMENT]]
            if rest[AFTER] is not None:
                rest[AFTER][BEFORE] = rest
            block[SIZE], block[AFTER] = size, rest
            if self.expandable and self.tails[key] is block:
                self.tails[key] = rest
            insort(pool, (have - size, address, rest))
        block[FREE] = False
        return block

    def _segment(self, size: int, key: int, small: bool) -> _Block | None:
        if self.expandable:
            return self._grow(size, key)
        wanted = SMALL_SEGMENT if small else LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // PAGE) * PAGE
        if not self._reserve(wanted):
            return None
        self.next_address += 1 << 48
        return [wanted, self.next_address, True, None, None, key, wanted]

    def _reserve(self, wanted: int) -> bool:
        """Take bytes of the device, after giving cached ones back where the limit asks for it."""
        if self._beyond(wanted):
            self.release()
            if self._beyond(wanted):
                return False
        self.reserved += wanted
        return True

    def _beyond(self, wanted: int) -> bool:
        """Whether so many bytes more are beyond the limits. Raises Parting where they are beyond some only."""
        needed = self.reserved + wanted
        if needed <= self.limits[0]:
            return False
        if needed <= self.limits[-1]:
            raise Parting(needed)
        return True

    def _grow(self, size: int, key: int) -> _Block | None:
        """Map pages behind the pool's segment; a free last block grows, else a new one follows it."""
        tail, have, grown = self._growth(size, key)
        if self._beyond(grown):
            self.release()
            tail, have, grown = self._growth(size, key)
            if self._beyond(grown):
                return None
        self.reserved += grown
        if have:
            _remove(self.pools[key], tail)
            tail[SIZE] += grown
            return tail
        if tail is None:
            self.next_address += 1 << 48
            block = [grown, self.next_address, True, None, None, key, 0]
        else:
            block = [grown, tail[ADDRESS] + tail[SIZE], True, tail, None, key, 0]
            tail[AFTER] = block
        self.tails[key] = block
        return block

    def _growth(self, size: int, key: int) -> tuple[_Block | None, int, int]:
        """(last block, its bytes where it is free, bytes to map for `size`)."""
        tail = self.tails.get(key)
        have = tail[SIZE] if tail is not None and tail[FREE] else 0
        return tail, have, -(-(size - have) // PAGE) * PAGE

    def release(self) -> None:
        """Give whole free segments back to the device (`empty_cache`); of an expandable one, the free pages at its end."""
        if self.expandable:
            self._shorten()
            return
        for pool in self.pools.values():
            kept = []
            for entry in pool:
                block = entry[2]
                if block[BEFORE] is None and block[AFTER] is None:
                    self.reserved -= block[SEGMENT]
                else:
                    kept.append(entry)
            pool[:] = kept

    def _shorten(self) -> None:
        for key, tail in list(self.tails.items()):
            if tail[FREE]:
                pages = tail[SIZE] // PAGE * PAGE
                _remove(self.pools[key], tail)
                self.reserved -= pages
                tail[SIZE] -= pages
                if tail[SIZE]:
                    insort(self.pools[key], (tail[SIZE], tail[ADDRESS], tail))
                elif tail[BEFORE] is None:
                    del self.tails[key]
                else:
                    tail[BEFORE][AFTER], self.tails[key] = None, tail[BEFORE]

    def free(self, block: _Block) -> None:
        """Return a block to its pool, merged with free neighbours."""
        size, address, _, before, after, key, _ = block
        pool = self.pools[key]
        if after is not None and after[FREE]:
            more = after[SIZE]
            del pool[bisect_left(pool, (more, after[ADDRESS]))]
            block[AFTER] = beyond = after[AFTER]
            if beyond is not None:
                beyond[BEFORE] = block
            if self.expandable and self.tails[key] is after:
                self.tails[key] = block
            size += more
        if before is not None and before[FREE]:
            less = before[SIZE]
            address = before[ADDRESS]
            del pool[bisect_left(pool, (less, address))]
            before[AFTER] = beyond = block[AFTER]
            if beyond is not None:
                beyond[BEFORE] = before
            if self.expandable and self.tails[key] is block:
                self.tails[key] = before
            size += less
            block = before
        block[SIZE], block[FREE] = size, True
        insort(pool, (size, address, block))

    def copy(self, live: Mapping[int, _Block], limits: Sequence[int]) -> tuple[Allocator, dict[int, _Block]]:
        """The same state under other limits, and the copies of the blocks in use."""
        other = Allocator(self.options, limits)
        other.reserved, other.next_address = self.reserved, self.next_address
        blocks = [*live.values(), *(entry[2] for pool in self.pools.values() for entry in pool)]
        copies = {id(block): block.copy() for block in blocks}
        copies[id(None)] = None
        for copy in copies.values():
            if copy is not None:
                copy[BEFORE], copy[AFTER] = copies[id(copy[BEFORE])], copies[id(copy[AFTER])]
        for key, pool in self.pools.items():
            other.pools[key] = [(size, address, copies[id(block)]) for size, address, block in pool]
        other.tails = {key: copies[id(block)] for key, block in self.tails.items()}
        return other, {number: copies[id(block)] for number, block in live.items()}


def _remove(pool: _Pool, block: _Block) -> None:
    del pool[bisect_left(pool, (block[SIZE], block[ADDRESS]))]
