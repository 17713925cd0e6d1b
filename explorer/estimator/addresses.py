"""Where cudaMalloc puts a segment: of free blocks of one size PyTorch takes the one with the lowest address.

As it was seen on an H200: the driver maps memory in chunks of a multiple of 32 MiB, each below all before it, or in the highest gap
that a chunk left. A segment goes into the smallest hole that it fits, of equally large ones the lowest; where it fits nowhere, a
chunk is mapped. A chunk without segments is unmapped. Inside a hole a segment takes the top: this is inferred, not read off. With
it, rows of benchmarks/accuracy are exact that are one flat buffer off otherwise. `benchmarks/gpu/limits.py --addresses` records the addresses that can check it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

MiB = 1 << 20
CHUNK = 32 * MiB
_TOP = 1 << 46
_AT_START = ((_TOP - 430 * MiB, 6 * MiB), (_TOP - 416 * MiB, 416 * MiB), (_TOP + 76 * MiB, 20 * MiB))
"""(address, bytes) of the holes of chunks that are there before the first segment, since CUDA's context lies in them too; never unmapped."""


class Addresses:
    """The device addresses of a process."""

    def __init__(self) -> None:
        self.holes: list[tuple[int, int]] = list(_AT_START)
        """(address, bytes), by address."""
        self.starts: list[int] = []
        self.ends: list[int] = []
        """Of the chunks mapped since, by address."""

    def take(self, size: int) -> int:
        """cudaMalloc: the address of `size` bytes."""
        best = min(((have, address) for address, have in self.holes if have >= size), default=None)
        if best is None:
            best = self._map(-(-size // CHUNK) * CHUNK)
        have, address = best
        at = bisect_left(self.holes, (address, have))
        if have == size:
            del self.holes[at]
        else:
            self.holes[at] = address, have - size
        return address + have - size

    def give(self, address: int, size: int) -> None:
        """cudaFree of what `take` gave."""
        start, end = self._chunk(address)
        at = bisect_left(self.holes, (address, 0))
        if at < len(self.holes) and self.holes[at][0] == address + size < end:
            size += self.holes.pop(at)[1]
        if at and address > start and sum(self.holes[at - 1]) == address:
            before = self.holes.pop(at - 1)
            address, size = before[0], size + before[1]
        if (address, address + size) == (start, end) and end <= _AT_START[0][0]:
            del self.starts[bisect_left(self.starts, start)], self.ends[bisect_left(self.ends, end)]
        else:
            insort(self.holes, (address, size))

    def _map(self, size: int) -> tuple[int, int]:
        """A new chunk: (bytes, address) of its hole."""
        above = _AT_START[0][0]
        for start, end in zip(reversed(self.starts), reversed(self.ends), strict=True):
            if above - end >= size:
                break
            above = start
        address = above - size
        insort(self.starts, address)
        insort(self.ends, above)
        insort(self.holes, (address, size))
        return size, address

    def _chunk(self, address: int) -> tuple[int, int]:
        """(first byte, byte after the last) of the chunk that an address lies in."""
        if address >= _AT_START[0][0]:
            return next((start, start + have) for start, have in reversed(_AT_START) if start <= address)
        at = bisect_right(self.starts, address) - 1
        return self.starts[at], self.ends[at]

    def copy(self) -> Addresses:
        other = Addresses()
        other.holes, other.starts, other.ends = self.holes.copy(), self.starts.copy(), self.ends.copy()
        return other
