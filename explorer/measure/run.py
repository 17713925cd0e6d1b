"""One real run of a Setup: build, initialize DeepSpeed, step until a step repeats itself, and read memory throughout (torch).

Runs in a fork of the worker. On CUDA the figures are PyTorch's own counters and its allocator's history; on DeepSpeed's CPU
accelerator they are the profiler's allocation events, which give every tensor's exact size.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from explorer.catalog import Model, find_card, find_model
from explorer.dsconfig import Settings, resolve
from explorer.errors import CouldNotRun
from explorer.measure import kernels, nvme
from explorer.measure.limits import about_parameters
from explorer.measure.meters import meter
from explorer.measure.owners import coordinator
from explorer.measure.world import StandIn, World
from explorer.profile import Profile
from explorer.setup import Setup

Emit = Callable[[dict[str, Any]], None]
MOST_STEPS = 12
"""Steps tried before giving up on an applied one (fp16 may skip the first several) and a repeated one."""


@dataclass(slots=True)
class StepReading:
    """One step's phases, as `meter.Reading`s."""

    phases: dict[str, list[Any]] = field(default_factory=dict)
    applied: bool = True
    traced: bool = True
    """Whether stage 3 knew the order of its modules, by which it prefetches; true at other stages."""
    first_mark: int = 0
    last_mark: int = 0


