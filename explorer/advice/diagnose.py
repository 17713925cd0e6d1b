"""Why memory runs out, in sentences made of the estimate's numbers. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from explorer.advice import host, naming
from explorer.advice.kept import kept_weights
from explorer.advice.message import Message
from explorer.advice.remarks import Remark
from explorer.catalog import find_model, lengths
from explorer.dsconfig import Settings, resolve
from explorer.estimator.estimate import Events
from explorer.profile import CATEGORIES, Profile
from explorer.setup import Setup
from explorer.units import human, pytorch_size

_WORDS = {
    "parameters": "the weights", "gradients": "gradients", "optimizer": "the optimizer's masters and moments", "activations": "activations, which grow with the batch and its lengths", "gathered": "weights that stage 3 has gathered",
    "comm_buffers": "DeepSpeed's buffers", "temporary": "temporaries (logits and losses, workspaces, the step's copies)", "unexplained": "what is in no category",
}
_MOVED = ("parameters", "gradients", "optimizer", "gathered", "comm_buffers")
"""What ZeRO divides and offload moves to the host, and the buffers they do it with."""
_ALSO = 0.25


def diagnose(setup: Setup, profile: Profile, message: Message | None = None, events: Events | None = None) -> list[Remark]:
    """The cause first. `events` (estimator.estimate.events) also names the tensor that a message's request was."""
    settings = resolve(setup)
    found = [*_dominant(profile), *_kept(setup, profile), *_offload(profile, settings)]
    if message is not None and (message.is_host or message.other or message.cause == "shared-memory"):
        found = [replace(r, severity="note") if r.severity == "cause" else r for r in found]  # of a memory that did not run out
    found = [*host.remarks(setup, profile, message), *found]
    if message is not None and message.is_gpu and message.requested is not None and events is not None:
        found += _request(setup, settings, profile, message, events)
    return found


def _dominant(profile: Profile) -> Iterator[Remark]:
    peak = profile.peak.allocated_bytes
    ranked = sorted(CATEGORIES, key=lambda c: -profile.at_peak.get(c, 0))
    first, second = ranked[0], ranked[1]
    n_bytes, also = profile.at_peak[first], profile.at_peak.get(second, 0)
    text = f"At the peak, in {profile.peak.allocated_phase} of the {profile.peak.allocated_step} step, {human(n_bytes)} of {human(peak)} are {_WORDS[first]}"
    text += f"; {human(also)} are {_WORDS[second]}." if also > _ALSO * peak else "."
    severity = "cause" if profile.verdict.answer in ("does not fit", "tight") else "note"
    yield Remark(id=f"dominant-{first}", severity=severity, key=first, text=text)


def _kept(setup: Setup, profile: Profile) -> Iterator[Remark]:
    kept = kept_weights(setup)
    if kept is not None:
        cause = profile.verdict.answer in ("does not fit", "tight") and kept.n_bytes > _ALSO * kept.peak_bytes
        yield Remark(id=f"weights-kept-{kept.reason}", severity="cause" if cause else "hint", key=kept.key, text=kept.text)


def _offload(profile: Profile, settings: Settings) -> Iterator[Remark]:
    """What can be moved or divided at all, at the moment of the peak."""
    peak = profile.peak.allocated_bytes
    moved = (*_MOVED, "temporary") if profile.peak.allocated_phase in ("init", "step") else _MOVED
    movable = sum(profile.at_peak.get(c, 0) for c in moved)
    needed = _short(profile)
    parts = ", ".join(f"{human(profile.at_peak.get(c, 0))} {c.replace('_', ' ')}" for c in moved if profile.at_peak.get(c, 0))
    if needed is None:
        return
    if movable < needed:
        yield Remark(id="offload-cannot-help", severity="cause", key="zero_optimization", text=f"Offload and higher stages can free at most {human(movable)} of {human(peak)} here ({parts or 'no weights or states are left on the GPU'}), and {human(needed)} too much is asked for: no setting of them makes this job fit.")
    elif movable > peak // 2:
        yield Remark(id="states-dominate", severity="cause", key="zero_optimization", text=f"{human(movable)} of {human(peak)} do not depend on the batch ({parts}). More GPUs, a higher stage or offload divide or move them.")


