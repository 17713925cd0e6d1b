"""A stream played through the allocator: what is allocated and reserved after each event, under one limit or under several at once.

After the stream's last step, the steady one, that step is played again and again until the allocator's blocks lie as they lay before:
from then on every step is as one before it, so a job that lives till then lives on. A cache that is emptied in one step
leaves other gaps for the next, and jobs have run out of memory in their third step that passed the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from explorer.estimator.allocator import UNLIMITED, Options
from explorer.estimator.compiled import CompiledPlayer, Full, plays
from explorer.estimator.player import Events, Player
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
    stream: Stream, options: Options, limits: Sequence[int | None], releases: frozenset[int] = frozenset(), steps: Steps | None = None,
    compiled: bool = True,
) -> dict[int | None, Usage]:
    """The same under each of several limits (None: no limit). Runs are one run for as long as their limits make no difference.

    `steps`: how many steady steps matter under a limit, given what was found under those before it in `limits`; 0 leaves it out.
    `compiled`: whether the compiled player may play it where it knows the options; the answer is the same.
    """
    events = Events(stream, options, releases)
    if compiled and plays(options):
        try:
            return _run(events, options, limits, steps, CompiledPlayer)
        except Full:
            pass
    return _run(events, options, limits, steps, Player)


def _run(events: Events, options: Options, limits: Sequence[int | None], steps: Steps | None, player: type[Player | CompiledPlayer]) -> dict[int | None, Usage]:
    wanted = {UNLIMITED if limit is None else limit: limit for limit in limits}
    ranks = {limit: rank for rank, limit in enumerate(wanted)}
    found: dict[int | None, Usage] = {}
    branches = [_Branch(player(events, options, sorted(wanted)))]
    while branches:
        branch = min(branches, key=lambda b: min(ranks[limit] for limit in b.player.limits))
        branches.remove(branch)
        most = max(steps(wanted[limit], found) if steps else MOST_STEPS for limit in branch.player.limits)
        if not most:
            continue
        parting = branch.play(events, most)
        if parting:
            branches += branch.part(parting)
            continue
        usage = branch.usage(events.stream)
        found.update((wanted[limit], usage) for limit in branch.player.limits)
    return found


@dataclass(slots=True)
class _Branch:
    """A run as far as it has come."""

    player: Player | CompiledPlayer
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
    seen: dict[Hashable, int] = field(default_factory=dict)
    """Layout at the beginning of a steady step → steps before it."""
    ends: list[int] = field(default_factory=list)
    """Flushes up to the beginning of each steady step."""
    settled: int | None = None
    """The first of the steps that repeat themselves."""

    def play(self, events: Events, most: int) -> int:
        """Go on until the steps repeat themselves or are `most`, or to a failure. Where the limits part: from which on; else 0."""
        last = len(events.order)
        while True:
            before = self.played < events.steady
            outcome = self.player.play(self.played, events.steady if before else last, not self.steps)
            self.played, self.failed = outcome.position, outcome.failed
            self.levels[-1] += outcome.levels
            self.flushes += outcome.flushes
            if outcome.needed or self.failed:
                return outcome.needed
            if not before:
                self.steps += 1
            if events.steady == last or self._settled() or self.steps >= most:
                return 0
            if self.steps:
                self.played = events.steady
                self.levels.append([(events.steady, self.player.reserved)])

    def _settled(self) -> bool:
        """Whether the blocks lie as they lay at the beginning of an earlier steady step."""
        layout = self.player.turn(self.steps > 0)
        self.ends.append(len(self.flushes))
        self.settled = self.seen.get(layout)
        self.seen[layout] = self.steps
        return self.settled is not None

    def part(self, needed: int) -> tuple[_Branch, _Branch]:
        """This run under the limits that leave room for `needed` bytes reserved, and a copy of it under the others."""
        levels = [step.copy() for step in self.levels]
        other = replace(self, player=self.player.part(needed), levels=levels, flushes=self.flushes.copy(), seen=self.seen.copy(), ends=self.ends.copy())
        return self, other

    def usage(self, stream: Stream) -> Usage:
        """What was allocated and reserved after each event played."""
        played = stream.order[: len(stream.order) if self.steps else self.played]
        sizes = self.player.sizes
        allocated = np.concatenate([[0], np.cumsum(np.sign(played) * sizes[np.abs(played) - 1])])
        reserved = _steps(self.levels[0], 0, len(played) + 1)
        for levels in self.levels[1:]:
            start = levels[0][0]
            reserved[start:] = np.maximum(reserved[start:], _steps(levels, start, len(reserved)))
        usage = Usage(allocated, reserved, sizes, flushes=tuple(self.flushes), steps=self.steps * stream.steps, settled=self.settled is not None)
        if len(self.ends) > 1 and not self.failed:
            since = self.steps // 2 if self.settled is None else self.settled
            usage.retries = (self.ends[-1] - self.ends[since]) / (self.steps - since) / stream.steps
        if self.failed:
            block, player = int(stream.order[self.played]), self.player
            usage.failure = OutOfMemory(self.played, block, int(stream.bytes[block - 1]), player.allocated, player.reserved, self.steps * stream.steps)
        return usage


def _steps(levels: list[tuple[int, int]], start: int, end: int) -> np.ndarray:
    """The level at each position from `start` to before `end`."""
    positions, values = zip(*levels, strict=True)
    return np.repeat(np.array(values, dtype=np.int64), np.diff([*positions, end]))