class Run:
    """The life of one probe. `profile()` does it all."""

    def __init__(self, setup: Setup, emit: Emit, world: World | None = None) -> None:
        self.setup, self.emit = setup, emit
        self.settings: Settings = resolve(setup)
        self.world = world or StandIn(self.settings.rank, self.settings.world_size)
        self.model: Model = find_model(setup.model)
        self.meter = meter(self.world.device)
        self.device = self.meter.device
        self.notes: list[str] = list(self.settings.notes)
        self.engine: Any = None
        self.batch: dict[str, Any] = {}
        self.parameters = self.trainable = 0
        self.steps: list[StepReading] = []
        self.init: Any = None
        self.failure: tuple[str, str, str] | None = None
        """(phase, step, PyTorch's text) where memory ran out."""
        self.phase, self.step_name = "init", "first"
        self.capacity: int | None = None
        self.swap: Path | None = None
        """Where DeepSpeed swaps to disk, if it does."""
        self.torch_adam = False
        """Whether torch's AdamW runs in place of an optimizer that could not be compiled."""
        self.odd_losses: dict[int, float] = {}
        """Step, from 1 → its loss where that is no finite number."""

    def say(self, text: str) -> None:
        """Progress, for people."""
        self.emit({"progress": text})

    def profile(self) -> Profile:
        """Run everything and sum it up."""
        with nvme.swap_folder(self.settings, about_parameters(self.model)) as self.swap:
            return self._profile()

    def _profile(self) -> Profile:
        from explorer.measure.summary import summarize

        started = time.monotonic()
        self._limit()
        self._environment()
        self._kernels()
        self.meter.start()
        try:
            self._initialize()
            self._steps()
        except Exception as error:
            if not out_of_memory(error):
                raise
            self.failure = self.phase, self.step_name, str(error)
            self.meter.interrupted()
        self.meter.host.finish()
        self.meter.stop()
        self.say(f"reading the result after {time.monotonic() - started:.0f} s")
        return summarize(self)

    # --- before

    def _limit(self) -> None:
        """A smaller card is stood in for by a limit on what PyTorch may reserve."""
        total = self.meter.total_bytes()
        if total is None:
            return
        if self.setup.capacity_gib is not None:
            self.capacity = int(self.setup.capacity_gib * (1 << 30))
        elif self.setup.gpu is not None:
            card = find_card(self.setup.gpu)
            outside = card.context_bytes + card.nccl_bytes
            if card.total_bytes < total * 0.98:
                self.capacity = card.total_bytes - outside
                self.notes.append(f"limited to what PyTorch may reserve on {card.name}: this card stands in for it")
        if self.capacity is not None and self.capacity > total:
            raise CouldNotRun(f"capacity_gib is larger than this card's {total / (1 << 30):.1f} GiB; leave it out or name a smaller one")
        self.meter.prepare(self.capacity, self.setup.allocator)

    def _environment(self) -> None:
        """Rank and world of the job, and a process group."""
        note = self.world.join(self.device)
        if note is not None:
            self.notes.append(note)
        self.meter.set_up_arch()

    def _kernels(self) -> None:
        """Compiled ahead, so that no phase is timed or measured with a compiler in it."""
        note = kernels.build(self.settings, self.say)
        if note is not None:
            self.torch_adam = True
            self.notes.append(note)

    # --- initialize

    def _initialize(self) -> None:
        import deepspeed

        self.say("building the model")
        self.meter.begin_init()
        deepspeed.init_distributed(verbose=False)
        model = self._counted(self._build())
        trained = [p for p in model.parameters() if p.requires_grad]
        self.say("deepspeed.initialize")
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=self._config())
        self.meter.watch(self.engine, self.settings)
        self.init = self.meter.end_init()
        self.batch = self.batch_on(self.meter.build_device())
        self.meter.batch(self.batch)

    def _counted(self, model: Any) -> Any:
        """The model, its parameters counted and their gradients watched."""
        self.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        trained = [p for p in model.parameters() if p.requires_grad]
        self.trainable = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
        self.meter.watch_gradients(trained)
        return model

    def _build(self) -> Any:
        import deepspeed
        import torch

        from explorer.workload import build_model

        dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[self.settings.precision]
        partitioned = self.settings.stage == 3 and self.settings.zero_init
        device = "cpu" if partitioned else self.build_device()
        model = build_model(self.model, self.setup, device=device, dtype=dtype)
        self.meter.built(model, "host" if partitioned else "parameters")
        if partitioned:
            self.say("partitioning the model (zero.Init)")
            deepspeed.zero.Init(module=model, config_dict_or_path=self._config(), dtype=dtype)
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(self.meter.build_device())
        return model

    def build_device(self) -> str:
        """Where the model is built before DeepSpeed gets it."""
        return self.meter.build_device()

    def _config(self) -> dict[str, Any]:
        """What the plain engine takes: batch keys and "auto" resolved, an optimizer named, the log quiet."""
        config = json.loads(json.dumps(dict(self.settings.config), default=dict))
        config.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-5}})
        config["optimizer"].setdefault("params", {}).setdefault("lr", 1e-5)
        config["zero_allow_untested_optimizer"] = True
        config["steps_per_print"] = 1 << 30
        if self.settings.optimizer.kernel == "foreach":
            config["zero_force_ds_cpu_optimizer"] = False
        self._without_compiler(config)
        self._swap_here(config)
        return config

    def _without_compiler(self, config: dict[str, Any]) -> None:
        """torch's AdamW, offloaded or not, where DeepSpeed's could not be compiled."""
        if not self.torch_adam:
            return
        config["zero_force_ds_cpu_optimizer"] = False
        if "optimizer" in config:
            config["optimizer"].setdefault("params", {})["torch_adam"] = True

    def _swap_here(self, config: dict[str, Any]) -> None:
        """What DeepSpeed swaps to disk goes to the probe's own folder."""
        if self.swap is None:
            return
        for name in ("offload_optimizer", "offload_param"):
            section = config["zero_optimization"].get(name)
            if section and section.get("device") == "nvme":
                section["nvme_path"] = str(self.swap)

    def batch_on(self, device: str) -> dict[str, Any]:
        """The job's batch."""
        import torch

        from explorer.workload import make_batch

        dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[self.settings.precision]
        return make_batch(self.model, self.setup, device=device, dtype=dtype)

    # --- steps

    def _steps(self) -> None:
        """Steps until there are enough."""
        while not self.done():
            self.step_name = "steady" if self._applied() else "first"
            self.steps.append(self._step(len(self.steps)))
        self._conclude()

    def _applied(self) -> list[StepReading]:
        return [s for s in self.steps if s.applied]

    def done(self) -> bool:
        """Whether, on every rank, one step was applied and a later one repeated the step before it, or trying more leads nowhere."""
        return self.world.agree(len(self.steps), len(self.steps) >= MOST_STEPS or self._repeated() or self._lost())

    def _lost(self) -> bool:
        """Whether DeepSpeed skips one step after the other since the loss is no number: unlike an overflow in fp16, that stays so."""
        last = range(len(self.steps), len(self.steps) - 3, -1)
        return len(self.steps) >= 3 and all(number in self.odd_losses and not self.steps[number - 1].applied for number in last)

    def _repeated(self) -> bool:
        applied = self._applied()
        return len(applied) >= 3 and self.steps[-1].applied and applied[-2].traced and _same(applied[-1], applied[-2])

    def _conclude(self) -> None:
        """Say so where no step repeated another, and where a loss was no number."""
        if self.odd_losses:
            self.notes.append(self._odd_losses())
        if self._repeated():
            return
        if self._applied() and not self._traced():
            self.notes.append("stage 3 found its modules in another order each time, so it never prefetched; the last step stands for the steady one")
        elif self._applied():
            self.notes.append(f"no applied step repeated the one before it within {len(self.steps)}: the last one stands for the steady step")
        else:
            self.notes.append("every step was skipped for overflow: the optimizer's states were never made")

    def _odd_losses(self) -> str:
        """Which steps had a loss that is no number, and whether the measured one is among them."""
        steps = ", ".join(f"{step} ({loss})" for step, loss in self.odd_losses.items())
        measured = "the measured one is among them" if len(self.steps) in self.odd_losses else "the measured one is not among them"
        return f"the loss was not finite in step{'s' if len(self.odd_losses) > 1 else ''} {steps} of {len(self.steps)}, {measured}: memory is the same, but a model learns nothing so"

    def look_at(self, loss: Any) -> None:
        """Note a loss that is no finite number. Between two phases: reading it makes no block on the device."""
        value = float(loss.detach())
        if not math.isfinite(value):
            self.odd_losses.setdefault(len(self.steps) + 1, value)

    def _traced(self) -> bool:
        gatherer = coordinator(self.engine)
        return gatherer is None or gatherer.is_complete_trace()

    def _step(self, number: int) -> StepReading:
        reading = StepReading(first_mark=self.meter.here())
        skipped = self._skipped()
        for micro in range(self.settings.gradient_accumulation_steps):
            self._micro(number, micro, reading)
        self.phase = "step"
        self.say(f"step {number + 1}: optimizer step")
        self.meter.begin("step")
        self.engine.step()
        reading.phases.setdefault("step", []).append(self.meter.end("step"))
        reading.applied, reading.traced = self._skipped() == skipped, self._traced()
        reading.last_mark = self.meter.here()
        return reading

    def _micro(self, number: int, micro: int, reading: StepReading) -> None:
        self.phase = "forward"
        self.say(f"step {number + 1}: forward" + (f" of micro-batch {micro + 1}" if micro else ""))
        self.meter.begin("forward")
        loss = self.engine(**self.batch).loss
        reading.phases.setdefault("forward", []).append(self.meter.end("forward"))
        self.look_at(loss)
        self.phase = "backward"
        self.say(f"step {number + 1}: backward")
        self.meter.begin("backward")
        self.engine.backward(loss)
        if micro < self.settings.gradient_accumulation_steps - 1:
            self.engine.step()
        del loss
        reading.phases.setdefault("backward", []).append(self.meter.end("backward"))

    def environment(self) -> dict[str, str | None]:
        """Versions beyond the plain engine's."""
        return {}

    def _skipped(self) -> int:
        return int(getattr(self.engine, "skipped_steps", 0))


def _same(one: StepReading, other: StepReading) -> bool:
    return all([(r.peak, r.end) for r in one.phases[p]] == [(r.peak, r.end) for r in other.phases[p]] for p in one.phases)


def out_of_memory(error: Exception) -> bool:
    """Whether PyTorch ran out of GPU memory."""
    return type(error).__name__ == "OutOfMemoryError" or bool(re.search(r"CUDA out of memory", str(error)))
