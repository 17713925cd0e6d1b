"""Does it fit? Three answers from the allocator, never a false "fits".

Under a limit PyTorch returns cached blocks and asks again, so whether a job near the limit passes hangs on fragmentation:
jobs have passed at 1.04 times their peak and failed at 1.08, and some that passed two steps failed in the third. So the steady step
is followed until it repeats itself (`usage.py`). A job *fits* where it passes at its capacity, without emptying the cache in every
step, and where its first and steady step pass at every smaller capacity down to `MARGIN` of it. It *does not fit* where it fails
even with `MARGIN` more, both within `FIRM` steady steps: what happens after a dozen emptied caches nobody can foretell. It is *tight* in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from explorer.estimator.allocator import device_request
from explorer.estimator.stream import Mark, Stream
from explorer.estimator.usage import MOST_STEPS, OutOfMemory, Steps, Usage
from explorer.profile import BETWEEN, Failure, Verdict
from explorer.units import human, pytorch_size

MARGIN = 0.03
"""Part of the capacity that fragmentation is allowed to move; stated, not fitted."""
FIRM = 3
"""Steady steps within which running out of memory is certain enough for "does not fit": a job that the model has fail in its 13th
step, each with two flushes, ran on an H200."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What PyTorch may reserve, and what its out-of-memory text would say of the card."""

    bytes: int
    limited: bool
    """Whether it is a per-process limit, which PyTorch's text then names."""
    total: int
    outside: int
    """Bytes of the card that lie outside PyTorch's allocator."""

    @property
    def larger(self) -> int:
        """With `MARGIN` more."""
        return int(self.bytes * (1 + MARGIN))

    @property
    def smaller(self) -> tuple[int, ...]:
        """Down to `MARGIN` less."""
        return tuple(int(self.bytes * (1 - MARGIN * part / 3)) for part in (1, 2, 3))

    @property
    def limits(self) -> tuple[int, ...]:
        """What the verdict may hang on, in the order in which it does."""
        return (self.bytes, self.larger, *self.smaller)

    def steps(self) -> Steps:
        """How many steady steps matter under each of these limits."""

        def matter(limit: int | None, found: Mapping[int | None, Usage]) -> int:
            if limit is None or limit == self.bytes:
                return MOST_STEPS
            here = found.get(self.bytes)
            if limit == self.larger:
                return FIRM if here is None or here.failure and here.failure.repeat < FIRM else 0
            decided = here is not None and (here.failure or here.retries) or any(found[c].failure for c in self.smaller if c in found)
            return 0 if decided else 1

        return matter


def judge(stream: Stream, usages: Mapping[int | None, Usage], capacity: Capacity) -> tuple[Verdict, Usage]:
    """(verdict, usage under the capacity where it lives, else the unlimited one).

    `usages`: under no limit and under each of the capacity's that matters.
    """
    unlimited, here = usages[None], usages[capacity.bytes]
    peak, reserved = int(unlimited.allocated.max()), int(unlimited.reserved.max())
    common = {"capacity_bytes": capacity.bytes, "headroom_bytes": capacity.bytes - peak}
    if here.failure is not None:
        return _out_of_memory(stream, usages, capacity, common), unlimited
    answer, why = "fits", f"{human(peak)} at the peak; PyTorch returns cached blocks where it must"
    if reserved <= min(capacity.smaller):
        why = f"even what PyTorch's allocator keeps in its cache fits: {human(reserved)} reserved of {human(capacity.bytes)}"
    elif here.retries:
        answer, why = "tight", _slow(here)
    elif not here.settled:
        answer, why = "tight", f"after {here.steps} steps the layout of its memory still changes, so a later step may run out"
    elif any(usages[c].failure is not None for c in capacity.smaller if c in usages):
        answer, why = "tight", f"it passes at {human(capacity.bytes)}, but not with {MARGIN:.0%} less: fragmentation decides"
    return Verdict(answer=answer, retries=_shown(here.retries), why=why, **common), here


def flushing(usage: Usage) -> str:
    """How often a job that lives empties PyTorch's cache, in words."""
    retries = usage.retries
    if retries < 1:
        return f"once in every {1 / retries:.2g} steps"
    return f"{ {1: 'once', 2: 'twice'}.get(retries, f'{_shown(retries):g} times')} in every step"


def _slow(usage: Usage) -> str:
    later = "" if usage.settled else f"; after {usage.steps} steps the layout of its memory still changes, so a later step may run out"
    return f"it lives only because PyTorch empties its cache {flushing(usage)}, which makes training slow{later}"


def _shown(retries: float) -> float:
    return int(retries) if retries == int(retries) else round(retries, 2)


def _out_of_memory(stream: Stream, usages: Mapping[int | None, Usage], capacity: Capacity, common: Mapping[str, int]) -> Verdict:
    error = usages[capacity.bytes].failure
    failure = describe(error, stream, capacity)
    asks = f"{failure.phase} asks for {pytorch_size(failure.requested_bytes)} with {human(error.allocated)} allocated"
    where = f"it runs out of memory in step {step_number(stream.marks, error)}: {asks}"
    if failure.phase == "init":
        where = f"it runs out of memory before the first step: {asks}"
    if failure.phase in BETWEEN:
        where = f"its steps live, and it runs out of memory as it {_DOES[failure.phase]}: {asks}"
    firm = error.repeat < FIRM and usages[capacity.larger].failure is not None
    if usages[None].allocated.max() <= capacity.bytes and not firm:
        return Verdict(answer="tight", failure=failure, why=f"{where}; the tensors alone would fit, fragmentation decides", **common)
    return Verdict(answer="does not fit", failure=failure, why=where, **common)


_DOES = {"eval": "evaluates", "save": "saves"}


def step_number(marks: tuple[Mark, ...], failure: OutOfMemory) -> int:
    """Which step of the job a failure is in, from 1 on; skipped ones count."""
    return 1 + failure.repeat + sum(mark.phase == "step" and mark.end <= failure.position for mark in marks)


def describe(failure: OutOfMemory, stream: Stream, capacity: Capacity) -> Failure:
    """Where the request stands, and the text PyTorch would print for it."""
    mark = phase_at(stream.marks, failure.position)
    asked = device_request(failure.requested)
    cached = failure.reserved - failure.allocated
    total, outside = capacity.total, capacity.outside
    free = max(0, total - outside - failure.reserved)
    allowed = f"{pytorch_size(capacity.bytes)} allowed; " if capacity.limited else ""
    text = (
        f"CUDA out of memory. Tried to allocate {pytorch_size(asked)}. "
        f"GPU 0 has a total capacity of {pytorch_size(total)} of which {pytorch_size(free)} is free. "
        f"Including non-PyTorch memory, this process has {pytorch_size(failure.reserved + outside)} memory in use. {allowed}"
        f"Of the allocated memory {pytorch_size(failure.allocated)} is allocated by PyTorch, and {pytorch_size(cached)} is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
        "See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    return Failure(phase=mark.phase, step=mark.step, requested_bytes=failure.requested, text=text)


def phase_at(marks: tuple[Mark, ...], position: int) -> Mark:
    """The phase that an event stands in."""
    return next((m for m in marks if m.start <= position < m.end), marks[-1])
