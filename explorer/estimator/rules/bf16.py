"""Stage 1 in bf16 with `grad_accum_dtype` fp32: BF16_Optimizer (deepspeed/runtime/bf16_optimizer.py, 0.19.8).

Every rank holds fp32 gradients of the whole model for good; bf16 gradients join them after each backward and stay allocated
until the step is done.
"""

from __future__ import annotations

from explorer.estimator.rules.base import Job, Rules
from explorer.estimator.rules.stage12 import Group
from explorer.estimator.stream import Writer


class BF16(Rules):
    """Flat bf16 weights, a partition of fp32 masters, fp32 gradients of everything."""

    source = "runtime/bf16_optimizer.py"

    def __init__(self, job: Job, writer: Writer) -> None:
        super().__init__(job, writer)
        self.groups = [Group(job, parameters) for parameters in job.groups]
        self.gradients: dict[int, int] = {}
        self.micro = 0

    def init(self) -> None:
        w, n = self.writer, self.settings.world_size
        blocks = self.load_model()
        for group in self.groups:
            self.empty_cache()
            w.allocate(2 * group.own * n, "parameters", "bf16_groups_flat")
            w.free(*(blocks[i] for i in group.parameters))
            clone = w.allocate(2 * group.own, "temporary", "partition clone")
            group.master = w.allocate(4 * group.own, "optimizer", "fp32_groups_flat_partition")
            w.free(clone)
            w.allocate(4 * group.own * n, "gradients", "fp32_groups_gradients_flat")
            self.empty_cache()

    def before_micro(self, index: int) -> None:
        self.micro = index

    def gradient(self, parameter: int, block: int) -> None:
        self.writer.rename(block, "gradients")
        if parameter in self.gradients:
            self.writer.free(block)
        else:
            self.gradients[parameter] = block

    def after_backward(self) -> None:
        for group in self.groups:
            for i in group.parameters:
                if i in self.gradients:
                    self.writer.transient(4 * self.job.parameters[i].numel, "fp32 gradient copy")
        if self.micro == self.settings.gradient_accumulation_steps - 1:
            for group in self.groups:
                self.writer.transient(2 * group.own * self.settings.world_size, "bf16 gradients for all-reduce")

    def step(self) -> None:
        first = self.states is None
        self.states = self.states or []
        for group in self.groups:
            if first:
                self.states += self.optimizer_states([group.own])
            self.optimizer_temporaries([group.own], decays=group is self.groups[0])
        self.writer.free(*(self.gradients[i] for group in self.groups for i in group.parameters if i in self.gradients))
        self.gradients = {}
        self.gather_copies([group.own for group in self.groups])
