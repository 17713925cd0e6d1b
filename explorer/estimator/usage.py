"""A stream played through the allocator: what is allocated and reserved after each event, under one limit or under several at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from explorer.estimator.allocator import SIZE, SMALL, UNLIMITED, Allocator, Options, Parting, _Block, rounded
from explorer.estimator.expandable import make
from explorer.estimator.stream import Stream


class OutOfMemory(Exception):
    """A request that the limit leaves no room for."""

    def __init__(self, position: int, block: int, requested: int, allocated: int, reserved: int) -> None:
        self.position, self.block, self.requested, self.allocated, self.reserved = position, block, requested, allocated, reserved
        super().__init__(requested)


@dataclass(slots=True)
class Usage:
    """allocated and reserved bytes after each event of a stream (int64, one longer than the order: index 0 is before the first)."""

    allocated: np.ndarray
    reserved: np.ndarray
    sizes: np.ndarray
    """Bytes of each block as the allocator counts them: rounded, and more where it was not split."""
    failure: OutOfMemory | None = field(default=None)
    flushes: tuple[int, ...] = ()
    """Events that everything cached was released for: `num_alloc_retries` counts them."""


def run(stream: Stream, options: Options, limit: int | None = None, releases: frozenset[int] = frozenset()) -> Usage:
    """Play a stream through the allocator; `releases` are positions where DeepSpeed calls `empty_cache`. Stops at the first failure."""
    return run_under(stream, options, (limit,), releases)[limit]


def run_under(stream: Stream, options: Options, limits: Iterable[int | None], releases: frozenset[int] = frozenset()) -> dict[int | None, Usage]:
    """The same under each of several limits (None: no limit). Runs are one run for as long as their limits make no difference."""
    wanted = {UNLIMITED if limit is None else limit: limit for limit in limits}
    events = _Events(stream, options, releases)
    found: dict[int | None, Usage] = {}
    branches = [_Branch(make(options, sorted(wanted)), events.rounded.copy())]
    while branches:
        branch = branches.pop()
        parting = branch.play(events)
        if parting is not None:
            branches += branch.part(parting.needed)
            continue
        usage = branch.usage(stream)
        found.update((wanted[limit], usage) for limit in branch.allocator.limits)
    return found


class _Events:
    """A stream's columns as lists, which Python reads fastest."""

    def __init__(self, stream: Stream, options: Options, releases: frozenset[int]) -> None:
        self.rounded: list[int] = rounded(stream.bytes, options.divisions).tolist()
        self.streams: list[int] = stream.streams.tolist()
        self.order: list[int] = stream.order.tolist()
        self.following = [*self.order[1:], 0]
        self.releases = releases


@dataclass(slots=True)
class _Branch:
    """A run as far as it has come."""

    allocator: Allocator
    sizes: list[int]
    live: dict[int, _Block] = field(default_factory=dict)
    played: int = 0
    changes: list[int] = field(default_factory=lambda: [0])
    levels: list[int] = field(default_factory=lambda: [0])
    """Positions where what is reserved changes, and to what."""
    flushes: list[int] = field(default_factory=list)
    """Positions of the requests for which everything cached was released."""
    failed: bool = False
    """Whether the next event is a request that the limits leave no room for."""

    def play(self, events: _Events) -> Parting | None:
        """Go on to the end, to a failure, or to where the limits part."""
        allocator, live, sizes, at = self.allocator, self.live, self.sizes, self.played
        allocate, free, pools = allocator.allocate, allocator.free, allocator.pools
        rounded, streams, releases = events.rounded, events.streams, events.releases
        changes, passes = allocator.changes, allocator.passes
        passing = 0
        """A block that is freed next, and so changes nothing."""
        position = at
        try:
            for position, (event, after) in enumerate(zip(events.order[at:], events.following[at:], strict=True), at + 1):
                if event < 0:
                    if -event == passing:
                        passing = 0
                    elif rounded[-event - 1]:
                        free(live.pop(-event))
                    continue
                size = rounded[event - 1]
                if not size:  # PyTorch asks for nothing where there are no bytes
                    continue
                if position in releases:
                    allocator.release()
                side = streams[event - 1]
                if after == -event and passes and (i := allocator.fitting(size, side)) >= 0:
                    passing = event
                    sizes[event - 1] = allocator.kept(pools[side * 2 + (size <= SMALL)][i][0], size)
                else:
                    block = allocate(size, side)
                    if block is None:
                        self._changed(position)
                        self.failed, position = True, position - 1
                        break
                    live[event] = block
                    sizes[event - 1] = block[SIZE]
                if allocator.changes != changes:
                    changes = allocator.changes
                    self._changed(position)
        except Parting as parting:
            self.played = position - 1
            return parting
        self.played = position
        return None

    def _changed(self, position: int) -> None:
        """Note what is reserved from an event on, and whether everything cached was released for it."""
        if self.allocator.reserved != self.levels[-1]:
            self.changes.append(position)
            self.levels.append(self.allocator.reserved)
        if self.allocator.retries > len(self.flushes):
            self.flushes.append(position - 1)

    def part(self, needed: int) -> tuple[_Branch, _Branch]:
        """This run under the limits that leave room for `needed` bytes reserved, and a copy of it under the others."""
        limits = self.allocator.limits
        allocator, live = self.allocator.copy(self.live, [limit for limit in limits if limit < needed])
        self.allocator.limits = [limit for limit in limits if limit >= needed]
        return self, _Branch(allocator, self.sizes.copy(), live, self.played, self.changes.copy(), self.levels.copy(), self.flushes.copy())

    def usage(self, stream: Stream) -> Usage:
        """What was allocated and reserved after each event played."""
        played = stream.order[: self.played]
        sizes = np.array(self.sizes, dtype=np.int64)
        allocated = np.concatenate([[0], np.cumsum(np.sign(played) * sizes[np.abs(played) - 1])])
        reserved = np.repeat(self.levels, np.diff([*self.changes, len(played) + 1]))
        if not self.failed:
            return Usage(allocated, reserved, sizes, flushes=tuple(self.flushes))
        block = int(stream.order[self.played])
        return Usage(allocated, reserved, sizes, OutOfMemory(self.played, block, int(stream.bytes[block - 1]), int(allocated[-1]), self.allocator.reserved), tuple(self.flushes))
