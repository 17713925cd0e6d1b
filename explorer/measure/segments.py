"""The trace of PyTorch's CUDA allocator, followed segment by segment: how large every block was. No torch.

A trace has the bytes that were asked for. A block may be larger: requests are rounded, and a free block is split only where the
rest is worth keeping. Which free block served a request is told by its address, and how large that was by everything before:
segments made and given back (of expandable ones: pages mapped and unmapped), blocks taken, blocks returned and merged
(c10/cuda/CUDACachingAllocator.cpp: `alloc_found_block`, `free_block`, `try_merge_blocks`, `map_block`, `unmap_block`, `release_block`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from explorer.estimator.allocator import MINIMUM, UNLIMITED, Options, rounded
from explorer.estimator.expandable import make
from explorer.measure.history import Event


def read(trace: Iterable[Mapping[str, Any]], before: Iterable[Mapping[str, Any]], options: Options) -> list[Event]:
    """Allocations and frees of a trace (`torch.cuda.memory._snapshot()["device_traces"][device]`), each block with its size.

    `before`: the snapshot's "segments" when the trace began. A block counts as allocated until its free is requested, as in PyTorch's counter; its
    memory serves again once other streams have done with it and the free is completed.
    """
    segments = Segments(options, before)
    events = []
    for entry in trace:
        action, address, size = entry["action"], entry.get("addr", 0), entry["size"]
        if action == "alloc":
            events.append(Event(size, address, entry.get("stream", 0), segments.take(address, size)))
        elif action == "free_requested":
            events.append(Event(-size, address, entry.get("stream", 0)))
        elif action == "free_completed":
            segments.give_back(address)
        elif action in ("segment_alloc", "segment_map"):
            segments.add(address, size, whole=action == "segment_alloc")
        elif action in ("segment_free", "segment_unmap"):
            segments.remove(address, size, whole=action == "segment_free")
    return events


def options(snapshot: Mapping[str, Any]) -> Options:
    """How the allocator that made a snapshot is set, whoever set it."""
    found = snapshot.get("allocator_settings", {})
    most = found.get("max_split_size", -1)
    divisions = {int(size): count for size, count in found.get("roundup_power2_divisions", {}).items()}
    return Options(bool(found.get("expandable_segments")), most if 0 < most < UNLIMITED else None, divisions=tuple(divisions[size] for size in sorted(divisions)))


def requested_peak(trace: Iterable[Mapping[str, Any]]) -> int:
    """The most bytes asked for at any moment, as PyTorch counts them: until a free is completed."""
    level = most = 0
    for entry in trace:
        if entry["action"] == "alloc":
            level += entry["size"]
            most = max(most, level)
        elif entry["action"] == "free_completed":
            level -= entry["size"]
    return most


class Segments:
    """Free and taken blocks by address."""

    def __init__(self, options: Options, before: Iterable[Mapping[str, Any]] = ()) -> None:
        self.rule = make(options)
        self.free: dict[int, int] = {}
        """First byte → bytes."""
        self.ends: dict[int, int] = {}
        """The byte after a free block → its first."""
        self.taken: dict[int, int] = {}
        """First byte → bytes, until the free is completed."""
        self.borders: Counter[int] = Counter()
        """Where a segment of cudaMalloc begins or ends: blocks on its two sides may touch and are never merged."""
        for segment in before:
            self._adopt(segment)

    def _adopt(self, segment: Mapping[str, Any]) -> None:
        """A segment that was there before the trace."""
        if not segment.get("is_expandable"):
            self._border(segment["address"], segment["total_size"], 1)
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                self._put(address, block["size"])
            else:
                self.taken[address] = block["size"]
            address += block["size"]

    def add(self, address: int, size: int, *, whole: bool) -> None:
        """`size` bytes more of the device; `whole`: a segment of its own, not pages of an expandable one."""
        if whole:
            self._border(address, size, 1)
        self._put(address, size)

    def remove(self, address: int, size: int, *, whole: bool) -> None:
        """Bytes given back to the device: a whole segment, or pages within a free block of an expandable one."""
        start = address if address in self.free else next((at for at, have in self.free.items() if at <= address < at + have), None)
        if start is not None:
            have = self._cut(start)
            if address > start:
                self._put(start, address - start)
            if address + size < start + have:
                self._put(address + size, start + have - address - size)
        if whole:
            self._border(address, size, -1)

    def take(self, address: int, requested: int) -> int:
        """The bytes of the block that a request got at an address."""
        size = max(MINIMUM, -(-requested // MINIMUM) * MINIMUM)
        if self.rule.options.divisions:
            size = int(rounded(np.array([max(MINIMUM, requested)]), self.rule.options.divisions)[0])
        have = self._cut(address) if address in self.free else size
        taken = self.rule.kept(have, size)
        if taken < have:
            self._put(address + taken, have - taken)
        self.taken[address] = taken
        return taken

    def give_back(self, address: int) -> None:
        """The block at an address is free, and one with its free neighbours of the same segment."""
        size = self.taken.pop(address, None)
        if size is not None:
            self._put(address, size)

    def _put(self, address: int, size: int) -> None:
        end = address + size
        if not self.borders[end] and end in self.free:
            end += self._cut(end)
        if not self.borders[address] and address in self.ends:
            address = self.ends[address]
            self._cut(address)
        self.free[address], self.ends[end] = end - address, address

    def _cut(self, address: int) -> int:
        size = self.free.pop(address)
        del self.ends[address + size]
        return size

    def _border(self, address: int, size: int, change: int) -> None:
        self.borders[address] += change
        self.borders[address + size] += change
