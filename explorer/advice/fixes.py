"""What could be changed, each re-estimated: the cheapest that fits first, then what helps, then what does not, with its number; where host memory ran out, by what a node then needs of it. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from typing import Any, Literal

from explorer.advice import changes, host
from explorer.advice.candidates import Candidate, Estimate, candidates
from explorer.advice.message import Message
from explorer.dsconfig import resolve
from explorer.errors import BadInput, CouldNotRun
from explorer.estimator.estimate import estimate
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import human

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
    saved_host_bytes: int = 0
    """The same of a node's host memory."""
    spares_host: bool = False
    """Whether a node's memory holds it that does not hold the job as it is."""
    scarce: Literal["gpu", "host"] = "gpu"
    """Which memory is to be saved."""
    fitted: bool = False
    """Whether the job fits the GPU without it."""
    text: str = ""

    @property
    def gpu_answer(self) -> str | None:
        """The verdict's answer, which is of the GPU alone."""
        return self.profile.verdict.answer if self.profile is not None else None

    @property
    def answer(self) -> str | None:
        """Of both memories: what the node cannot hold does not fit, however little it leaves on the GPU."""
        if self.profile is not None and not host.holds(self.setup, self.profile):
            return "does not fit"
        return self.gpu_answer

    @property
    def solves(self) -> bool:
        """Whether it fits, on the GPU and, where that is known, in the node's memory; it must help where the job fits without it, or where that memory ran out."""
        return self.answer == "fits" and (self.helps or self.scarce == "gpu" and not self.fitted)

    @property
    def helps(self) -> bool:
        """Whether the peak falls by more than a hundredth, or the node's memory then holds the job; where host memory ran out, whether a node needs that much less of it."""
        if self.scarce == "host":
            return self.profile is not None and self.gpu_answer != "does not fit" and self.lowers_host
        return self.spares_host or self.profile is not None and self.saved_bytes > _LITTLE * (self.profile.peak.allocated_bytes + self.saved_bytes)

    @property
    def lowers_host(self) -> bool:
        """Whether a node's host memory falls by more than a hundredth."""
        return self.profile is not None and self.saved_host_bytes > _LITTLE * (self.profile.host.per_node_bytes + self.saved_host_bytes)

    @property
    def moves_host(self) -> bool:
        """Whether it falls or rises by that much."""
        return self.profile is not None and abs(self.saved_host_bytes) > _LITTLE * (self.profile.host.per_node_bytes + self.saved_host_bytes)

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
    scarce = "host" if host.is_short(setup, profile, message) else "gpu"
    tried = partial(_tried, setup, profile, scarce, once)
    single = list(candidates(setup, profile, message, once))
    found = _distinct(f for f in (tried((c,)) for c in single) if f is not None)
    if scarce == "host" or profile.verdict.answer in ("does not fit", "tight"):
        found += _pairs(single, found, tried)
    if scarce == "host" and profile.verdict.answer == "fits":
        found = [f for f in found if f.moves_host]  # the rest is of a memory that did not run out
    return tuple(sorted(_distinct(found), key=_order))


def _distinct(found: Iterable[Fix]) -> list[Fix]:
    """Of several names for one job, a change by itself before two at once, then the dearer, which says more of its cost."""
    chosen: dict[Setup, Fix] = {}
    for fix in found:
        other = chosen.setdefault(fix.setup, fix)
        if ("+" not in fix.id, fix.effort) >= ("+" not in other.id, other.effort):
            chosen[fix.setup] = fix
    return list(chosen.values())


def _estimated(stop: threading.Event | None, setup: Setup) -> Profile:
    if stop is not None and stop.is_set():
        raise CouldNotRun("the search for changes was stopped")
    return estimate(setup, largest=False)


def _order(fix: Fix) -> tuple:
    """What fits, cheapest first; then what helps, by how much; what does not help, and what could not be estimated, last. Each by what a node then needs, where that ran out."""
    if fix.scarce == "host":
        return (0 if fix.solves else 1 if fix.helps else 2, _ANSWERS[fix.answer], -fix.saved_host_bytes, fix.effort, fix.id)
    if fix.solves:
        return (0, 0, fix.effort, -fix.saved_bytes, fix.id)
    return (1, _ANSWERS[fix.answer] if fix.helps else len(_ANSWERS), -fix.saved_bytes, 0, fix.id)


