"""A model of PyTorch's CUDA caching allocator: blocks, segments, splitting, merging, release-and-retry (c10/cuda/CUDACachingAllocator.cpp).

Requests are rounded to 512 bytes. Small ones (≤ 1 MiB) are cut from 2 MiB segments, middling ones (< 10 MiB) from 20 MiB
segments, others get segments of their own rounded to 2 MiB. A free block is split only if the rest is worth keeping, so
*allocated* can exceed what was asked. Each CUDA stream has its own free blocks. Expandable segments are one growing
segment per pool and stream, mapped in whole pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from explorer.estimator.stream import Stream

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


class OutOfMemory(Exception):
    """A request that the limit leaves no room for."""

    def __init__(self, position: int, block: int, requested: int, allocated: int, reserved: int) -> None:
        self.position, self.block, self.requested, self.allocated, self.reserved = position, block, requested, allocated, reserved
        super().__init__(requested)


class _Block:
    __slots__ = ("size", "address", "pool", "free", "before", "after", "segment")

    def __init__(self, size: int, address: int, pool: int, segment: int) -> None:
        self.size, self.address, self.pool, self.segment = size, address, pool, segment
        self.free = True
        self.before: _Block | None = None
        self.after: _Block | None = None


_Pool = list[tuple[int, int, _Block]]
"""Free blocks by (size, address): tuples, which Python compares in C; addresses differ, so blocks are never compared."""


@dataclass(slots=True)
class Usage:
    """allocated and reserved bytes after each event of a stream (int64, one longer than the order: index 0 is before the first)."""

    allocated: np.ndarray
    reserved: np.ndarray
    sizes: np.ndarray
    """Bytes of each block as the allocator counts them: rounded, and more where it was not split."""
    failure: OutOfMemory | None = field(default=None)


class Allocator:
    """The allocator's state. Addresses are made up: only their order within and among segments matters."""

    def __init__(self, options: Options, limit: int | None) -> None:
        self.options, self.limit = options, limit
        self.pools: dict[int, _Pool] = {}
        self.tails: dict[int, _Block] = {}
        """Expandable segments: the last block of each pool's one segment."""
        self.allocated = self.reserved = 0
        self.next_address = 0

    def allocate(self, size: int, stream: int) -> _Block | None:
        """A block of at least `size` (already rounded) bytes, or None where the limit leaves no room."""
        small = size <= SMALL
        key = stream * 2 + small
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = []
        block = self._best_fit(pool, size, small)
        if block is None:
            block = self._segment(size, key, small)
            if block is None:
                return None
        rest = block.size - size
        if (rest >= MINIMUM if small or self.options.expandable_segments else rest > SMALL and self._may_split(size)):
            self._split(block, size, pool)
        block.free = False
        self.allocated += block.size
        return block

    def _may_split(self, size: int) -> bool:
        return self.options.max_split_bytes is None or size < self.options.max_split_bytes

    def _best_fit(self, pool: _Pool, size: int, small: bool) -> _Block | None:
        i = bisect_left(pool, (size,))
        if i == len(pool):
            return None
        block = pool[i][2]
        most = self.options.max_split_bytes
        if most is not None and not small and not self.options.expandable_segments:
            if (size < most <= block.size) or (size >= most and block.size >= size + LARGE_SEGMENT):
                return None
        del pool[i]
        return block

    def _segment(self, size: int, key: int, small: bool) -> _Block | None:
        if self.options.expandable_segments:
            return self._grow(size, key)
        wanted = SMALL_SEGMENT if small else LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // PAGE) * PAGE
        if not self._reserve(wanted):
            return None
        self.next_address += 1 << 48
        return _Block(wanted, self.next_address, key, wanted)

    def _reserve(self, wanted: int) -> bool:
        """Take bytes of the device, after giving cached ones back where the limit asks for it."""
        if self.limit is not None and self.reserved + wanted > self.limit:
            self.release()
            if self.reserved + wanted > self.limit:
                return False
        self.reserved += wanted
        return True

    def _grow(self, size: int, key: int) -> _Block | None:
        """Map pages behind the pool's segment; a free last block grows, else a new one follows it."""
        tail, have, grown = self._growth(size, key)
        if self.limit is not None and self.reserved + grown > self.limit:
            self.release()
            tail, have, grown = self._growth(size, key)
            if self.reserved + grown > self.limit:
                return None
        self.reserved += grown
        if have:
            _remove(self.pools[key], tail)
            tail.size += grown
            return tail
        if tail is None:
            self.next_address += 1 << 48
            block = _Block(grown, self.next_address, key, 0)
        else:
            block = _Block(grown, tail.address + tail.size, key, 0)
            block.before, tail.after = tail, block
        self.tails[key] = block
        return block

    def _growth(self, size: int, key: int) -> tuple[_Block | None, int, int]:
        """(last block, its bytes where it is free, bytes to map for `size`)."""
        tail = self.tails.get(key)
        have = tail.size if tail is not None and tail.free else 0
        return tail, have, -(-(size - have) // PAGE) * PAGE

    def release(self) -> None:
        """Give whole free segments back to the device (`empty_cache`); of an expandable one, the free pages at its end."""
        if self.options.expandable_segments:
            self._shorten()
            return
        for pool in self.pools.values():
            kept = []
            for entry in pool:
                block = entry[2]
                if block.before is None and block.after is None:
                    self.reserved -= block.segment
                else:
                    kept.append(entry)
            pool[:] = kept

    def _shorten(self) -> None:
        for key, tail in list(self.tails.items()):
            if tail.free:
                pages = tail.size // PAGE * PAGE
                _remove(self.pools[key], tail)
                self.reserved -= pages
                tail.size -= pages
                if tail.size:
                    _insert(self.pools[key], tail)
                elif tail.before is None:
                    del self.tails[key]
                else:
                    tail.before.after, self.tails[key] = None, tail.before

    def _split(self, block: _Block, size: int, pool: _Pool) -> None:
        rest = _Block(block.size - size, block.address + size, block.pool, block.segment)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        if self.tails.get(block.pool) is block:
            self.tails[block.pool] = rest
        _insert(pool, rest)

    def free(self, block: _Block) -> None:
        """Return a block to its pool, merged with free neighbours."""
        self.allocated -= block.size
        pool = self.pools[block.pool]
        before, after = block.before, block.after
        if before is not None and before.free:
            _remove(pool, before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            if self.tails.get(block.pool) is block:
                self.tails[block.pool] = before
            block = before
        if after is not None and after.free:
            _remove(pool, after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
            if self.tails.get(block.pool) is after:
                self.tails[block.pool] = block
        block.free = True
        _insert(pool, block)


def _insert(pool: _Pool, block: _Block) -> None:
    insort(pool, (block.size, block.address, block))


def _remove(pool: _Pool, block: _Block) -> None:
    del pool[bisect_left(pool, (block.size, block.address))]


def run(stream: Stream, options: Options, limit: int | None = None, releases: frozenset[int] = frozenset()) -> Usage:
    """Play a stream through the allocator; `releases` are positions where DeepSpeed calls `empty_cache`. Stops at the first failure."""
    allocator = Allocator(options, limit)
    rounded = ((stream.bytes + MINIMUM - 1) // MINIMUM * MINIMUM).tolist()
    streams = stream.streams.tolist()
    order = stream.order.tolist()
    allocated, reserved = [0] * (len(order) + 1), [0] * (len(order) + 1)
    live: dict[int, _Block] = {}
    sizes = list(rounded)
    failure = None
    position = 0
    for position, event in enumerate(order, 1):
        if not rounded[abs(event) - 1]:
            pass  # PyTorch asks for nothing where there are no bytes
        elif event > 0:
            if position in releases:
                allocator.release()
            block = allocator.allocate(rounded[event - 1], streams[event - 1])
            if block is None:
                failure = OutOfMemory(position - 1, event, int(stream.bytes[event - 1]), allocator.allocated, allocator.reserved)
                position -= 1
                break
            live[event] = block
            sizes[event - 1] = block.size
        else:
            allocator.free(live.pop(-event))
        allocated[position] = allocator.allocated
        reserved[position] = allocator.reserved
    return Usage(np.array(allocated[: position + 1]), np.array(reserved[: position + 1]), np.array(sizes), failure)
