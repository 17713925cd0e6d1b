"""What could be changed, each re-estimated: the cheapest that fits first, then what helps, then what does not, with its number. No torch."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from typing import Any

from explorer.advice import changes
from explorer.advice.candidates import Candidate, Estimate, candidates
from explorer.advice.message import Message
from explorer.dsconfig import resolve
from explorer.errors import BadInput, CouldNotRun
from explorer.estimator.estimate import estimate
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import GiB, human

_LITTLE = 0.01
"""Part of the peak below which a change is said to change nothing."""
_MOST_PAIRS = 14
_MUCH_HOST = 1 << 28
"""Bytes of host memory that are worth a word."""
_ANSWERS = {"fits": 0, "tight": 1, "does not fit": 2, None: 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """A changed job and what comes of it."""

    id: str
    """Of one change, or of two, joined by "+"."""
    setup: Setup
    change: Mapping[str, Any]
    """Of the job file."""
    cost: str
    effort: int
    """What is tried first: a stated order of costs, not a measure."""
    profile: Profile | None = None
    """None where it could not be estimated."""
    saved_bytes: int = 0
    """Of the peak allocated; negative where it takes more."""
    spares_host: bool = False
    """Whether a node's memory holds it that does not hold the job as it is."""
    text: str = ""

    @property
    def answer(self) -> str | None:
        """The verdict's answer."""
        return self.profile.verdict.answer if self.profile is not None else None

    @property
    def solves(self) -> bool:
        """Whether it fits, on the GPU and, where that is known, in the node's memory."""
        return self.answer == "fits" and _held(self.setup, self.profile)

    @property
    def helps(self) -> bool:
        """Whether the peak falls by more than a hundredth, or the node's memory then holds the job."""
        return self.spares_host or self.profile is not None and self.saved_bytes > _LITTLE * (self.profile.peak.allocated_bytes + self.saved_bytes)

    def to_json(self) -> dict[str, Any]:
        """As in `check`'s answer (docs/contract.md)."""
        p = self.profile
        return {
            "id": self.id, "change": dict(self.change), "peak_allocated_bytes": p.peak.allocated_bytes if p else None, "host_bytes": p.host.peak_bytes if p else None,
            "verdict": self.answer, "cost": self.cost, "text": self.text,
        }


def propose(setup: Setup, profile: Profile, message: Message | None = None, stop: threading.Event | None = None) -> tuple[Fix, ...]:
    """Every change worth naming, re-estimated and in order. `profile` is the setup's own estimate; `stop`, once set, ends the estimates: who sets it wants no answer."""
    once: Estimate = cache(partial(_estimated, stop))  # of these jobs, some are asked about twice
    single = list(candidates(setup, profile, message, once))
    found = [f for f in (_tried(setup, profile, (c,), once) for c in single) if f is not None]
    if profile.verdict.answer in ("does not fit", "tight"):
        found += _pairs(setup, profile, single, found, once)
    return tuple(sorted(found, key=_order))


def _estimated(stop: threading.Event | None, setup: Setup) -> Profile:
    if stop is not None and stop.is_set():
        raise CouldNotRun("the search for changes was stopped")
    return estimate(setup, largest=False)


def _held(setup: Setup, profile: Profile) -> bool:
    """Whether a node has the host memory, as far as the job says what it has."""
    return setup.host_ram_gib is None or profile.host.per_node_bytes <= setup.host_ram_gib * GiB


def _order(fix: Fix) -> tuple:
    """What fits, cheapest first; then what helps, by how much; what does not help, and what could not be estimated, last."""
    if fix.solves:
        return (0, 0, fix.effort, -fix.saved_bytes, fix.id)
    return (1, _ANSWERS[fix.answer] if fix.helps else len(_ANSWERS), -fix.saved_bytes, 0, fix.id)


def _pairs(setup: Setup, profile: Profile, single: list[Candidate], found: list[Fix], once: Estimate) -> list[Fix]:
    """Two at once, of those that help and do not do alone."""
    alone = {f.id for f in found if f.solves}
    helpful = [c for c in single if c.id not in alone and any(f.id == c.id and f.helps for f in found)]
    chosen = [pair for pair in combinations(helpful, 2) if pair[0].id not in pair[1].after and pair[1].id not in pair[0].after]
    chosen.sort(key=lambda pair: pair[0].effort + pair[1].effort)
    tried = (_tried(setup, profile, pair, once) for pair in chosen[:_MOST_PAIRS])
    return [f for f in tried if f is not None and f.helps]


def _tried(setup: Setup, before: Profile, chosen: tuple[Candidate, ...], once: Estimate) -> Fix | None:
    """The fix re-estimated; None where the change cannot be made to this job, or changes nothing in it."""
    try:
        changed = setup
        for candidate in chosen:
            changed = candidate.apply(changed)
        if changed == setup:
            return None
        profile, why = once(changed), ""
    except BadInput:
        return None
    except CouldNotRun as error:
        profile, why = None, str(error)
    fix = Fix(
        id="+".join(c.id for c in chosen), setup=changed, change=changes.difference(setup, changed), cost="; ".join(c.cost for c in chosen), effort=sum(c.effort for c in chosen),
        profile=profile, saved_bytes=before.peak.allocated_bytes - profile.peak.allocated_bytes if profile else 0,
        spares_host=profile is not None and _held(changed, profile) and not _held(setup, before),
    )
    return _worded(fix, before, why)


def _worded(fix: Fix, before: Profile, why: str) -> Fix:
    if fix.profile is None:
        return replace(fix, text=f"Not estimated: {why}.")
    now, was = fix.profile.peak.allocated_bytes, before.peak.allocated_bytes
    ending = {"fits": "; fits", "tight": "; is tight", "does not fit": "; still does not fit", None: ""}[fix.answer] + _on_host(fix, before)
    if fix.helps or fix.solves and before.verdict.answer != "fits":
        text = f"{human(was)} → {human(now)} at the peak{ending}."
    else:
        more = f"takes {human(-fix.saved_bytes)} more" if fix.saved_bytes < 0 else f"frees {human(fix.saved_bytes)} of {human(was)} at the peak"
        text = f"Does not help: it {more}{ending.replace('; ', ', and ', 1) if fix.answer else ending}."
    return replace(fix, text=" ".join([text, *_unfollowed(fix, before)]))


def _on_host(fix: Fix, before: Profile) -> str:
    """What it takes of the host more or less, and whether a node has that."""
    more = fix.profile.host.peak_bytes - before.host.peak_bytes
    said = f"; {human(abs(more))} {'more' if more > 0 else 'less'} host memory per process" if abs(more) > _MUCH_HOST else ""
    if not _held(fix.setup, fix.profile):
        said += f"; the node's {fix.setup.host_ram_gib:g} GiB would not hold the {human(fix.profile.host.per_node_bytes)} of its processes"
    return said


def _unfollowed(fix: Fix, before: Profile) -> list[str]:
    """What the change brings that the estimate does not follow, with its bound."""
    missing = (f"{f.key}: {f.text}" for f in resolve(fix.setup).not_modelled)
    return [f"Not modelled: {text}." for text in missing if text not in before.notes]
