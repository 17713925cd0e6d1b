"""A stream played through the allocator: what is allocated and reserved after each event, under one limit or under several at once.

After the stream's last step, the steady one, that step is played again and again until the allocator's blocks lie as they lay before:
from then on every step is as one before it, so a job that lives till then lives on. A cache that is emptied in one step
leaves other gaps for the next, and jobs have run out of memory in their third step that passed the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from explorer.estimator.allocator import ADDRESS, SIZE, SMALL, UNLIMITED, Allocator, Options, Parting, _Block, rounded
from explorer.estimator.expandable import make
from explorer.estimator.stream import Stream

MOST_STEPS = 16
"""Steady steps that are played at most. In the jobs looked at, those whose steps came to repeat themselves did so within 11."""


class OutOfMemory(Exception):
    """A request that the limit leaves no room for."""

    def __init__(self, position: int, block: int, requested: int, allocated: int, reserved: int, repeat: int = 0) -> None:
        self.position, self.block, self.requested, self.allocated, self.reserved = position, block, requested, allocated, reserved
        self.repeat = repeat
        """How many steady steps ended before it."""
        super().__init__(requested)


@dataclass(slots=True)
class Usage:
    """allocated and reserved bytes after each event of a stream (int64, one longer than the order: index 0 is before the first)."""

    allocated: np.ndarray
    reserved: np.ndarray
    """Of the steady step, the most of any time that it was played."""
    sizes: np.ndarray
    """Bytes of each block as the allocator counts them: rounded, and more where it was not split."""
    failure: OutOfMemory | None = field(default=None)
    flushes: tuple[int, ...] = ()
    """Events that everything cached was released for, the steady step's as often as it was played: `num_alloc_retries` counts them."""
    steps: int = 0
    """Steady steps that were played to their end."""
    settled: bool = False
    """Whether the steps repeat themselves from here on."""
    retries: float = 0
    """Flushes per steady step: of the steps that repeat themselves, else of the later half of those that were played."""


Steps = Callable[[int | None, Mapping[int | None, Usage]], int]


def run(stream: Stream, options: Options, limit: int | None = None, releases: frozenset[int] = frozenset()) -> Usage:
    """Play a stream through the allocator; `releases` are positions where DeepSpeed calls `empty_cache`. Stops at the first failure."""
    return run_under(stream, options, (limit,), releases)[limit]


def run_under(
    stream: Stream, options: Options, limits: Sequence[int | None], releases: frozenset[int] = frozenset(), steps: Steps | None = None
) -> dict[int | None, Usage]:
    """The same under each of several limits (None: no limit). Runs are one run for as long as their limits make no difference.

    `steps`: how many steady steps matter under a limit, given what was found under those before it in `limits`; 0 leaves it out.
    """
    wanted = {UNLIMITED if limit is None else limit: limit for limit in limits}
    ranks = {limit: rank for rank, limit in enumerate(wanted)}
    events = _Events(stream, options, releases)
    found: dict[int | None, Usage] = {}
    branches = [_Branch(make(options, sorted(wanted)), events.rounded.copy())]
    while branches:
        branch = min(branches, key=lambda b: min(ranks[limit] for limit in b.allocator.limits))
        branches.remove(branch)
        most = max(steps(wanted[limit], found) if steps else MOST_STEPS for limit in branch.allocator.limits)
        if not most:
            continue
        parting = branch.play(events, most)
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
        self.steady = stream.steady
        """Where the steady step begins; without one the end."""
        self.carried = stream.carried() if self.steady < len(self.order) else {}
        if self.steady:
            self.following[self.steady - 1] = 0  # another event comes before it when the step is repeated


