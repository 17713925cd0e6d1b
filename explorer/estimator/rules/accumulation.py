"""Stages 1 and 2 with `grad_accum_dtype` fp32 over 16-bit gradients (deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8).

A rank's partition of every group has one fp32 gradient buffer, which lives from the first reduction of a step to its end and takes
each reduced slice as it comes (`_build_compact_grad_partition_buffer`). At stage 1 gradients are turned to fp32 as autograd
makes them (`grad_accum`), so bucket and copies are fp32 too.
"""

from __future__ import annotations

from explorer.estimator.rules.base import Job
from explorer.estimator.rules.stage12 import Bucket, Group, Stage12
from explorer.estimator.stream import Writer


class Stage12Fp32(Stage12):
    """One fp32 gradient buffer a group."""

    def __init__(self, job: Job, writer: Writer) -> None:
        super().__init__(job, writer)
        self.buffers: dict[int, int] = {}
        """Position of a group → its fp32 gradients' block."""
        self.views = False
        """Stage 1: whether gradients of other ranks' parameters still look into the bucket, and so keep it."""
        self.unowned: list[int] = []
        """Stage 1: large gradients of other ranks' parameters, which stay until the step."""

    @property
    def gradient_bytes(self) -> int:
        return self.model_bytes if self.partitions_gradients else 4

    def gradient(self, parameter: int, block: int) -> None:
        if self.partitions_gradients:
            super().gradient(parameter, block)
            return
        self._set_up_buckets()
        numel = self.job.parameters[parameter].numel
        fp32 = self.writer.allocate(4 * numel, "gradients", "grad_accum")
        self.writer.free(block)
        if parameter in self.full:
            self.writer.free(fp32)
            fp32 = self.full.pop(parameter)
        if self.settings.overlap_comm and self.boundary:
            self._into_bucket(parameter, fp32)
        else:
            self.full[parameter] = fp32

    def before_micro(self, index: int) -> None:
        super().before_micro(index)
        self._forget_unowned()

    def _accumulate_on_host(self) -> None:
        """The fp32 buffer is on the GPU."""

    def _runs(self, bucket: Bucket) -> int:
        """Every slice of this rank's own is a stretch by itself."""
        rank, count, before = self.settings.rank, 0, -1
        for parameter in bucket.parameters:
            for to in self.group_of[parameter].runs[parameter]:
                count += to != before or to == rank
                before = to
        return count

    def _reduce(self, bucket: Bucket) -> None:
        w = self.writer
        for position, group in enumerate(self.groups):
            if position not in self.buffers and any(i in group.owned for i in bucket.parameters):
                self.buffers[position] = w.allocate(4 * group.own, "gradients", "averaged_gradients", stream=self.side)
        copy = w.allocate(bucket.elements * self.gradient_bytes, "temporary", "reduce copy", stream=self.side) if self._copies(bucket) else 0
        if self.gradient_bytes == 4:
            w.transient(bucket.elements * 2, "16-bit copy for the reduction", self.side)
        else:
            for parameter in bucket.parameters:
                w.transient(4 * self.group_of[parameter].owned.get(parameter, 0), "fp32 gradient copy", self.side)
        w.free(copy)

    def _drop(self, parameter: int, block: int) -> None:
        if self.partitions_gradients:
            super()._drop(parameter, block)
        elif block:
            self.unowned.append(block)
        else:
            self.views = True

    def _keep(self, parameter: int, block: int) -> None:
        """At stage 2 a large gradient stays until the backward is over."""
        if self.partitions_gradients and block:
            self.full[parameter] = block
        else:
            self.writer.free(block)

    def _to_host(self, parameter: int, block: int) -> None:
        if self.boundary:
            self.writer.transient(8 * self.group_of[parameter].owned[parameter], "gradient norm in fp64", self.side)
            self.writer.free(block)
        elif block:
            self.full[parameter] = block

    def _end_backward(self) -> None:
        if not self.views:
            self._free_buckets()
        self.writer.free(*self.full.values())
        self.full = {}

    def step(self) -> None:
        super().step()
        self._free_buffers()

    def skipped_step(self) -> None:
        super().skipped_step()
        self._free_buffers()

    def _free_buffers(self) -> None:
        self.writer.free(*self.buffers.values())
        self.buffers = {}

    def _forget_unowned(self) -> None:
        self.writer.free(*self.unowned)
        self.unowned = []
        if self.views:
            self._free_buckets()
            self.views = False

    def _master_gradient(self, group: Group) -> int:
        """The buffer itself."""
        return self.buffers.pop(self.groups.index(group), 0)
