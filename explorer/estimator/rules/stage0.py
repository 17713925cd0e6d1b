"""Stage 0: plain data parallel. Full precision runs the optimizer as it is; 16-bit wraps it with fp32 masters.

FP16_Optimizer (runtime/fp16/fused_optimizer.py) serves DeepSpeed's FusedAdam, FP16_UnfusedOptimizer (unfused_optimizer.py)
every other optimizer; bf16 uses the same classes. Gradients are reduced at the boundary in flat copies of up to 5e8
elements, even on one GPU (runtime/engine.py, `buffered_allreduce_fallback`).
"""

from __future__ import annotations

from explorer.estimator.rules.base import Job, Rules
from explorer.estimator.stream import Writer

ALLREDUCE_ELEMENTS = 500_000_000
"""`MEMORY_OPT_ALLREDUCE_SIZE` (runtime/engine.py)."""


class Stage0(Rules):
    """Gradients stay whole on every rank until the step."""

    source = "runtime/engine.py"

    def __init__(self, job: Job, writer: Writer) -> None:
        super().__init__(job, writer)
        self.trainable = tuple(i for group in job.groups for i in group)
        self.sizes = [job.parameters[i].numel for i in self.trainable]
        self.gradients: dict[int, int] = {}
        self.micro = 0

    def init(self) -> None:
        self.load_model()
        if self.settings.optimizer.states_at_init:
            self.states = self.optimizer_states(self.sizes)

    def before_micro(self, index: int) -> None:
        self.micro = index

    def gradient(self, parameter: int, block: int) -> None:
        self.writer.rename(block, "gradients")
        if parameter in self.gradients:
            self.writer.free(block)
        else:
            self.gradients[parameter] = block

    def after_backward(self) -> None:
        if self.micro < self.settings.gradient_accumulation_steps - 1:
            return
        for elements in _chunks([self.job.parameters[i].numel for i in self.trainable if i in self.gradients]):
            self.writer.transient(elements * self.model_bytes, "flat gradients for all-reduce")

    def step(self) -> None:
        self._update()
        self._drop_gradients()

    def _update(self) -> None:
        """The optimizer's step: group by group, each with the states it still lacks."""
        first = self.states is None
        self.states = self.states or []
        for position, group in enumerate(self.job.groups):
            sizes = [self.job.parameters[i].numel for i in group]
            if first:
                self.states += self.optimizer_states(sizes, matrices={i for i, p in enumerate(group) if self.job.parameters[p].decays})
            self.optimizer_temporaries(sizes, decays=position == 0)

    def _drop_gradients(self) -> None:
        """In the model's order, as `zero_grad` goes."""
        self.writer.free(*(self.gradients[i] for i in self.trainable if i in self.gradients))
        self.gradients = {}


class Stage0Fused(Stage0):
    """FP16_Optimizer: one flat 16-bit and one flat fp32 copy; its constructor runs a step on zeros to make the states."""

    source = "runtime/fp16/fused_optimizer.py"

    def init(self) -> None:
        w, elements = self.writer, sum(self.sizes)
        blocks = self.load_model()
        clones = [w.allocate(2 * n, "temporary", "parameter clones") for n in self.sizes]
        w.allocate(2 * elements, "parameters", "fp16_groups_flat")
        w.free(*reversed(clones), *(blocks[i] for i in self.trainable))
        clone = w.allocate(2 * elements, "temporary", "fp16_groups_flat clone")
        w.allocate(4 * elements, "optimizer", "fp32_groups_flat")
        w.free(clone)
        zeros = w.allocate(4 * elements, "temporary", "initialize_optimizer_states")
        self.states = self.optimizer_states([elements])
        w.free(zeros)

    def step(self) -> None:
        w, elements = self.writer, sum(self.sizes)
        copies = [w.allocate(4 * n, "temporary", "fp32 gradients") for n in self.sizes]
        flat = w.allocate(4 * elements, "temporary", "fp32_groups_flat.grad")
        w.free(*reversed(copies))
        self._drop_gradients()
        self.optimizer_temporaries([elements])
        w.free(flat)


class Stage0Unfused(Stage0):
    """FP16_UnfusedOptimizer: an fp32 copy of every parameter."""

    source = "runtime/fp16/unfused_optimizer.py"

    def init(self) -> None:
        w = self.writer
        self.load_model()
        for n in self.sizes:
            w.allocate(4 * n, "optimizer", "fp32_groups")
        zeros = [w.allocate(2 * n, "temporary", "initialize_optimizer_states") for n in self.sizes]
        zeros += [w.allocate(4 * n, "temporary", "initialize_optimizer_states") for n in self.sizes]
        self._update()
        w.free(*zeros)

    def step(self) -> None:
        w = self.writer
        fp32 = [w.allocate(4 * n, "temporary", "fp32 gradients") for n in self.sizes]
        self._update()
        w.free(*fp32)
        self._drop_gradients()


def _chunks(sizes: list[int]) -> list[int]:
    """Elements of each flat copy: tensors are gathered until the limit is passed."""
    chunks, current = [], 0
    for n in sizes:
        current += n
        if current > ALLREDUCE_ELEMENTS:
            chunks.append(current)
            current = 0
    return [*chunks, current] if current else chunks
