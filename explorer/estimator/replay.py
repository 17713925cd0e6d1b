"""Lay DeepSpeed's rules over a tape: one ordered event stream from init to the steady step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from explorer.dsconfig import Settings
from explorer.errors import CouldNotRun
from explorer.estimator.program import ACTIVATION, ENTER, FORWARD, GRADIENT, LEAVE, Unrolled
from explorer.estimator.rules.base import Job, Rules
from explorer.estimator.rules.stage0 import Stage0, Stage0Fused, Stage0Unfused
from explorer.estimator.rules.stage3 import Stage3
from explorer.estimator.rules.stage12 import Stage12
from explorer.estimator.stream import Stream, Writer
from explorer.estimator.tape import Tape
from explorer.profile import CATEGORIES

_ACTIVATIONS, _TEMPORARY = CATEGORIES.index("activations"), CATEGORIES.index("temporary")


def wrapper(settings: Settings) -> type[Rules]:
    """The wrapper class DeepSpeed builds (runtime/engine.py, `_do_optimizer_sanity_check`)."""
    if settings.grad_accum_dtype != settings.precision:
        raise CouldNotRun("data_types.grad_accum_dtype other than the model's precision is not modelled yet; leave it out, or run the probe")
    if settings.stage == 3:
        return Stage3
    if settings.stage in (1, 2):
        return Stage12
    if settings.precision == "fp32":
        return Stage0
    return Stage0Fused if settings.optimizer.kernel == "fused" else Stage0Unfused


def replay(settings: Settings, tape: Tape, lengths: Mapping[str, int | None], workspace_bytes: int) -> tuple[Stream, Rules]:
    """The stream of a first and a steady step, and the rules that wrote it (for their host ledger).

    `workspace_bytes`: cuBLAS's workspace, which PyTorch's allocator hands out at the first matrix product and keeps: once for
    the main thread and once for autograd's, since each thread has its own handle (ATen/cuda/CublasHandlePool.cpp).
    """
    job = Job(settings=settings, parameters=tape.model_parameters(lengths.get("patches") or 0), buffers_bytes=tape.buffers_bytes, modules=tape.modules, direct=tape.direct)
    writer = Writer()
    rules = wrapper(settings)(job, writer)
    rules.init()
    writer.mark(0, "first", "init")
    micro_batches = _MicroBatches(tape, tape.values(lengths), writer, rules)
    start = len(writer.order)
    micro_batches.load_batch()
    writer.allocate(workspace_bytes, "temporary", "cuBLAS workspace", "assumed")
    micro_batches.backward_workspace = workspace_bytes
    steps = settings.gradient_accumulation_steps
    skips = _skips_first(settings)
    for number, step in enumerate(("first", "first", "steady") if skips else ("first", "steady")):
        for index in sorted({0, min(1, steps - 1), steps - 1}):
            rules.before_micro(index)
            micro_batches.forward()
            writer.mark(start, step, "forward")
            start = len(writer.order)
            micro_batches.backward()
            writer.mark(start, step, "backward")
            start = len(writer.order)
        if skips and number == 0:
            rules.skipped_step()
        else:
            rules.step()
        writer.mark(start, step, "step")
        start = len(writer.order)
    return writer.stream(), rules


def _skips_first(settings: Settings) -> bool:
    """Whether the first applied step follows a skipped one: fp16 with a dynamic loss scale starts too high. It matters at stage 3,
    which prefetches from its second micro-batch on."""
    fp16 = settings.config.get("fp16", {})
    return settings.stage == 3 and settings.precision == "fp16" and not fp16.get("loss_scale")


class _MicroBatches:
    """Copies a tape's events into the stream, stopping wherever the rules act."""

    def __init__(self, tape: Tape, values: np.ndarray, writer: Writer, rules: Rules) -> None:
        self.tape, self.values, self.writer, self.rules = tape, values, writer, rules
        self.flat: Unrolled = tape.unrolled
        self.sizes = values[self.flat.size_rows]
        self.categories = np.where(self.flat.categories == ACTIVATION, _ACTIVATIONS, _TEMPORARY).tolist()
        self.owners = [tape.modules[i] if i >= 0 else "" for i in self.flat.owners.tolist()]
        wanted = (GRADIENT, ENTER, LEAVE) if rules.wants_modules else (GRADIENT,)
        self.hooks = [h for h in self.flat.hooks if h[1] in wanted]
        self.before = [h for h in self.hooks if h[1] != GRADIENT and h[3] == FORWARD]
        self.after = self.hooks[len(self.before) :]
        self.base = 0
        self.order: list[int] = []
        self.backward_workspace = 0
        """cuBLAS's workspace of autograd's thread, until its first matrix product: the one that makes the first gradient."""

    def load_batch(self) -> None:
        """The batch itself, which the caller keeps."""
        for row in self.tape.batch:
            self.writer.allocate(int(self.values[row]), "activations", "batch", "traced")

    def forward(self) -> None:
        """One forward."""
        self.base = self.writer.reserve(self.sizes, self.categories, self.owners)
        order = self.flat.order.astype(np.int64)
        self.order = (order + np.sign(order) * self.base).tolist()
        self._play(0, self.flat.forward_end, self.before)

    def backward(self) -> None:
        """The backward of the same micro-batch."""
        self._play(self.flat.forward_end, len(self.order), self.after)
        self.rules.after_backward()

    def _play(self, at: int, end: int, hooks: list[tuple[int, int, int, int]]) -> None:
        rules, out, order = self.rules, self.writer.order, self.order
        for position, kind, which, argument in hooks:
            if position > at:
                out.extend(order[at:position])
                at = position
            if kind == GRADIENT:
                if self.backward_workspace:
                    self.writer.allocate(self.backward_workspace, "temporary", "cuBLAS workspace of autograd's thread", "assumed")
                    self.backward_workspace = 0
                rules.gradient(which, self.base + argument)
            elif kind == ENTER:
                rules.enter(which, argument)
            else:
                rules.leave(which, argument)
        out.extend(order[at:end])
