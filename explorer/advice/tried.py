"""An option of the allocator that a message suggests, tried on the job: advised only where the job then fits. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.advice import changes, reading
from explorer.advice.backends import backend, is_old
from explorer.advice.host import holds
from explorer.advice.message import Message
from explorer.advice.remarks import Remark
from explorer.errors import BadInput, CouldNotRun
from explorer.estimator.estimate import estimate
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import human

SPLIT_MB = 512


def retold(remark: Remark, setup: Setup, profile: Profile, message: Message) -> Remark:
    """A remark on fragmentation with what its remedy does for this job, `profile`'s; any other as it is."""
    if remark.id != "fragmentation" or profile.verdict.answer is None:
        return remark
    return reading.fragments(message, " ".join(_cure(setup, profile, message)))


def _cure(setup: Setup, profile: Profile, message: Message) -> Iterator[str]:
    of = backend(message)
    options = [name for name, heeded in (("expandable_segments", of.expandable), ("max_split_size_mb", of.split)) if heeded]
    if not options:
        yield of.words
        return
    there = [name for name in options if setup.allocator.get(name)]
    if "expandable_segments" in there:
        yield "The job has expandable_segments already: free memory must come from the job itself."
        return
    for name in (name for name in options if name not in there):
        answer = _answer(setup, name)
        if answer == "fits":
            value, needs = ("True", " (PyTorch 2.1 or later)" if is_old(message) else "") if name == "expandable_segments" else (SPLIT_MB, "")
            host_is_short = "" if holds(setup, profile) else " on the GPU, though not on the host"
            yield f"{of.variable}={name}:{value} may let it through{needs}: by the estimate this job fits with it{host_is_short}."
            break
    else:
        yield f"That is no way out: by the estimate this job, {human(profile.peak.allocated_bytes)} at the peak, does not fit with {' or '.join(options)} either. Change the job."
    if not of.expandable:
        yield of.words


def _answer(setup: Setup, name: str) -> str | None:
    """The verdict of the job with that option; None where it cannot be estimated."""
    changed = changes.expandable(setup) if name == "expandable_segments" else changes.split(setup, SPLIT_MB)
    try:
        return estimate(changed, largest=False).verdict.answer
    except (BadInput, CouldNotRun):
        return None