@dataclass(slots=True)
class _Branch:
    """A run as far as it has come."""

    allocator: Allocator
    sizes: list[int]
    live: dict[int, _Block] = field(default_factory=dict)
    played: int = 0
    """Events of the stream."""
    levels: list[list[tuple[int, int]]] = field(default_factory=lambda: [[(0, 0)]])
    """Positions where what is reserved changes, and to what; of each further steady step a list of its own."""
    flushes: list[int] = field(default_factory=list)
    """Positions of the requests for which everything cached was released."""
    failed: bool = False
    """Whether the next event is a request that the limits leave no room for."""
    steps: int = 0
    """Steady steps that ended."""
    seen: dict[tuple, int] = field(default_factory=dict)
    """Layout at the beginning of a steady step → steps before it."""
    ends: list[int] = field(default_factory=list)
    """Flushes up to the beginning of each steady step."""
    settled: int | None = None
    """The first of the steps that repeat themselves."""

    def play(self, events: _Events, most: int) -> Parting | None:
        """Go on until the steps repeat themselves or are `most`, to a failure, or to where the limits part."""
        while True:
            before = self.played < events.steady
            parting = self._play(events, events.steady if before else len(events.order))
            if parting is not None or self.failed:
                return parting
            if not before:
                self.steps += 1
            if events.steady == len(events.order) or self._settled(events) or self.steps >= most:
                return None
            if self.steps:
                self.played = events.steady
                self.levels.append([(events.steady, self.allocator.reserved)])

    def _settled(self, events: _Events) -> bool:
        """Whether the blocks lie as they lay at the beginning of an earlier steady step. What the step left is now what it found."""
        live = self.live
        if self.steps:
            for found, left in events.carried.items():
                live[found] = live.pop(left)
        layout = (self.allocator.layout(), tuple(live[found][ADDRESS] for found in events.carried))
        self.ends.append(len(self.flushes))
        self.settled = self.seen.get(layout)
        self.seen[layout] = self.steps
        return self.settled is not None

    def _play(self, events: _Events, end: int) -> Parting | None:
        """Go on up to an event, to a failure, or to where the limits part."""
        allocator, live, at = self.allocator, self.live, self.played
        sizes = self.sizes if not self.steps else self.sizes.copy()  # those that are told are the first steady step's
        allocate, free, pools = allocator.allocate, allocator.free, allocator.pools
        rounded, streams, releases = events.rounded, events.streams, events.releases
        changes, passes = allocator.changes, allocator.passes
        passing = 0
        """A block that is freed next, and so changes nothing."""
        position = at
        try:
            for position, (event, after) in enumerate(zip(events.order[at:end], events.following[at:end], strict=True), at + 1):
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
        if self.allocator.reserved != self.levels[-1][-1][1]:
            self.levels[-1].append((position, self.allocator.reserved))
        if self.allocator.retries > len(self.flushes):
            self.flushes.append(position - 1)

    def part(self, needed: int) -> tuple[_Branch, _Branch]:
        """This run under the limits that leave room for `needed` bytes reserved, and a copy of it under the others."""
        limits = self.allocator.limits
        allocator, live = self.allocator.copy(self.live, [limit for limit in limits if limit < needed])
        self.allocator.limits = [limit for limit in limits if limit >= needed]
        levels = [step.copy() for step in self.levels]
        return self, replace(self, allocator=allocator, sizes=self.sizes.copy(), live=live, levels=levels, flushes=self.flushes.copy(), seen=self.seen.copy(), ends=self.ends.copy())

    def usage(self, stream: Stream) -> Usage:
        """What was allocated and reserved after each event played."""
        played = stream.order[: len(stream.order) if self.steps else self.played]
        sizes = np.array(self.sizes, dtype=np.int64)
        allocated = np.concatenate([[0], np.cumsum(np.sign(played) * sizes[np.abs(played) - 1])])
        reserved = _steps(self.levels[0], 0, len(played) + 1)
        for levels in self.levels[1:]:
            start = levels[0][0]
            reserved[start:] = np.maximum(reserved[start:], _steps(levels, start, len(reserved)))
        usage = Usage(allocated, reserved, sizes, flushes=tuple(self.flushes), steps=self.steps, settled=self.settled is not None)
        if len(self.ends) > 1 and not self.failed:
            since = self.steps // 2 if self.settled is None else self.settled
            usage.retries = (self.ends[-1] - self.ends[since]) / (self.steps - since)
        if self.failed:
            block, now = int(stream.order[self.played]), sum(block[SIZE] for block in self.live.values())
            usage.failure = OutOfMemory(self.played, block, int(stream.bytes[block - 1]), now, self.allocator.reserved, self.steps)
        return usage


def _steps(levels: list[tuple[int, int]], start: int, end: int) -> np.ndarray:
    """The level at each position from `start` to before `end`."""
    positions, values = zip(*levels, strict=True)
    return np.repeat(np.array(values, dtype=np.int64), np.diff([*positions, end]))
