"""One replay: a job resolved, its tape found, DeepSpeed's rules laid over it, and the stream played under its limits. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from explorer import allocator_options
from explorer.catalog import Card, Lengths, Model, find_card, find_model, lengths
from explorer.dsconfig import Settings, between_steps, resolve
from explorer.errors import CouldNotRun
from explorer.estimator import evaluating, saving, tapes, verdict
from explorer.estimator.allocator import Options
from explorer.estimator.bound import states_bound
from explorer.estimator.replay import replay
from explorer.estimator.rules import flattening
from explorer.estimator.rules.base import Rules
from explorer.estimator.rules.flattening import Device
from explorer.estimator.tape import Tape
from explorer.estimator.usage import Usage, run_under
from explorer.estimator.verdict import Capacity
from explorer.profile import Phase, Verdict
from explorer.setup import Setup
from explorer.units import GiB, MiB

DEFAULT_WORKSPACE = 32 * MiB
"""cuBLAS's workspace where no card is named: Hopper's (catalog/cards.json has each card's)."""


NEVER_OVERFLOW = ("causal",)
"""Tasks whose gradients were below 1 at the first step, so that none overflowed at fp16's first loss scale of 65536: of the rows in benchmarks/accuracy
all 17 of causal language models applied their first step, and all of other tasks at stages 1 to 3 skipped it. A mean over thousands of tokens is small."""


def capacity_of(setup: Setup) -> Capacity | None:
    card = find_card(setup.gpu) if setup.gpu else None
    outside = outside_pytorch(card, setup.world_size)
    if setup.capacity_gib is not None:
        limit = int(setup.capacity_gib * GiB)
        return Capacity(limit, True, card.total_bytes if card else limit + outside, outside)
    return Capacity(card.total_bytes - outside, False, card.total_bytes, outside) if card else None


def outside_pytorch(card: Card | None, world_size: int) -> int:
    """CUDA context and NCCL, by card (catalog/cards.json says where each number comes from)."""
    if card is None:
        return 0
    return card.context_bytes + card.nccl_bytes


def options_of(asked: Mapping[str, Any], fraction: bool) -> Options:
    """A job's `allocator`; `fraction`: the limit is a per-process one."""
    split = asked.get("max_split_size_mb")
    return Options(
        expandable_segments=bool(asked.get("expandable_segments")), max_split_bytes=split * MiB if split else None, fraction=fraction,
        collect_above=asked.get("garbage_collection_threshold"), divisions=allocator_options.divisions(asked.get("roundup_power2_divisions")),
    )


def _at(lengths: Lengths) -> dict[str, int | None]:
    """A batch's shape as a tape's variables."""
    return {"batch": lengths.micro_batch, "sequence": lengths.sequence, "target_sequence": lengths.target_sequence, "patches": lengths.patches}


def device_of(setup: Setup) -> Device | None:
    """The card whose free memory DeepSpeed asks for. A limit on what PyTorch may reserve changes nothing of it; where no card is named it is taken for the card's size."""
    capacity, card = capacity_of(setup), find_card(setup.gpu) if setup.gpu else None
    if capacity is None:
        return None
    options = options_of(setup.allocator, capacity.limited)
    return Device(total_bytes=capacity.total, outside_bytes=capacity.outside, has_nvml=card is None or card.has_nvml, options=options, assumed=card is None)


class Work:
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
        at = _at(self.lengths)
        self.patches = self.lengths.patches or 0
        self.batch_bytes: list[int] = self.tape.values(at)[list(self.tape.batch)].tolist()
        self.device = device_of(setup)
        try:
            self.stream, self.rules = replay(self.settings, self.tape, at, workspace, overflows=self.model.task not in NEVER_OVERFLOW, device=self.device, between=self._between_steps(on_progress), batches=self.lengths.batches)
        except CouldNotRun as error:
            raise CouldNotRun(f"{error}; {states_bound(self.settings, self.tape, at)}") from None
        self.capacity = capacity_of(setup)
        self.options = options_of(setup.allocator, self.capacity is None or self.capacity.limited)
        limits, steps = (self.capacity.limits, self.capacity.steps()) if self.capacity else ((), None)
        self.usages = run_under(self.stream, self.options, (None, *limits), frozenset(self.rules.releases), steps)
        self.unlimited: Usage = self.usages[None]

    def _between_steps(self, on_progress: tapes.Progress | None) -> dict[Phase, Callable[[Rules], None]]:
        """What the job does beside its steps, by phase."""
        self.evaluation, self.save = between_steps.evaluation(self.setup), between_steps.save(self.setup, self.settings)
        self.not_evaluated, phases = "", {}
        if self.evaluation is not None:
            try:
                tape, shape = evaluating.tape_of(self.setup, self.model, self.settings.compute, self.card, self.evaluation.samples, on_progress)
            except CouldNotRun as error:
                self.not_evaluated = str(error)
            else:
                phases["eval"] = lambda rules: self._evaluate(rules, tape, shape)
        if self.save is not None:
            copied = saving.host_bytes(self.settings, self.tape, self.patches, self.setup.lora is not None)
            phases["save"] = lambda rules: saving.play(rules, self.save, copied)
        return phases

    def _evaluate(self, rules: Rules, tape: Tape, shape: Lengths) -> None:
        self.logits_bytes = evaluating.logits_bytes(self.model, shape, 4 if self.settings.compute == "fp32" else 2)
        kept = self.evaluation.batches or 1 if self.evaluation.keeps_predictions and self.logits_bytes else 0
        evaluating.play(evaluating.Forward(tape, _at(shape), rules), rules, self.logits_bytes, kept)

    @property
    def judged(self) -> tuple[Verdict, Usage]:
        """The verdict, and the usage that reserved figures are read from."""
        if self.capacity is None:
            return Verdict(answer=None, why="no GPU card and no capacity is given"), self.unlimited
        answer, usage = verdict.judge(self.stream, self.usages, self.capacity)
        return self._sized(answer), usage

    def _sized(self, answer: Verdict) -> Verdict:
        """No "fits" that hangs on a card's size which nobody gave: a larger card under the same limit has room to flatten on the GPU, and the limit has not."""
        if answer.answer != "fits" or not (self.device.assumed and flattening.asked_in_vain(self.rules.flattenings)):
            return answer
        return replace(answer, answer="tight", why=f"{answer.why}; {flattening.UNSURE}")


def with_micro_batch(setup: Setup, micro_batch: int) -> Setup:
    """The same job with another micro-batch; batch keys of the DeepSpeed config follow it."""
    config = {k: v for k, v in setup.deepspeed.items() if k not in ("train_micro_batch_size_per_gpu", "train_batch_size")}
    config["gradient_accumulation_steps"] = resolve(setup).gradient_accumulation_steps
    trainer = None if setup.trainer is None else {k: v for k, v in setup.trainer.items() if k != "per_device_train_batch_size"}
    return setup.replace(micro_batch=micro_batch, deepspeed=config, trainer=trainer)
