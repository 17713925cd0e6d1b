"""Lay DeepSpeed's rules over a tape: one ordered event stream from init to the steady step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from explorer.dsconfig import Settings
from explorer.errors import BadInput, CouldNotRun
from explorer.estimator.program import ACTIVATION, BACKWARD, CUBLAS, CUBLASLT, ENTER, FORWARD, GRADIENT, LEAVE, MATMUL, Unrolled
from explorer.estimator.rules.accumulation import Stage12Fp32
from explorer.estimator.rules.autocast import Stage12Autocast
from explorer.estimator.rules.base import Job, Rules
from explorer.estimator.rules.bf16 import BF16
from explorer.estimator.rules.flattening import Device
from explorer.estimator.rules.stage0 import Stage0, Stage0Fused, Stage0Unfused
from explorer.estimator.rules.stage3 import Stage3
from explorer.estimator.rules.stage12 import Stage12
from explorer.estimator.stream import Stream, Writer
from explorer.estimator.tape import Tape
from explorer.profile import CATEGORIES, Phase, Step

_ACTIVATIONS, _TEMPORARY = CATEGORIES.index("activations"), CATEGORIES.index("temporary")


CUBLASLT_BYTES = 1 << 20
"""cuBLASLt's workspace, PyTorch's default on every card (ATen/cuda/CUDABlas.cpp, `_parseChosenWorkspaceSize`)."""
_WORKSPACES = {
    (CUBLAS, FORWARD): "cuBLAS workspace", (CUBLAS, BACKWARD): "cuBLAS workspace of autograd's thread",
    (CUBLASLT, FORWARD): "cuBLASLt workspace", (CUBLASLT, BACKWARD): "cuBLASLt workspace of autograd's thread",
}


def wrapper(settings: Settings) -> type[Rules]:
    """The wrapper class DeepSpeed builds (runtime/engine.py, `_do_optimizer_sanity_check`)."""
    if settings.stage == 3:
        if settings.autocast is not None:
            raise CouldNotRun("torch_autocast at stage 3 is not modelled; use bf16.enabled, or run the probe")
        return Stage3
    if settings.stage in (1, 2) and settings.autocast is not None:
        return Stage12Autocast
    if settings.stage in (1, 2):
        if settings.grad_accum_dtype == settings.precision:
            return Stage12
        if settings.grad_accum_dtype != "fp32":
            raise CouldNotRun(f"data_types.grad_accum_dtype {settings.grad_accum_dtype} with {settings.precision} weights is not modelled; leave it out, or run the probe")
        on_cpu = settings.offload_optimizer is not None and settings.offload_optimizer.device == "cpu"
        return BF16 if settings.stage == 1 and settings.precision == "bf16" and not on_cpu else Stage12Fp32
    if settings.precision == "bf16" and settings.grad_accum_dtype == "fp32" and "bf16-optimizer-at-stage-0" in settings.behaviours:
        return BF16
    if settings.grad_accum_dtype != settings.precision:
        raise BadInput("deepspeed.data_types.grad_accum_dtype", f"is {settings.grad_accum_dtype} with {settings.precision} weights, which DeepSpeed does not implement at stage 0; leave it out, or choose a stage of 1 to 3")
    if settings.precision == "fp32":
        return Stage0
    return Stage0Fused if settings.optimizer.implementation == "FusedAdam" else Stage0Unfused


def replay(
    settings: Settings, tape: Tape, lengths: Mapping[str, int | None], workspace_bytes: int, overflows: bool = True, device: Device | None = None,
    between: Mapping[Phase, Callable[[Rules], None]] | None = None, batches: Sequence[int] = (),
) -> tuple[Stream, Rules]:
    """The stream of a first and a steady step, and the rules that wrote it (for their host ledger).

    `overflows`: whether the first loss scale of fp16 is too high for this model. `device`: the card, where one is known.
    `batches`: tokens of batches that follow one another where they vary; the steady step is then a step of each in turn.
    `between`: phases beside the steps, each with what writes its events. They come before the steady step, which may then repeat itself.

    `workspace_bytes`: cuBLAS's workspace, which PyTorch's allocator hands out at the first matrix product and keeps: once for
    the main thread and once for autograd's, since each thread has its own handle (ATen/cuda/CublasHandlePool.cpp).
    """
    job = Job(
        settings=settings, parameters=tape.model_parameters(lengths.get("patches") or 0), buffers_bytes=tape.buffers_bytes, modules=tape.modules, direct=tape.direct,
        sent_in_16_bit=frozenset(tape.sent_in_16_bit), saved_as_views=frozenset(tape.saved_as_views + (tape.linear_weights if settings.plain_linear else ())), checkpointing=tape.checkpointing,
        device=device,
    )
    writer = Writer()
    rules = wrapper(settings)(job, writer)
    rules.init()
    writer.mark(0, "first", "init")
    steps = settings.gradient_accumulation_steps
    played = sorted({0, min(1, steps - 1), steps - 1})
    shapes = [tape.values({**lengths, "sequence": tokens}) for tokens in _turns(batches, len(played))] or [tape.values(lengths)]
    skips = overflows and _skips_first(settings)
    firsts = 2 if skips else 1
    micro_batches = _MicroBatches(tape, shapes, firsts * len(played), writer, rules)
    start = len(writer.order)
    micro_batches.load_batch()
    micro_batches.workspaces = {place: workspace_bytes if place[0] == CUBLAS else CUBLASLT_BYTES for place in _WORKSPACES}
    for number in range(firsts + max(1, len(shapes) // len(played))):
        step: Step = "first" if number < firsts else "steady"
        for phase, write in (between or {}).items() if number == firsts else ():
            write(rules)
            writer.mark(start, step, phase)
            start = len(writer.order)
        for index in played:
            micro_batches.next_batch()
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


MOST_BATCHES = 24
"""Of varying length that are played in one turn."""


def _turns(batches: Sequence[int], at_once: int) -> list[int]:
    """The batches that are played in turn, a whole number of steps: evenly spaced ones of many, the longest always among them."""
    if not batches:
        return []
    count = max(1, min(len(batches), MOST_BATCHES) // at_once) * at_once
    chosen = [batches[i * len(batches) // count] for i in range(count)]
    if max(batches) not in chosen:
        chosen[count // 2] = max(batches)
    return chosen


def _skips_first(settings: Settings) -> bool:
    """Whether the first applied step can follow a skipped one: fp16 with a dynamic loss scale may start too high. What the skipped step
    leaves in the cache is there for the first applied one, and stage 3 prefetches from its second micro-batch on."""
    fp16 = settings.config.get("fp16", {})
    return settings.stage >= 1 and settings.precision == "fp16" and not fp16.get("loss_scale")


class _MicroBatches:
    """Copies a tape's events into the stream, stopping wherever the rules act."""

    def __init__(self, tape: Tape, shapes: Sequence[np.ndarray], before: int, writer: Writer, rules: Rules) -> None:
        """`shapes`: the tape's values for each batch in turn, of which the last ones come first, `before` the turn, which so ends as it began."""
        self.tape, self.shapes, self.writer, self.rules, self.turn = tape, shapes, writer, rules, -before
        self.values = shapes[self.turn % len(shapes)]
        self.flat: Unrolled = tape.unrolled
        self.sizes = self.values[self.flat.size_rows]
        self.batch: list[int] = []
        self.categories = np.where(self.flat.categories == ACTIVATION, _ACTIVATIONS, _TEMPORARY).tolist()
        self.owners = [tape.modules[i] if i >= 0 else "" for i in self.flat.owners.tolist()]
        wanted = (GRADIENT, MATMUL, ENTER, LEAVE) if rules.wants_modules else (GRADIENT, MATMUL)
        self.hooks = [h for h in self.flat.hooks if h[1] in wanted]
        self.before = [h for h in self.hooks if h[1] != GRADIENT and h[3] == FORWARD]
        self.after = self.hooks[len(self.before) :]
        self.base = 0
        self.order: list[int] = []
        self.workspaces: dict[tuple[int, int], int] = {}
        """(Library, direction) → bytes of the workspace that the direction's thread has yet to take."""

    def load_batch(self) -> None:
        """The batch itself, which the caller keeps until it has the next."""
        before, self.batch = self.batch, [
            self.writer.allocate(int(self.values[row]), "activations", "batch", "traced") for row in self.tape.batch
        ]
        self.writer.free(*before)

    def next_batch(self) -> None:
        """Take the next of several shapes. One shape stays as it was loaded."""
        if len(self.shapes) > 1:
            self.values = self.shapes[self.turn % len(self.shapes)]
            self.sizes = self.values[self.flat.size_rows]
            self.turn += 1
            self.load_batch()

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
                rules.gradient(which, self.base + argument)
            elif kind == MATMUL:
                self.writer.allocate(self.workspaces.pop((which, argument), 0), "temporary", _WORKSPACES[which, argument], "assumed")
            elif kind == ENTER:
                rules.enter(which, argument)
            else:
                rules.leave(which, argument)
        out.extend(order[at:end])
