"""What a job could change, cheapest first. Costs are words: none of them is measured here. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from explorer.advice import changes, host, pcie
from explorer.advice.backends import backend, is_old
from explorer.advice.kept import kept_weights
from explorer.advice.message import Message
from explorer.advice.situation import rules_out_fragments
from explorer.catalog import find_card, find_model, lengths
from explorer.dsconfig import Settings, resolve
from explorer.errors import BadInput, CouldNotRun
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import human

SMALL_BUCKET = 50_000_000
_FEW_LIVE = 100_000_000
_WORTH_NAMING = 0.05
"""Part of the peak from which on it is worth looking at what makes it."""
_HALVINGS = 10
_MOST_GPUS = 8
"""Times as many as there are."""
_SHORTEST = 64
Estimate = Callable[[Setup], Profile]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change to try."""

    id: str
    effort: int
    """What is tried first: a stated order of costs, not a measure."""
    cost: str
    apply: Callable[[Setup], Setup]
    after: frozenset[str] = field(default_factory=frozenset)
    """Candidates it makes no sense beside."""


def candidates(setup: Setup, profile: Profile, message: Message | None, once: Estimate) -> Iterator[Candidate]:
    """Every change worth naming. `profile` is the setup's own estimate; `once` estimates, and each job but once."""
    settings, model = resolve(setup), find_model(setup.model)
    yield from _allocator(setup, profile, message)
    yield from _kept(setup, settings, profile)
    if setup.attention == "eager":
        yield Candidate("sdpa", 1, "nothing: PyTorch's fused attention is faster", lambda s: s.replace(attention="sdpa"))
    yield from _buckets(settings, profile)
    if settings.precision == "fp32":
        name = "fp16" if setup.gpu is not None and find_card(setup.gpu).compute_capability < 8 else "bf16"
        yield Candidate(name, 5, "numbers of 16 bit, of less precision" + ("; faster" if settings.autocast is None else ""), lambda s: changes.precision(s, name))
    if setup.gradient_checkpointing is False:
        yield Candidate("gradient-checkpointing", 4, "about a third more computation", changes.checkpointing)
    yield from _batch(setup, once, contrastive=model.task == "contrastive")
    yield from _optimizers(setup, settings, profile)
    yield from _stages(setup, settings, profile)
    short = host.is_short(setup, profile, message)
    yield from _offloads(setup, settings, profile, short)
    if short:
        yield from _less_offload(settings)
    yield from _sequence(setup, lengths(setup, model).sequence, once)
    if settings.stage >= 1:
        yield from _gpus(setup, once)


def _allocator(setup: Setup, profile: Profile, message: Message | None) -> Iterator[Candidate]:
    """Only where fragmentation is in question: reserved memory beyond the card, tensors within it, or a message that says so."""
    capacity = profile.verdict.capacity_bytes
    doubtful = profile.verdict.answer == "tight" or capacity is not None and profile.peak.allocated_bytes <= capacity < profile.peak.reserved_bytes
    said = message is not None and message.is_gpu and message.requested is not None
    if said and rules_out_fragments(message) or not (doubtful or said and message.cached_bytes):
        return
    of = backend(message)
    old = said and is_old(message) or not of.expandable
    if of.expandable and not setup.allocator.get("expandable_segments"):
        yield Candidate("expandable-segments", 0, "nothing but an environment variable" + (", and PyTorch 2.1 or later" if old else ""), changes.expandable, frozenset({"max-split-size"}))
    if of.split and old and not setup.allocator.get("max_split_size_mb"):
        yield Candidate("max-split-size", 0, f"nothing but an environment variable ({of.variable})", lambda s: changes.split(s, 512), frozenset({"expandable-segments"}))


def _kept(setup: Setup, settings: Settings, profile: Profile) -> Iterator[Candidate]:
    """Where autograd keeps weights that stage 3 has let go: what it would take for it not to."""
    kept = kept_weights(setup)
    if kept is None:
        return
    if kept.reason == "recomputed" and kept.n_bytes > _WORTH_NAMING * kept.peak_bytes:  # its trace may have to be recorded first, which takes its time
        yield Candidate("reentrant-checkpointing", 1, "nothing, but that some input of each layer must need a gradient (enable_input_require_grads where embeddings are frozen)", changes.reentrant)
    if kept.key == "zero_init":
        yield Candidate("zero-init", 1, "nothing: the TrainingArguments are made before the model", lambda s: s.replace(zero_init=True), frozenset({"newer-deepspeed"}))
        yield Candidate("newer-deepspeed", 2, "another release of DeepSpeed", lambda s: s.replace(deepspeed_version=None), frozenset({"zero-init"}))
    elif kept.reason == "plain-linear":
        yield Candidate("memory-efficient-linear", 1, "nothing", changes.memory_efficient_linear)