def _pairs(single: list[Candidate], found: list[Fix], tried: Callable[[tuple[Candidate, ...]], Fix | None]) -> list[Fix]:
    """Two at once, of those that help and do not do alone. Where host memory ran out, what frees the GPU makes room for what lay on the host."""
    partly = {f.id: f for f in found if not f.solves and (f.helps or f.scarce == "host" and (f.lowers_host or f.saved_bytes > 0 and not f.moves_host))}
    helpful = [c for c in single if c.id in partly]
    chosen = [pair for pair in combinations(helpful, 2) if pair[0].id not in pair[1].after and pair[1].id not in pair[0].after]
    chosen = [pair for pair in chosen if partly[pair[0].id].scarce == "gpu" or any(partly[c.id].lowers_host for c in pair)]
    chosen.sort(key=lambda pair: pair[0].effort + pair[1].effort)
    return [f for f in map(tried, chosen[:_MOST_PAIRS]) if f is not None and (f.helps if f.scarce == "gpu" else f.solves)]


def _tried(setup: Setup, before: Profile, scarce: Literal["gpu", "host"], once: Estimate, chosen: tuple[Candidate, ...]) -> Fix | None:
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
        saved_host_bytes=before.host.per_node_bytes - profile.host.per_node_bytes if profile else 0,
        spares_host=profile is not None and host.holds(changed, profile) and not host.holds(setup, before), scarce=scarce,
        fitted=before.verdict.answer == "fits",
    )
    return _worded(fix, before, why)


def _worded(fix: Fix, before: Profile, why: str) -> Fix:
    if fix.profile is None:
        return replace(fix, text=f"Not estimated: {why}.")
    if fix.scarce == "host":
        return replace(fix, text=" ".join([_worded_of_host(fix, before), *_unfollowed(fix, before)]))
    now, was = fix.profile.peak.allocated_bytes, before.peak.allocated_bytes
    held = host.holds(fix.setup, fix.profile)
    fits = "; fits" if held else "; fits the GPU"
    ending = {"fits": fits, "tight": "; is tight", "does not fit": "; still does not fit", None: ""}[fix.gpu_answer] + _on_host(fix, before)
    if fix.helps or fix.solves and before.verdict.answer != "fits":
        text = f"{human(was)} → {human(now)} at the peak{ending}."
    else:
        more = f"takes {human(-fix.saved_bytes)} more" if fix.saved_bytes < 0 else f"frees {human(fix.saved_bytes)} of {human(was)} at the peak"
        text = f"Does not help: it {more}{ending.replace('; ', ', and ', 1) if fix.gpu_answer else ending}."
    return replace(fix, text=" ".join([text, *_unfollowed(fix, before)]))


def _worded_of_host(fix: Fix, before: Profile) -> str:
    now, was = fix.profile.host.per_node_bytes, before.host.per_node_bytes
    peak = f"{human(fix.profile.peak.allocated_bytes)} at the peak"
    on_gpu = {"fits": f"fits the GPU with {peak}", "tight": f"is tight on the GPU with {peak}", "does not fit": f"does not fit the GPU with {peak}", None: peak}[fix.gpu_answer]
    ending = f"; {on_gpu}{_not_held(fix)}."
    if fix.helps:
        return f"{human(was)} → {human(now)} of host memory per node{ending}"
    if fix.lowers_host:
        return f"Does not help alone: {human(was)} → {human(now)} of host memory per node{ending}"
    return f"Does not help: host memory ran out, and this takes {human(now - was)} more of it per node{ending}" if fix.moves_host else f"Does not help: a node's host memory stays at {human(was)}{ending}"


def _on_host(fix: Fix, before: Profile) -> str:
    """What it takes of the host more or less, and whether a node has that."""
    more = fix.profile.host.peak_bytes - before.host.peak_bytes
    said = f"; {human(abs(more))} {'more' if more > 0 else 'less'} host memory per process" if abs(more) > _MUCH_HOST else ""
    if said and more > 0 and min(fix.setup.world_size, fix.setup.gpus_per_node) > 1:
        said += f", {human(fix.profile.host.per_node_bytes)} a node"
    return said + _not_held(fix)


def _not_held(fix: Fix) -> str:
    if host.holds(fix.setup, fix.profile):
        return ""
    return f"; but the node's {fix.setup.host_ram_gib:g} GiB would not hold the {human(fix.profile.host.per_node_bytes)} of its processes"


def _unfollowed(fix: Fix, before: Profile) -> list[str]:
    """What the change brings that the estimate does not follow, with its bound."""
    missing = (f"{f.key}: {f.text}" for f in resolve(fix.setup).not_modelled)
    return [f"Not modelled: {text}." for text in missing if text not in before.notes]
