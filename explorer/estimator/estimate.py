"""`estimate`: a Setup in, a Profile out; milliseconds for any model whose tape is at hand. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from explorer import timeline
from explorer.catalog import Card, Lengths, Model, find_card, find_model, lengths, own_model
from explorer.dsconfig import Settings, resolve, versions
from explorer.errors import BadInput, CouldNotRun, shown
from explorer.estimator import saving, tapes, verdict
from explorer.estimator.allocator import Options
from explorer.estimator.bound import states_bound
from explorer.estimator.replay import replay
from explorer.estimator.rules.base import Rules
from explorer.estimator.sources import at_peak
from explorer.estimator.stream import PROVENANCES, Stream
from explorer.estimator.tape import Parameter, Tape
from explorer.estimator.usage import Usage, run_under
from explorer.profile import CATEGORIES, Host, Peak, PhaseMemory, Profile, Verdict
from explorer.setup import Setup
from explorer.units import GiB, MiB, human

DEFAULT_WORKSPACE = 32 * MiB
"""cuBLAS's workspace where no card is named: Hopper's (catalog/cards.json has each card's)."""

PROCESS_BYTES = 950_000_000
"""Host memory that CUDA's context, its libraries and the kernels add to a process as they load, beyond Python and torch themselves: 0.7 to 1.2 GB on an H200, by the kernels a model needs."""
NCCL_BYTES = 357_000_000
"""What NCCL's first collective adds to that: the median of five readings on an H200, 343 to 361 MB (benchmarks/gpu/host-h200.jsonl)."""

_EVALUATED = 8
"""The Trainer's own per_device_eval_batch_size."""
_SEARCH_REPLAYS = 24
_LARGEST_BATCH = 1 << 20
_SURE = 0.75
"""Part of the capacity whose batch the search begins at: what is reserved beyond what is allocated, a sixth at most in the jobs looked at, has a third there."""


def estimate(setup: Setup | Mapping[str, Any], largest: bool = True, on_progress: tapes.Progress | None = None, sources: bool = False, factory: str | Callable[..., Any] | None = None) -> Profile:
    """What memory one training step of `setup` takes. Raises BadInput for what cannot be, CouldNotRun where a tape is missing.

    `sources`: also say what the peak is made of and where each part comes from. `largest`: also search the largest micro-batch that fits, which takes a few dozen replays.
    `factory`: your own model, in place of `model`: a module's function of `micro_batch` and, where there is one, `sequence` that returns (model, batch), or its name,
    "package.module:function" (catalog/own.py). It is run in the worker, on tensors without memory.
    """
    if factory is not None:
        setup = _with_own_model(setup, factory)
    job = setup if isinstance(setup, Setup) else Setup.from_job(setup)
    work = _Work(job, on_progress)
    return work.profile(largest_micro_batch(job, on_progress) if largest else None, sources)


def _with_own_model(setup: Setup | Mapping[str, Any], factory: str | Callable[..., Any]) -> dict[str, Any]:
    job = setup.to_job() if isinstance(setup, Setup) else dict(setup)
    name = own_model(factory).name
    if job.get("model", name) != name:
        raise BadInput("model", f"is {shown(job['model'])}, and a factory makes the model; leave one of them out")
    return {**job, "model": name}


def largest_micro_batch(setup: Setup, on_progress: tapes.Progress | None = None, stop: threading.Event | None = None) -> int | None:
    """The largest n such that every micro-batch up to n fits; 0 where one sample does not, None where no capacity is known. Whatever the setup's own is.

    `stop`: set it and the search, which takes a second or so, raises CouldNotRun at its next replay.
    """
    return largest_fitting(setup, with_micro_batch, 1, _LARGEST_BATCH, on_progress, stop)


def largest_fitting(setup: Setup, change: Callable[[Setup, int], Setup], least: int, most: int, on_progress: tapes.Progress | None = None, stop: threading.Event | None = None) -> int | None:
    """The largest n from `least` to `most` such that `change(setup, n)` and every one below it fit; `least` - 1 where none does, None where no capacity is known.

    What is allocated grows with n, so the last that it lets fit is found by halves. What is reserved may fall: below that, values
    are taken in turn, or some dozens of them where they are many, and the first that does not fit ends the search.
    """
    capacity = _capacity(setup)
    if capacity is None:
        return None

    def work(n: int) -> _Work:
        if stop is not None and stop.is_set():
            raise CouldNotRun("the search for the largest that fits was stopped")
        return _Work(change(setup, n), on_progress)

    @cache
    def allocated(n: int) -> int:
        return int(work(n).unlimited.allocated.max())

    @cache
    def fits(n: int) -> bool:
        return work(n).judged[0].answer == "fits"

    top = min(least + 1, most)  # one sample may need a tape of its own, so it is asked about only where two are too many
    while allocated(top) <= capacity.bytes:
        if top == most:
            if allocated(top) <= _SURE * capacity.bytes and fits(top):
                return top
            top += 1
            break
        top = min(2 * top, most)
    top = _last(lambda n: allocated(n) <= capacity.bytes, least - 1, top)
    low = _last(lambda n: allocated(n) <= _SURE * capacity.bytes, least - 1, top + 1)
    while low >= least and not fits(low):
        low //= 2
    low = max(low, least - 1)
    step = max(1, (top - low) // _SEARCH_REPLAYS)
    while low < top:
        high = min(low + step, top)
        if not fits(high):
            return _last(fits, low, high)
        low = high
    return low


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last n from `low`, where it holds, to `high`, where it does not, found by halves."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def with_micro_batch(setup: Setup, micro_batch: int) -> Setup:
    """The same job with another micro-batch; batch keys of the DeepSpeed config follow it."""
    config = {k: v for k, v in setup.deepspeed.items() if k not in ("train_micro_batch_size_per_gpu", "train_batch_size")}
    config["gradient_accumulation_steps"] = resolve(setup).gradient_accumulation_steps
    trainer = None if setup.trainer is None else {k: v for k, v in setup.trainer.items() if k != "per_device_train_batch_size"}
    return setup.replace(micro_batch=micro_batch, deepspeed=config, trainer=trainer)


@dataclass(frozen=True, slots=True)
class Events:
    """One job's events, and what PyTorch's allocator makes of them without a limit."""

    stream: Stream
    usage: Usage
    parameters: tuple[Parameter, ...]
    kept: Mapping[int, int]
    """Whole weights that stage 3 has let go and autograd keeps: block → the position from which on it alone does."""


def events(setup: Setup, on_progress: tapes.Progress | None = None) -> Events:
    """The events behind `estimate(setup)`, for whoever asks which of them a request was. Raises as `estimate` does."""
    work = _Work(setup, on_progress)
    return Events(work.stream, work.unlimited, work.tape.model_parameters(work.patches), work.rules.kept)


@dataclass(frozen=True, slots=True)
class _Capacity:
    """What PyTorch may reserve, and what its out-of-memory text would say of the card."""

    bytes: int
    limited: bool
    total: int
    outside: int


def _capacity(setup: Setup) -> _Capacity | None:
    card = find_card(setup.gpu) if setup.gpu else None
    outside = outside_pytorch(card, setup.world_size)
    if setup.capacity_gib is not None:
        limit = int(setup.capacity_gib * GiB)
        return _Capacity(limit, True, card.total_bytes if card else limit + outside, outside)
    return _Capacity(card.total_bytes - outside, False, card.total_bytes, outside) if card else None


def outside_pytorch(card: Card | None, world_size: int) -> int:
    """CUDA context and NCCL, by card (catalog/cards.json says where each number comes from)."""
    if card is None:
        return 0
    return card.context_bytes + card.nccl_bytes


class _Work:
    """One replay and what is read off it."""

    def __init__(self, setup: Setup, on_progress: tapes.Progress | None) -> None:
        self.model: Model = find_model(setup.model)
        self.setup = setup.replace(zero_init=False) if self.model.in_4_bit else setup
        self.settings: Settings = resolve(self.setup)
        if self.model.in_4_bit and self.settings.autocast is not None:
            raise CouldNotRun("deepspeed.torch_autocast: with weights in 4 bit is not modelled; what bf16.enabled takes is less, by the fp32 weights that are not in 4 bit and their casts")
        self.card = find_card(setup.gpu) if setup.gpu else None
        self.lengths: Lengths = lengths(setup, self.model)
        self.key = tapes.key(setup, self.settings.compute, self.model, self.lengths, self.card)
        self.tape: Tape = tapes.find(setup, self.key, self.model, on_progress)
        workspace = self.card.cublas_workspace_bytes if self.card else DEFAULT_WORKSPACE
        at = {"batch": self.lengths.micro_batch, "sequence": self.lengths.sequence, "target_sequence": self.lengths.target_sequence, "patches": self.lengths.patches}
        self.patches = self.lengths.patches or 0
        try:
            self.stream, self.rules = replay(self.settings, self.tape, at, workspace)
        except CouldNotRun as error:
            raise CouldNotRun(f"{error}; {states_bound(self.settings, self.tape, at)}") from None
        self.options = Options(
            expandable_segments=bool(setup.allocator.get("expandable_segments", False)),
            max_split_bytes=setup.allocator["max_split_size_mb"] * MiB if setup.allocator.get("max_split_size_mb") else None,
        )
        self.capacity = _capacity(setup)
        limits = verdict.limits(self.capacity.bytes) if self.capacity else ()
        self.usages = run_under(self.stream, self.options, (None, *limits), frozenset(self.rules.releases))
        self.unlimited: Usage = self.usages[None]

    @property
    def judged(self) -> tuple[Verdict, Usage]:
        """The verdict, and the usage that reserved figures are read from."""
        capacity = self.capacity
        if capacity is None:
            return Verdict(answer=None, why="no GPU card and no capacity is given"), self.unlimited
        return verdict.judge(self.stream, self.usages, capacity.bytes, capacity.limited, capacity.total, capacity.outside)

    def profile(self, largest: int | None, sources: bool = False) -> Profile:
        """The whole answer."""
        answer, limited = self.judged
        curve, runs = _timeline(self.stream, self.unlimited)
        parameters = self.tape.model_parameters(self.patches)
        return Profile(
            source="estimated",
            parameters=sum(p.numel for p in parameters) + self.tape.packed,
            trainable_parameters=sum(p.numel for p in parameters if p.trainable),
            peak=_peak(self.stream, self.unlimited, limited),
            steps=_steps(self.stream, self.unlimited, limited),
            at_peak=categories_at(self.stream, self.unlimited, int(self.unlimited.allocated.argmax())),
            host=_host(self.rules, self.setup),
            outside_pytorch_bytes=outside_pytorch(self.card, self.setup.world_size),
            verdict=answer,
            largest_micro_batch=largest,
            provenance=_provenance(self.stream),
            environment={"torch": self.tape.versions.get("torch"), "transformers": self.tape.versions.get("transformers"), "deepspeed": self.setup.deepspeed_version or versions.RULES, "gpu": self.setup.gpu},
            notes=self._notes(),
            sources=at_peak(self.stream, self.unlimited, self.rules, self.tape) if sources else (),
            timeline=curve, timeline_phases=runs,
        )

    def _evaluation(self, trainer: Mapping[str, Any]) -> list[str]:
        """What a pass without gradients takes at most: a training forward of its batch keeps all that it keeps, and more."""
        if not _evaluates(trainer):
            return []
        samples = trainer.get("per_device_eval_batch_size", _EVALUATED)
        work = _Work(with_micro_batch(self.setup, samples), None)
        marks = [m for m in work.stream.marks if (m.step, m.phase) == ("steady", "forward")]
        most = max(int(work.unlimited.allocated[m.start : m.end + 1].max()) for m in marks)
        kept = "" if trainer.get("prediction_loss_only") else "; the predictions it collects come on top, on the GPU until eval_accumulation_steps moves them to the host"
        return [f"an evaluation of {samples} samples a GPU (per_device_eval_batch_size) is no part of the step; it takes {human(most)} at most, as a training forward of them would{kept}"]

    def _notes(self) -> tuple[str, ...]:
        notes = list(self.settings.notes)
        if self.setup.trainer is not None:
            notes.append("the trainer part fills \"auto\" values and chooses the optimizer and its groups; the step itself is the plain engine's")
            notes.extend(self._evaluation(self.setup.trainer))
        if self.setup.lora is not None and self.settings.stage == 3 and self.settings.precision != "fp32":
            notes.append(f"LoRA's adapters are taken in {self.settings.precision}: attach them with autocast_adapter_dtype=False, or at stage 3 peft keeps them, and copies of their inputs, in fp32")
        notes.extend(versions.notes(self.setup.deepspeed_version))
        if self.model.in_4_bit:
            notes.append("weights in 4 bit are derived from what bitsandbytes stores and allocates, not measured; what loading and quantizing them takes is left out")
        if self.model.in_4_bit and self.settings.stage == 3:
            notes.append(f"stage 3 divides 4-bit weights only where bnb_4bit_quant_storage is of the model's dtype ({self.settings.precision}), and transformers builds such a model without zero.Init: both are taken so")
        if saving.gathers(self.settings):
            notes.append(saving.note(self.settings, self.tape, self.patches))
        if self.setup.attention == "flash_attention_2":
            notes.append("flash_attention_2 is taken as PyTorch's own flash kernel")
        host, asked = _host(self.rules, self.setup).per_node_bytes, self.setup.host_ram_gib
        if asked is not None and host > asked * GiB:
            notes.append(f"host_ram_gib is {asked:g}, and the processes of one node take {human(host)} of host memory at their peak: the host would not hold them")
        if self.card is None:
            notes.append("no card is named: attention kernels and cuBLAS's workspace are taken as on Hopper")
        if self.settings.precision == "fp16":
            notes.append("fp16 usually skips its first steps for overflow; the first step here is the first one applied")
        return tuple(notes)


def _evaluates(trainer: Mapping[str, Any]) -> bool:
    """Whether the Trainer evaluates while it trains (transformers/training_args.py)."""
    return trainer.get("eval_strategy", "no") not in ("no", None) or bool(trainer.get("do_eval")) or bool(trainer.get("eval_on_start"))


def categories_at(stream: Stream, usage: Usage, position: int) -> dict[str, int]:
    """Category → bytes alive after `position` events; they sum to allocated."""
    events = stream.order[:position]
    alive = np.bincount(np.abs(events), weights=np.sign(events), minlength=len(stream.bytes) + 1)[1:].astype(bool)
    sums = np.bincount(stream.categories[alive], weights=usage.sizes[alive], minlength=len(CATEGORIES))
    return {name: int(sums[i]) for i, name in enumerate(CATEGORIES)}


def _steps(stream: Stream, usage: Usage, limited: Usage) -> dict[str, tuple[PhaseMemory, ...]]:
    steps: dict[str, tuple[PhaseMemory, ...]] = {}
    for step, phases in (("first", ("init", "forward", "backward", "step")), ("steady", ("forward", "backward", "step"))):
        steps[step] = tuple(_phase(stream, usage, limited, step, phase) for phase in phases)
    return steps


def _phase(stream: Stream, usage: Usage, limited: Usage, step: str, phase: str) -> PhaseMemory:
    """Each figure is its own maximum over the runs of the phase."""
    marks = [m for m in stream.marks if m.step == step and m.phase == phase]
    highest = max(marks, key=lambda m: usage.allocated[m.start : m.end + 1].max())
    at = highest.start + int(usage.allocated[highest.start : highest.end + 1].argmax())
    return PhaseMemory(
        phase=phase,
        end_allocated_bytes=max(int(usage.allocated[m.end]) for m in marks),
        peak_allocated_bytes=int(usage.allocated[at]),
        peak_reserved_bytes=max(int(limited.reserved[m.start : m.end + 1].max()) for m in marks),
        at_peak=categories_at(stream, usage, at),
    )


def _peak(stream: Stream, usage: Usage, limited: Usage) -> Peak:
    allocated_at, reserved_at = int(usage.allocated.argmax()), int(limited.reserved.argmax())
    a = verdict.phase_at(stream.marks, max(0, allocated_at - 1))
    r = verdict.phase_at(stream.marks, max(0, reserved_at - 1))
    return Peak(
        allocated_bytes=int(usage.allocated[allocated_at]), allocated_phase=a.phase, allocated_step=a.step,
        reserved_bytes=int(limited.reserved[reserved_at]), reserved_phase=r.phase, reserved_step=r.step,
    )


def _provenance(stream: Stream) -> dict[str, str]:
    """Category → where most of its bytes come from."""
    result = {}
    for i, name in enumerate(CATEGORIES):
        mine = stream.categories == i
        if mine.any():
            weights = np.bincount(stream.provenance[mine], weights=stream.bytes[mine], minlength=len(PROVENANCES))
            result[name] = PROVENANCES[int(weights.argmax())]
    return result


def _host(rules: Rules, setup: Setup) -> Host:
    """What DeepSpeed keeps on the host, and what CUDA's libraries take there."""
    host = rules.host
    resident = host.pinned_bytes + host.pageable_bytes + PROCESS_BYTES + NCCL_BYTES
    processes = min(setup.world_size, setup.gpus_per_node)
    peak = host.peak_bytes + PROCESS_BYTES + NCCL_BYTES
    return Host(pinned_bytes=host.pinned_bytes, pageable_bytes=host.pageable_bytes, resident_bytes=resident, peak_bytes=peak, per_node_bytes=peak * processes)


def _timeline(stream: Stream, usage: Usage) -> tuple[timeline.Curve, timeline.Phases]:
    """Allocated bytes over the steady step."""
    marks = [m for m in stream.marks if m.step == "steady"]
    start, end = marks[0].start, marks[-1].end
    return timeline.draw(usage.allocated[start : end + 1], [(m.phase, m.start - start) for m in marks])