def _buckets(settings: Settings, profile: Profile) -> Iterator[Candidate]:
    """Of reductions, of gathers, and of what stage 3 holds at once."""
    zero = settings.config["zero_optimization"]
    size = min(SMALL_BUCKET, settings.reduce_bucket_size)
    if settings.stage in (1, 2) and settings.contiguous_gradients and (settings.reduce_bucket_size > SMALL_BUCKET or settings.overlap_comm):
        yield Candidate("smaller-buckets", 2, "more and smaller reductions, which no longer overlap the backward", lambda s: changes.buckets(s, size))
    if settings.stage == 3 and settings.reduce_bucket_size > SMALL_BUCKET:
        yield Candidate("smaller-buckets", 2, "more and smaller reductions", lambda s: changes.reduce_bucket(s, size))
    gathers_in_place = "all-gather-copies" not in settings.behaviours
    if settings.stage in (1, 2) and ("allgather_bucket_size" in zero or not gathers_in_place):
        cost = "nothing: DeepSpeed no longer makes this buffer" if gathers_in_place else "a few more messages after each step"
        yield Candidate("smaller-allgather-bucket", 2, cost, lambda s: changes.allgather_bucket(s, SMALL_BUCKET))
    if settings.stage == 3 and settings.max_live_parameters > _FEW_LIVE and profile.at_peak.get("gathered", 0) > _WORTH_NAMING * profile.peak.allocated_bytes:
        yield Candidate("fewer-live-parameters", 3, "less prefetching, and weights gathered again for each use", lambda s: changes.live_parameters(s, _FEW_LIVE))


def _batch(setup: Setup, once: Estimate, contrastive: bool) -> Iterator[Candidate]:
    """The largest half, quarter, ... that fits."""
    if setup.micro_batch == 1:
        return
    words = "the same samples a step, in smaller pieces" + ("; a contrastive loss then sees fewer negatives, and is another loss, unless features are gathered or cached" if contrastive else "")
    sizes = [setup.micro_batch >> n for n in range(1, _HALVINGS + 1) if setup.micro_batch >> n]
    size = _first(sizes, lambda n: changes.accumulation(setup, n), once)
    yield Candidate("smaller-micro-batch", 6 if contrastive else 5, words, lambda s: changes.accumulation(s, size))


def _sequence(setup: Setup, length: int | None, once: Estimate) -> Iterator[Candidate]:
    """The same of the length."""
    if length is None or length < 2 * _SHORTEST:
        return
    size = _first([length >> n for n in range(1, _HALVINGS) if length >> n >= _SHORTEST], lambda n: setup.replace(sequence=n), once)
    yield Candidate("shorter-sequences", 9, f"samples are cut at {size:,} tokens", lambda s: s.replace(sequence=size))


def _gpus(setup: Setup, once: Estimate) -> Iterator[Candidate]:
    """The least doubling that fits; twice where none does."""
    factors = [2, 4, _MOST_GPUS]
    factor = _first(factors, lambda n: changes.more_gpus(setup, n), once)
    if factor == _MOST_GPUS and not _fits(changes.more_gpus(setup, factor), once):
        factor = 2
    times = {2: "twice", 4: "four times", 8: "eight times"}[factor]
    yield Candidate("more-gpus", 10, f"{times} the GPUs; states are divided by as many more", lambda s: changes.more_gpus(s, factor))


def _first(values: Iterable[int], change: Callable[[int], Setup], once: Estimate) -> int:
    """The first value whose job fits, or has no card to be judged by; else the last."""
    for value in values:
        if _fits(change(value), once):
            break
    return value


def _fits(setup: Setup, once: Estimate) -> bool:
    try:
        return once(setup).verdict.answer in ("fits", None)
    except (BadInput, CouldNotRun):
        return False


_IN_8_BIT = {"adam": "adamw_bnb_8bit", "adamw": "adamw_bnb_8bit", "lion": "lion_8bit", "rmsprop": "rmsprop_bnb_8bit"}


