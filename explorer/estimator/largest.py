"""The largest micro-batch, or whatever else is counted, that fits: a search over replays. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

from explorer.errors import CouldNotRun
from explorer.estimator import tapes
from explorer.estimator.work import Work, capacity_of, with_micro_batch
from explorer.setup import Setup

_SEARCH_REPLAYS = 24
_LARGEST_BATCH = 1 << 20
_SURE = 0.75
"""Part of the capacity whose batch the search begins at: what is reserved beyond what is allocated, a sixth at most in the jobs looked at, has a third there."""


def largest_micro_batch(setup: Setup, on_progress: tapes.Progress | None = None, stop: threading.Event | None = None) -> int | None:
    """The largest n such that every micro-batch up to n fits; 0 where one sample does not, None where no capacity is known. Whatever the setup's own is.

    `stop`: set it and the search, which takes a second or so, raises CouldNotRun at its next replay.
    """
    return largest_fitting(setup, with_micro_batch, 1, _LARGEST_BATCH, on_progress, stop)


def largest_fitting(setup: Setup, change: Callable[[Setup, int], Setup], least: int, most: int, on_progress: tapes.Progress | None = None, stop: threading.Event | None = None) -> int | None:
    """The largest n from `least` to `most` such that `change(setup, n)` and every one below it fit; `least` - 1 where none does, None where no capacity is known.

    What is allocated grows with n, so the last that it lets fit is found by halves. What is reserved may fall: below that, values
    are taken in turn, or some dozens of them where they are many, and the first that does not fit ends the search.
    """
    capacity = capacity_of(setup)
    if capacity is None:
        return None

    @cache
    def replayed(n: int) -> tuple[int, bool]:
        if stop is not None and stop.is_set():
            raise CouldNotRun("the search for the largest that fits was stopped")
        work = Work(change(setup, n), on_progress)
        return int(work.unlimited.allocated.max()), work.judged[0].answer == "fits"

    def allocated(n: int) -> int:
        return replayed(n)[0]

    def fits(n: int) -> bool:
        return replayed(n)[1]

    top = min(least + 1, most)  # one sample may need a tape of its own, so it is asked about only where two are too many
    while allocated(top) <= capacity.bytes:
        if top == most:
            if allocated(top) <= _SURE * capacity.bytes and fits(top):
                return top
            top += 1
            break
        top = min(2 * top, most)
    top = _last(lambda n: allocated(n) <= capacity.bytes, least - 1, top)
    low = _last(lambda n: allocated(n) <= _SURE * capacity.bytes, least - 1, top + 1)
    while low >= least and not fits(low):
        low //= 2
    low = max(low, least - 1)
    step = max(1, (top - low) // _SEARCH_REPLAYS)
    while low < top:
        high = min(low + step, top)
        if not fits(high):
            return _last(fits, low, high)
        low = high
    return low


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last n from `low`, where it holds, to `high`, where it does not, found by halves."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