def _short(profile: Profile) -> int | None:
    """Bytes by which the job misses its card; None where it fits or no card is known."""
    v = profile.verdict
    if v.answer != "does not fit" or v.capacity_bytes is None:
        return None
    return max(profile.peak.allocated_bytes - v.capacity_bytes, 1)


# --- the request

def _request(setup: Setup, settings: Settings, profile: Profile, m: Message, events: Events) -> Iterator[Remark]:
    asked = pytorch_size(m.requested.bytes)
    if m.requested.bytes <= naming.SMALLEST or m.doubted("requested"):
        return
    named = [n for n in naming.name(events, m) if _is_then(n.allocated_bytes, m)]
    if named:
        alike = dict.fromkeys(n.text for n in named[1:] if n.text != named[0].text)
        others = f" Of the same size: {'; '.join(alike)}." if alike else ""
        yield Remark(id="request-named", severity="hint", key="requested", text=f"The {asked} that failed is the size of {_logits(setup, named[0].n_bytes)}{named[0].text}, when the estimate has {human(named[0].allocated_bytes)} allocated.{others}")
        return
    yield from _bucket(settings, m)
    for parameter, width in naming.weights(events.parameters, m.requested)[:2]:
        yield Remark(id="request-weight", severity="hint", key="requested", text=f"{asked} is one {parameter} in {'16 bit' if width == 2 else 'fp32'}: its gradient, a gathered copy, or a cast of it.")
    yield from _larger(setup, m, events)


_APART = 0.25
"""Of what the message has allocated: a tensor that the estimate asks for with more or less than that is not the one that failed."""


def _is_then(allocated_bytes: int, m: Message) -> bool:
    """Whether the job has as much allocated there as the message has, as far as that is known."""
    if m.allocated is None or m.doubted("allocated"):
        return True
    return abs(allocated_bytes - m.allocated.bytes) <= _APART * m.allocated.bytes


def _logits(setup: Setup, n_bytes: int) -> str:
    """The shape of a tensor of scores over the vocabulary, every position's or all but the last one's; nothing of another."""
    model = find_model(setup.model)
    at = lengths(setup, model)
    length = at.target_sequence or at.sequence
    if model.vocab_size and length and model.task != "contrastive":
        for positions, width in product((length, length - 1), (4, 2)):
            if at.micro_batch * positions * model.vocab_size * width == n_bytes:
                return f"logits in {'fp32' if width == 4 else '16 bit'} ({at.micro_batch} × {positions} × {model.vocab_size} × {width} B): "
    return ""


def _bucket(settings: Settings, m: Message) -> Iterator[Remark]:
    """The bucket of DeepSpeed before 0.3.17 was 4.5 times as large (#1042)."""
    for factor, width in ((4.5, 2), (4.5, 4), (1, 2), (1, 4)):
        n_bytes = int(settings.reduce_bucket_size * factor) * width
        if m.requested.holds(-(-n_bytes // (2 << 20)) * (2 << 20)):
            now = human(settings.reduce_bucket_size * settings.model_bytes)
            old = f", 4.5 times as DeepSpeed before 0.3.17 (May 2021) made it: a newer one takes {now}" if factor != 1 else ""
            yield Remark(id="request-bucket", severity="hint", key="zero_optimization.reduce_bucket_size", text=f"{pytorch_size(m.requested.bytes)} is the reduce bucket, {settings.reduce_bucket_size:,} elements of {width} bytes{old}. Lower reduce_bucket_size.")
            return


def _larger(setup: Setup, m: Message, events: Events) -> Iterator[Remark]:
    """A request beyond every tensor of the job: its batch or length was not what is said here."""
    largest = int(events.stream.bytes.max())
    if m.requested.least <= largest:
        return
    text = f"{pytorch_size(m.requested.bytes)} is more than any one tensor of this job ({human(largest)} at most): the batch or its lengths were larger than said here, or the model is another."
    model = find_model(setup.model)
    at = lengths(setup, model)
    if model.vocab_size and at.sequence and model.task != "contrastive":
        n, said = naming.tokens(m.requested, model.vocab_size, 4), at.micro_batch * (at.target_sequence or at.sequence)
        text += f" As logits in fp32 over {model.vocab_size:,} tokens it is {n:,} positions, where this job has {said:,} ({human(said * model.vocab_size * 4)})."
    yield Remark(id="request-larger", severity="hint", key="requested", text=text)
