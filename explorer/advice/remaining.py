"""What can explain an out-of-memory message of a job that fits by its estimate. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.advice.backends import backend
from explorer.advice.message import Message
from explorer.advice.remarks import Remark
from explorer.advice.situation import can_be_fragments
from explorer.profile import Profile
from explorer.units import human

_MORE = 0.05
"""Beyond the estimate's peak: more than the two differ by where a job was measured (benchmarks/accuracy)."""
_MUCH_BESIDE = 1 << 29
"""Bytes that lie outside PyTorch beyond what the estimate counts there, and are worth a word."""


def remaining(profile: Profile, message: Message) -> Remark:
    """The explanations that the message's numbers leave. `profile` fits."""
    spare = human(profile.verdict.headroom_bytes) if profile.verdict.headroom_bytes is not None else "room"
    found = [*_explanations(profile, message)]
    text = f"By the estimate this job fits, with {spare} to spare, though the message says that memory ran out. What can explain it: "
    return Remark(id="fits-here", severity="cause", key="", text=text + "; ".join(f"({n}) {said}" for n, said in enumerate(found, 1)) + ".")


def _explanations(profile: Profile, m: Message) -> Iterator[str]:
    """Likeliest first."""
    peak, doubted = profile.peak.allocated_bytes, m.doubted("allocated", "reserved", "capacity", "free")
    if m.allocated is not None and not doubted and m.allocated.bytes > (1 + _MORE) * peak:
        yield f"the job that ran is larger: {human(m.allocated.bytes)} were allocated, and by the estimate this one has {human(peak)} at most, so model, batch, lengths, precision or checkpointing are not what is said here"
        return
    if m.limit is not None:
        yield f"a limit on this process, {human(m.limit.bytes)}"
    beside = m.non_pytorch_bytes if not doubted else None
    if m.other_processes_bytes:
        yield f"other processes, with {human(m.other_processes_bytes)} of the card"
    elif beside is None:
        yield "other processes on the card, which nvidia-smi shows"
    elif profile.outside_pytorch_bytes and beside > profile.outside_pytorch_bytes + _MUCH_BESIDE:
        yield f"{human(beside)} of the card outside PyTorch, where the estimate counts {human(profile.outside_pytorch_bytes)}: other processes, or libraries"
    if m.cached_bytes is None or can_be_fragments(m):
        numbers = "" if m.cached_bytes is None else f": {human(m.cached_bytes)} were reserved and not allocated"
        cure = "; expandable_segments is the remedy" if backend(m).expandable else ""
        yield f"fragmentation{numbers}{cure}"
    yield "a batch with more or longer samples than said here, which one step among many is enough for"
    yield "memory beside the step: evaluation, generation, a second model, tensors that the script keeps (losses or outputs not detached)"
