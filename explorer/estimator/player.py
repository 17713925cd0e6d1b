"""A stream's events played one after another through the allocator. The reference in Python; `compiled.py` does the same in C."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from explorer.estimator.allocator import ADDRESS, SIZE, SMALL, Options, Parting, _Block, rounded
from explorer.estimator.expandable import make
from explorer.estimator.stream import Stream


class Events:
    """A stream's columns as the players read them."""

    def __init__(self, stream: Stream, options: Options, releases: frozenset[int]) -> None:
        self.rounded = rounded(stream.bytes, options.divisions)
        """Bytes of each block as requested from the allocator; 0 for those that PyTorch does not ask for."""
        self.stream, self.order = stream, stream.order
        self.releases = releases
        """Positions (from 1 on) of requests before which DeepSpeed calls `empty_cache`."""
        self.steady = stream.steady
        """Where the steady step begins; without one the end."""

    @cached_property
    def carried(self) -> dict[int, int]:
        """Block that the steady step finds → the one that it leaves in its place; those that have bytes."""
        return {found: left for found, left in self.stream.carried().items() if self.rounded[found - 1]}

    @cached_property
    def lists(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Rounded bytes, streams, events and the event after each: lists, which Python reads fastest."""
        order = self.order.tolist()
        following = [*order[1:], 0]
        if self.steady:
            following[self.steady - 1] = 0  # another event comes before it when the step is repeated
        return self.rounded.tolist(), self.stream.streams.tolist(), order, following


class Outcome(NamedTuple):
    """How far a player came."""

    position: int
    """Events played."""
    failed: bool
    """Whether the next one is a request that the limits leave no room for."""
    needed: int
    """Where the limits part at the next event: those from this on are on one side. Else 0."""
    levels: list[tuple[int, int]]
    """Positions where what is reserved changed, and to what."""
    flushes: list[int]
    """Positions of the requests for which everything cached was released."""


class Player:
    """The allocator, what is in use, and what was counted so far."""

    def __init__(self, events: Events, options: Options, limits: Sequence[int]) -> None:
        self.events, self.options = events, options
        self.allocator = make(options, limits)
        self.live: dict[int, _Block] = {}
        self.made: list[int] = events.lists[0].copy()
        self.noted = self.flushes = 0

    @property
    def limits(self) -> Sequence[int]:
        """Of what may be reserved, in ascending order."""
        return self.allocator.limits

    @property
    def reserved(self) -> int:
        """Bytes reserved now."""
        return self.allocator.reserved

    @property
    def allocated(self) -> int:
        """Bytes in use now."""
        return sum(block[SIZE] for block in self.live.values())

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of each block as the allocator counts them: int64."""
        return np.array(self.made, dtype=np.int64)

    def play(self, at: int, end: int, keep: bool) -> Outcome:
        """Events from `at` to before `end`, or up to a failure or to where the limits part. `keep`: note the sizes of blocks."""
        allocator, live = self.allocator, self.live
        sizes = self.made if keep else self.made.copy()
        allocate, free, pools = allocator.allocate, allocator.free, allocator.pools
        asked, streams, order, following = self.events.lists
        releases, changes, passes = self.events.releases, -1, allocator.passes
        levels: list[tuple[int, int]] = []
        flushes: list[int] = []
        passing = 0
        """A block that is freed next, and so changes nothing."""
        position = at
        try:
            for position, (event, after) in enumerate(zip(order[at:end], following[at:end], strict=True), at + 1):
                if event < 0:
                    if -event == passing:
                        passing = 0
                    elif asked[-event - 1]:
                        free(live.pop(-event))
                    continue
                size = asked[event - 1]
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
                        self._note(position, levels, flushes)
                        return Outcome(position - 1, True, 0, levels, flushes)
                    live[event] = block
                    sizes[event - 1] = block[SIZE]
                if allocator.changes != changes:
                    changes = allocator.changes
                    self._note(position, levels, flushes)
        except Parting as parting:
            return Outcome(position - 1, False, parting.needed, levels, flushes)
        return Outcome(position, False, 0, levels, flushes)

    def _note(self, position: int, levels: list[tuple[int, int]], flushes: list[int]) -> None:
        if self.allocator.reserved != self.noted:
            self.noted = self.allocator.reserved
            levels.append((position, self.noted))
        if self.allocator.retries > self.flushes:
            self.flushes += 1
            flushes.append(position - 1)

    def turn(self, ended: bool) -> Hashable:
        """The layout at the beginning of a steady step. `ended`: what the step before left is now what the next one finds."""
        live, carried = self.live, self.events.carried
        if ended:
            for found, left in carried.items():
                live[found] = live.pop(left)
        return self.allocator.layout(), tuple(live[found][ADDRESS] for found in carried)

    def part(self, needed: int) -> Player:
        """A copy under the limits below `needed`; the others stay here."""
        limits = self.allocator.limits
        other = object.__new__(type(self))
        other.__dict__ |= self.__dict__
        other.allocator, other.live = self.allocator.copy(self.live, [limit for limit in limits if limit < needed])
        other.made = self.made.copy()
        self.allocator.limits = [limit for limit in limits if limit >= needed]
        return other