def _optimizers(setup: Setup, settings: Settings, profile: Profile) -> Iterator[Candidate]:
    """Smaller states, on the GPU only: under offload accelerate puts DeepSpeed's CPUAdam in the place of the Trainer's optimizer, and DeepSpeed refuses one that is handed to it."""
    if settings.offload_optimizer is not None or settings.optimizer.state_bits == 8:
        return
    by = "" if setup.trainer is not None else ": by the Trainer's optim, or its class handed to deepspeed.initialize with zero_allow_untested_optimizer"
    if optim := _IN_8_BIT.get(settings.optimizer.name):
        yield Candidate("8-bit-optimizer", 6, f"moments of 8 bit, and the package bitsandbytes{by}", lambda s: changes.optimizer(s, optim), frozenset({"offload-optimizer", "stage-3-offload", "adafactor"}))
    if settings.optimizer.moments > 1 and profile.at_peak.get("optimizer", 0) > _WORTH_NAMING * profile.peak.allocated_bytes:
        words = "another optimizer" + (", whose moment is not factored under ZeRO, since masters are flat" if settings.stage else "")
        yield Candidate("adafactor", 8, words + by.replace("its class", "transformers.Adafactor"), lambda s: changes.optimizer(s, "adafactor"), frozenset({"offload-optimizer", "stage-3-offload", "8-bit-optimizer"}))


def _stages(setup: Setup, settings: Settings, profile: Profile) -> Iterator[Candidate]:
    """A stage at which a configured offload no longer waits costs what that costs."""
    words = {1: "no more communication", 2: "no more communication", 3: "half as much communication again"}
    for number in range(settings.stage + 1, 4):
        effort, cost = 3 + number, words[number]
        then = resolve(changes.stage(setup, number))
        optimizer, parameters = then.offload_optimizer is not None, then.offload_param is not None
        if parameters or optimizer and settings.offload_optimizer is None:
            effort, cost = 8 if parameters else 7, _over_pcie(setup, settings, profile, number, parameters, optimizer)
        yield Candidate(f"stage-{number}", effort, cost, lambda s, n=number: changes.stage(s, n), frozenset(f"stage-{n}" for n in (1, 2, 3)) | {"stage-3-offload"})


def _over_pcie(setup: Setup, settings: Settings, profile: Profile, stage: int, parameters: bool, optimizer: bool = True) -> str:
    """What passes over PCIe in a step, of one rank."""
    moved = human(pcie.bytes_per_step(setup, settings, profile, stage, parameters, optimizer))
    return f"{moved} over PCIe a step and rank" + (", and the step runs on the CPU" if optimizer else "")


def _offloads(setup: Setup, settings: Settings, profile: Profile, short: bool) -> Iterator[Candidate]:
    cost = partial(_over_pcie, setup, settings, profile)
    if settings.offload_optimizer is None:
        lifted = max(settings.stage, 1)
        yield Candidate("offload-optimizer", 7, cost(lifted, settings.offload_param is not None), lambda s: changes.offload(changes.at_least_stage(s, 1), "optimizer"), frozenset({"stage-3-offload"}))
    if settings.offload_param is None:
        yield Candidate("stage-3-offload", 8, cost(3, True), lambda s: changes.offload(changes.stage(s, 3), "optimizer", "param"), frozenset({"stage-1", "stage-2", "stage-3", "offload-optimizer"}))
    if (setup.host_ram_gib is not None or short and settings.offload_optimizer is not None) and not (settings.stage == 3 and settings.offload_optimizer is not None and settings.offload_optimizer.device == "nvme"):
        words = f"{cost(3, settings.offload_param is not None)}, with masters and states read from and written to a disk; name a fast local folder as nvme_path"
        yield Candidate("offload-to-nvme", 9, words, lambda s: changes.offload_to_nvme(changes.stage(s, 3)), frozenset({"stage-1", "stage-2", "stage-3", "offload-optimizer", "stage-3-offload"}))


_BACK = {"optimizer": "no-offload-optimizer", "param": "no-offload-param"}


def _less_offload(settings: Settings) -> Iterator[Candidate]:
    """What gives host memory back: less of it locked, or less of the job in it."""
    offloads = {part: offload for part, offload in (("optimizer", settings.offload_optimizer), ("param", settings.offload_param)) if offload is not None}
    elsewhere = frozenset({"offload-optimizer", "stage-3-offload", "offload-to-nvme"})
    if pinned := [part for part, offload in offloads.items() if offload.pin_memory]:
        yield Candidate("unpinned-offload", 1, "slower copies over PCIe, which the GPU waits for", lambda s: changes.unpinned(s, *pinned), elsewhere | {"no-offload", *_BACK.values()})
    words = "GPU memory; nothing of {} passes over PCIe any more"
    for part in offloads:
        what = {"optimizer": "the gradients and states", "param": "the weights"}[part]
        yield Candidate(_BACK[part] if len(offloads) > 1 else "no-offload", 2, words.format(what), lambda s, part=part: changes.onto_gpu(s, part), elsewhere | {"no-offload", *_BACK.values()})
    if len(offloads) > 1:
        yield Candidate("no-offload", 3, words.format("the job"), lambda s: changes.onto_gpu(s, *offloads), elsewhere)
