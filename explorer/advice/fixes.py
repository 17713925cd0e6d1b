"""What could be changed, each re-estimated: the cheapest that fits first, then what helps, then what does not, with its number. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from explorer.advice import changes
from explorer.advice.message import Message
from explorer.catalog import find_card, find_model, lengths
from explorer.dsconfig import Settings, resolve
from explorer.errors import BadInput, CouldNotRun
from explorer.estimator.estimate import estimate
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import human

SMALL_BUCKET = 50_000_000
_LITTLE = 0.01
"""Part of the peak below which a change is said to change nothing."""
_MOST_PAIRS = 14
_HALVINGS = 10
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
    text: str = ""

    @property
    def answer(self) -> str | None:
        """The verdict's answer."""
        return self.profile.verdict.answer if self.profile is not None else None

    @property
    def helps(self) -> bool:
        """Whether the peak falls by more than a hundredth, or the verdict changes for the better."""
        return self.profile is not None and self.saved_bytes > _LITTLE * (self.profile.peak.allocated_bytes + self.saved_bytes)

    def to_json(self) -> dict[str, Any]:
        """As in `check`'s answer (docs/contract.md)."""
        p = self.profile
        return {
            "id": self.id, "change": dict(self.change), "peak_allocated_bytes": p.peak.allocated_bytes if p else None, "host_bytes": p.host.peak_bytes if p else None,
            "verdict": self.answer, "cost": self.cost, "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class _Candidate:
    id: str
    effort: int
    cost: str
    apply: Callable[[Setup], Setup]
    after: frozenset[str] = field(default_factory=frozenset)
    """Candidates it makes no sense beside."""


def propose(setup: Setup, profile: Profile, message: Message | None = None) -> tuple[Fix, ...]:
    """Every change worth naming, re-estimated and in order. `profile` is the setup's own estimate."""
    candidates = list(_candidates(setup, profile, message))
    singles = [_tried(setup, profile, (c,)) for c in candidates]
    found = [f for f in singles if f is not None]
    if profile.verdict.answer in ("does not fit", "tight"):
        found += _pairs(setup, profile, candidates, found)
    return tuple(sorted(found, key=_order))


def _order(fix: Fix) -> tuple:
    """What fits, cheapest first; then what helps, by how much; what does not help, and what could not be estimated, last."""
    fits = fix.answer == "fits"
    if fits:
        return (0, 0, fix.effort, -fix.saved_bytes, fix.id)
    return (1, _ANSWERS[fix.answer] if fix.helps else len(_ANSWERS), -fix.saved_bytes, 0, fix.id)


def _pairs(setup: Setup, profile: Profile, candidates: list[_Candidate], singles: list[Fix]) -> list[Fix]:
    """Two at once, of those that help and do not do alone."""
    alone = {f.id for f in singles if f.answer == "fits"}
    helpful = [c for c in candidates if c.id not in alone and any(f.id == c.id and f.helps for f in singles)]
    chosen = [pair for pair in combinations(helpful, 2) if pair[0].id not in pair[1].after and pair[1].id not in pair[0].after]
    chosen.sort(key=lambda pair: pair[0].effort + pair[1].effort)
    tried = (_tried(setup, profile, pair) for pair in chosen[:_MOST_PAIRS])
    return [f for f in tried if f is not None and f.helps]


def _tried(setup: Setup, before: Profile, candidates: tuple[_Candidate, ...]) -> Fix | None:
    """The fix re-estimated; None where the change cannot be made to this job, or changes nothing in it."""
    try:
        changed = setup
        for candidate in candidates:
            changed = candidate.apply(changed)
        if changed == setup:
            return None
        profile, why = estimate(changed, largest=False), ""
    except BadInput:
        return None
    except CouldNotRun as error:
        profile, why = None, str(error)
    fix = Fix(
        id="+".join(c.id for c in candidates), setup=changed, change=changes.difference(setup, changed), cost="; ".join(c.cost for c in candidates), effort=sum(c.effort for c in candidates),
        profile=profile, saved_bytes=before.peak.allocated_bytes - profile.peak.allocated_bytes if profile else 0,
    )
    return _worded(fix, before, why)


def _worded(fix: Fix, before: Profile, why: str) -> Fix:
    from dataclasses import replace

    if fix.profile is None:
        return replace(fix, text=f"Not estimated: {why}.")
    now, was = fix.profile.peak.allocated_bytes, before.peak.allocated_bytes
    host = fix.profile.host.peak_bytes - before.host.peak_bytes
    on_host = f"; {human(host)} more host memory per process" if host > 1 << 28 else ""
    ending = {"fits": "fits", "tight": "is tight", "does not fit": "still does not fit", None: ""}[fix.answer]
    if not fix.helps and fix.answer != "fits":
        more = f"takes {human(-fix.saved_bytes)} more" if fix.saved_bytes < 0 else f"frees {human(fix.saved_bytes)} of {human(was)} at the peak"
        return replace(fix, text=f"Does not help: it {more}{', and ' + ending if ending else ''}{on_host}.")
    return replace(fix, text=f"{human(was)} → {human(now)} at the peak{'; ' + ending if ending else ''}{on_host}.")


# --- candidates

def _candidates(setup: Setup, profile: Profile, message: Message | None) -> Iterator[_Candidate]:
    """What this job could change, cheapest first. Costs are words: none of them is measured here."""
    settings, model = resolve(setup), find_model(setup.model)
    yield from _allocator(setup, profile, message)
    if setup.attention == "eager":
        yield _Candidate("sdpa", 1, "nothing: PyTorch's fused attention is faster", lambda s: s.replace(attention="sdpa"))
    if settings.stage in (1, 2) and settings.contiguous_gradients and (settings.reduce_bucket_size > SMALL_BUCKET or settings.overlap_comm):
        size = min(SMALL_BUCKET, settings.reduce_bucket_size)
        yield _Candidate("smaller-buckets", 2, "more and smaller reductions, which no longer overlap the backward", lambda s: changes.buckets(s, size))
    if settings.precision == "fp32" and settings.autocast is None:
        name = "fp16" if setup.gpu is not None and find_card(setup.gpu).compute_capability < 8 else "bf16"
        yield _Candidate(name, 5, "numbers of 16 bit: faster, and of less precision", lambda s: changes.precision(s, name))
    if setup.gradient_checkpointing is False:
        yield _Candidate("gradient-checkpointing", 4, "about a third more computation", changes.checkpointing)
    yield from _batch(setup, profile, contrastive=model.task == "contrastive")
    yield from _stages(setup, settings)
    yield from _offloads(setup, settings, profile)
    length = lengths(setup, model).sequence
    if length is not None and length >= 128:
        yield _Candidate("shorter-sequences", 9, f"samples are cut at {length // 2} tokens", lambda s: s.replace(sequence=length // 2))
    if settings.stage >= 1:
        yield _Candidate("more-gpus", 10, "twice the GPUs; states are divided by as many more", lambda s: changes.more_gpus(s, 2))


def _allocator(setup: Setup, profile: Profile, message: Message | None) -> Iterator[_Candidate]:
    """Only where fragmentation is in question: reserved memory beyond the card, tensors within it, or a message that says so."""
    capacity = profile.verdict.capacity_bytes
    doubtful = profile.verdict.answer == "tight" or capacity is not None and profile.peak.allocated_bytes <= capacity < profile.peak.reserved_bytes
    old = message is not None and message.form in ("reserved", "cached")
    if not (doubtful or message is not None and message.cached_bytes):
        return
    if not setup.allocator.get("expandable_segments"):
        yield _Candidate("expandable-segments", 0, "nothing but an environment variable" + (", and PyTorch 2.1 or later" if old else ""), changes.expandable, frozenset({"max-split-size"}))
    if old and not setup.allocator.get("max_split_size_mb"):
        yield _Candidate("max-split-size", 0, "nothing but an environment variable", lambda s: changes.split(s, 512), frozenset({"expandable-segments"}))


def _batch(setup: Setup, profile: Profile, contrastive: bool) -> Iterator[_Candidate]:
    """The largest half, quarter, ... that fits."""
    if setup.micro_batch == 1:
        return
    words = "the same samples a step, in smaller pieces" + ("; a contrastive loss then sees fewer negatives, and is another loss, unless features are gathered or cached" if contrastive else "")
    size = _fitting(setup, profile)
    yield _Candidate("smaller-micro-batch", 6 if contrastive else 5, words, lambda s: changes.accumulation(s, size))


def _fitting(setup: Setup, profile: Profile) -> int:
    size = setup.micro_batch
    for _ in range(_HALVINGS):
        size = max(1, size // 2)
        try:
            answer = estimate(changes.accumulation(setup, size), largest=False).verdict.answer
        except (BadInput, CouldNotRun):
            continue
        if answer in ("fits", None) or size == 1:
            break
    return size


def _stages(setup: Setup, settings: Settings) -> Iterator[_Candidate]:
    words = {1: "no more communication", 2: "no more communication", 3: "half as much communication again"}
    for number in range(settings.stage + 1, 4):
        yield _Candidate(f"stage-{number}", 3 + number, words[number], lambda s, n=number: changes.stage(s, n), frozenset(f"stage-{n}" for n in (1, 2, 3)) | {"stage-3-offload"})


def _offloads(setup: Setup, settings: Settings, profile: Profile) -> Iterator[_Candidate]:
    """With what passes over PCIe in a step, of one rank: its gradients down and its weights up; with parameters, all weights up once more for each pass."""
    share = profile.trainable_parameters // settings.world_size
    step = share * (4 + settings.model_bytes)
    if settings.offload_optimizer is None:
        lifted = max(settings.stage, 1)
        yield _Candidate("offload-optimizer", 7, f"{human(step)} over PCIe a step and rank, and the step runs on the CPU", lambda s: changes.offload(changes.stage(s, lifted), "optimizer"), frozenset({"stage-3-offload"}))
    if settings.offload_param is None:
        passes = 3 if setup.gradient_checkpointing is not False else 2
        moved = step + passes * share * settings.model_bytes
        yield _Candidate("stage-3-offload", 8, f"{human(moved)} over PCIe a step and rank, and the step runs on the CPU", lambda s: changes.offload(changes.stage(s, 3), "optimizer", "param"), frozenset({"stage-1", "stage-2", "stage-3", "offload-optimizer"}))
