"""Does it fit? Three answers from the allocator, never a false "fits".

Under a limit PyTorch returns cached blocks and asks again, so whether a job near the limit passes hangs on fragmentation:
jobs have passed at 1.04 times their peak and failed at 1.08. A job *fits* where it passes at its capacity and at every
smaller one down to `MARGIN` of it, *does not fit* where it fails even with `MARGIN` more, and is *tight* in between.
"""

from __future__ import annotations

from collections.abc import Mapping

from explorer.estimator.allocator import device_request
from explorer.estimator.stream import Mark, Stream
from explorer.estimator.usage import OutOfMemory, Usage
from explorer.profile import Failure, Verdict
from explorer.units import human, pytorch_size

MARGIN = 0.03
"""Part of the capacity that fragmentation is allowed to move; stated, not fitted."""


def limits(capacity: int) -> tuple[int, ...]:
    """What the verdict under a capacity hangs on: how the job fares under each of these."""
    return tuple(int(capacity * (1 + MARGIN * part / 3)) for part in (-3, -2, -1)) + (capacity, int(capacity * (1 + MARGIN)))


def judge(stream: Stream, usages: Mapping[int | None, Usage], capacity: int, limited: bool, total: int, outside: int) -> tuple[Verdict, Usage]:
    """(verdict, usage under the capacity where it fits, else the unlimited one).

    `usages`: under no limit and under each of `limits(capacity)`. `limited`: the capacity is a per-process limit, which PyTorch's
    text then names. `total`, `outside`: the card's bytes and those outside PyTorch's allocator, for the text.
    """
    *smaller, _, larger = limits(capacity)
    unlimited, at_capacity = usages[None], usages[capacity]
    peak, reserved = int(unlimited.allocated.max()), int(unlimited.reserved.max())
    headroom = capacity - peak
    if reserved <= smaller[0]:
        why = f"even what PyTorch's allocator keeps in its cache fits: {human(reserved)} reserved of {human(capacity)}"
        return Verdict(answer="fits", capacity_bytes=capacity, headroom_bytes=headroom, why=why), unlimited
    if at_capacity.failure is None:
        if all(usages[c].failure is None for c in smaller):
            why = f"{human(peak)} at the peak; PyTorch returns cached blocks where it must"
            return Verdict(answer="fits", capacity_bytes=capacity, headroom_bytes=headroom, why=why), at_capacity
        why = f"it passes at {human(capacity)}, but not with {MARGIN:.0%} less: fragmentation decides"
        return Verdict(answer="tight", capacity_bytes=capacity, headroom_bytes=headroom, why=why), at_capacity
    failure = describe(at_capacity.failure, stream, capacity, limited, total, outside)
    where = f"{failure.phase} of the {failure.step} step asks for {pytorch_size(failure.requested_bytes)} with {human(at_capacity.failure.allocated)} allocated"
    if peak <= capacity and usages[larger].failure is None:
        why = f"{where}; the tensors alone would fit, fragmentation decides"
        return Verdict(answer="tight", capacity_bytes=capacity, headroom_bytes=headroom, failure=failure, why=why), unlimited
    return Verdict(answer="does not fit", capacity_bytes=capacity, headroom_bytes=headroom, failure=failure, why=where), unlimited


def describe(failure: OutOfMemory, stream: Stream, capacity: int, limited: bool, total: int, outside: int) -> Failure:
    """Where the request stands, and the text PyTorch would print for it."""
    mark = phase_at(stream.marks, failure.position)
    asked = device_request(failure.requested)
    cached = failure.reserved - failure.allocated
    free = max(0, total - outside - failure.reserved)
    allowed = f"{pytorch_size(capacity)} allowed; " if limited else ""
    text = (
        f"CUDA out of memory. Tried to allocate {pytorch_size(asked)}. GPU 0 has a total capacity of {pytorch_size(total)} of which {pytorch_size(free)} is free. "
        f"Including non-PyTorch memory, this process has {pytorch_size(failure.reserved + outside)} memory in use. {allowed}"
        f"Of the allocated memory {pytorch_size(failure.allocated)} is allocated by PyTorch, and {pytorch_size(cached)} is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
        "See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    return Failure(phase=mark.phase, step=mark.step, requested_bytes=failure.requested, text=text)


def phase_at(marks: tuple[Mark, ...], position: int) -> Mark:
    """The phase that an event stands in."""
    return next((m for m in marks if m.start <= position < m.end), marks[-1])
