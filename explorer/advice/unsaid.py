"""What a job has that was not pasted: where a message's memory contradicts the estimate, the one thing with which the two agree. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from explorer.advice import changes, naming
from explorer.advice.message import Message
from explorer.advice.remarks import Remark
from explorer.catalog import find_model, lengths
from explorer.errors import BadInput, CouldNotRun
from explorer.estimator import tapes
from explorer.estimator.estimate import Events, events
from explorer.estimator.work import with_micro_batch
from explorer.setup import Setup
from explorer.units import human, pytorch_size

_APART, _ALIKE = 0.25, 0.1
"""Of what the message has allocated: from where on the two contradict each other, and up to where they agree."""
_FACTORS = (2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsaid:
    """A contradiction, and what would explain it."""

    asked: str
    """The failing request, as printed."""
    said_bytes: int
    """Allocated by then, says the message."""
    estimated_bytes: int
    """Allocated when a tensor of that size is asked for, or at the peak where none is."""
    at_peak: bool
    key: str = ""
    words: str = ""
    """How it would be: "with gradient checkpointing"."""
    setup: Setup | None = None
    """The job with it."""
    with_bytes: int = 0
    """What that job has allocated there."""

    @property
    def agrees(self) -> bool:
        """Whether that job is the message's, within a tenth."""
        return self.setup is not None and abs(self.with_bytes - self.said_bytes) <= _ALIKE * self.said_bytes

    def remark(self, taken: bool) -> Remark:
        """The sentence; `taken`: the job with it is what is answered."""
        by_then = f"the job as it is said here has {human(self.estimated_bytes)} {'at its peak' if self.at_peak else 'by then'}"
        text = f"The message has {human(self.said_bytes)} allocated as it asks for {self.asked}, and {by_then}: something of the job was not pasted"
        if self.setup is None:
            return Remark(id="not-pasted", severity="problem", key="", text=f"{text}; compare model, batch, lengths, precision and checkpointing.")
        likely = f". {self.words[0].upper()}{self.words[1:]} it has {human(self.with_bytes)}" if self.agrees else f", checkpointing most likely: {self.words} it has {human(self.with_bytes)}"
        ending = ": answered for the job with it." if taken else f": set {self.key} so and ask again." if self.agrees else "."
        return Remark(id="not-pasted", severity="problem", key=self.key, text=text + likely + ending)


def unsaid(setup: Setup, message: Message, found: Events, on_progress: tapes.Progress | None = None) -> Unsaid | None:
    """The contradiction between a message with a request and `found`, the setup's own events, where there is one, with what explains it best. Raises as `estimate` does."""
    if message.allocated is None or message.doubted("requested", "allocated"):
        return None
    said = message.allocated.bytes
    nearest = _nearest(found, message)
    estimated = int(found.usage.allocated.max()) if nearest is None else nearest
    if abs(estimated - said) <= _APART * said or nearest is None and estimated > said:
        return None
    bare = Unsaid(asked=pytorch_size(message.requested.bytes), said_bytes=said, estimated_bytes=estimated, at_peak=nearest is None)
    likeliest = None
    for key, words, changed, with_bytes in _others(setup, message, on_progress):
        other = Unsaid(asked=bare.asked, said_bytes=said, estimated_bytes=estimated, at_peak=bare.at_peak, key=key, words=words, setup=changed, with_bytes=with_bytes)
        if other.agrees:
            return other
        if key == "gradient_checkpointing" and abs(with_bytes - said) < abs(estimated - said):
            likeliest = other
    return likeliest or bare


def _nearest(found: Events, message: Message) -> int | None:
    """Allocated where a tensor of the request's size is asked for, of all such places the nearest to what the message says; None where there is none, or it is any small tensor's."""
    places = naming.places(found, message)
    if not len(places):
        return None
    allocated = found.usage.allocated[places]
    return int(allocated[np.abs(allocated - message.allocated.bytes).argmin()])


def _others(setup: Setup, message: Message, on_progress: tapes.Progress | None) -> Iterator[tuple[str, str, Setup, int]]:
    """(key, words, the job with that one thing changed, what it has allocated where the request is asked for), likeliest first."""
    for key, words, change in _things(setup):
        try:
            changed = change()
            allocated = _nearest(events(changed, on_progress), message)
        except (BadInput, CouldNotRun):
            continue
        if allocated is not None:
            yield key, words, changed, allocated


def _things(setup: Setup) -> Iterator[tuple]:
    """What people leave out, and what differs between the run that failed and the one that is described."""
    on = setup.gradient_checkpointing is not False
    yield "gradient_checkpointing", "without gradient checkpointing" if on else "with gradient checkpointing", partial(changes.no_checkpointing if on else changes.checkpointing, setup)
    at = lengths(setup, find_model(setup.model))
    for factor in _FACTORS:
        for n in (setup.micro_batch // factor, setup.micro_batch * factor):
            if n:
                yield "micro_batch", f"with {n} samples a GPU", partial(with_micro_batch, setup, n)
        for n in ((at.sequence or 0) // factor, (at.sequence or 0) * factor):
            if n:
                yield "sequence", f"with {n:,} tokens a sample", partial(setup.replace, sequence=n)
