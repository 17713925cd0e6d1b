"""Stages 1 and 2: DeepSpeedZeroOptimizer (deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8).

Parameters live in one flat buffer on every rank; the fp32 master and the moments are a rank's own partition. Gradients pass
through a bucket: a rank keeps those of its own parameters (whole ones, even where it owns a slice) until the step.
"""

from __future__ import annotations

from explorer.estimator.rules.base import Job, Rules, partition
from explorer.estimator.stream import Writer


class Stage12(Rules):
    """One parameter group, as the plain engine makes it."""

    def __init__(self, job: Job, writer: Writer) -> None:
        super().__init__(job, writer)
        s = self.settings
        self.offload = s.offload_optimizer is not None
        self.partitions_gradients = s.stage == 2
        self.trainable = job.trainable
        self.elements = self.numel(self.trainable)
        self.own = partition(self.elements, s.world_size)
        self.owned, self.runs = _ownership(job, self.trainable, self.own, s.world_size, s.rank)
        self.owned_elements = self.numel(sorted(self.owned))
        self.micro = 0
        self.buckets: list[int] = []
        self.in_bucket: list[int] = []
        self.bucket_elements = 0
        self.oversize: dict[int, int] = {}
        """Parameter → its gradient's own block, until the next flush."""
        self.full: dict[int, int] = {}
        """Stage 1: parameter → its whole gradient, until the boundary."""
        self.own_gradients = 0
        """`grads_in_partition` of this micro-batch."""
        self.kept_gradients = 0
        """And of the micro-batches before it."""
        self.master = 0

    # --- init

    def init(self) -> None:
        w, s = self.writer, self.model_bytes
        blocks = self.load_model()
        self.empty_cache()
        flat = w.allocate(s * self.own * self.settings.world_size, "parameters", "bit16_groups_flat")
        w.free(*(blocks[i] for i in self.trainable))
        clone = w.allocate(s * self.own, "temporary", "partition clone")
        if self.offload:
            w.free(clone)
            self._init_host()
        elif s == 4:
            w.rename(clone, "optimizer")
            self.master = clone
        else:
            self.master = w.allocate(4 * self.own, "optimizer", "single_partition_of_fp32_groups")
            w.free(clone)
        if self.offload:
            largest = max((self.job.parameters[i].numel for i in self.trainable), default=0)
            w.allocate(s * largest, "comm_buffers", "temp_grad_buffer_for_gpu_offload")
        else:
            w.transient(4 * self.own, "initialize_optimizer_states")
        assert flat or not self.elements

    def _init_host(self) -> None:
        s, own = self.model_bytes, self.own
        pinned = self.settings.offload_optimizer.pin_memory
        self.host.put(4 * own, "fp32 master", pinned)
        self.host.put(4 * own, "fp32 gradients", pinned)
        self.host.put(s * own, "16-bit parameters for the copy back", pinned)
        largest = max((self.job.parameters[i].numel for i in self.trainable), default=0)
        self.host.put(s * largest, "temp_grad_buffer_for_cpu_offload", pinned)
        self.host.hold_late(4 * own * self.settings.optimizer.moments, "optimizer states")
        if self.settings.gradient_accumulation_steps > 1:
            for i in sorted(self.owned):
                self.host.put(s * self.job.parameters[i].numel, "accumulated_grads_in_cpu", pinned)
        self.host.passing(4 * own if pinned else 0)

    # --- backward

    @property
    def boundary(self) -> bool:
        return self.micro == self.settings.gradient_accumulation_steps - 1

    def before_micro(self, index: int) -> None:
        self.micro = index

    def gradient(self, parameter: int, block: int) -> None:
        self._set_up_buckets()
        self.writer.rename(block, "gradients")
        if not self.partitions_gradients and not (self.settings.overlap_comm and self.boundary):
            self._accumulate(parameter, block)
            return
        if not self.partitions_gradients and parameter in self.full:
            self.writer.free(block)
            block = self.full.pop(parameter)
        self._into_bucket(parameter, block)

    def _set_up_buckets(self) -> None:
        if self.buckets or not self.settings.contiguous_gradients:
            return
        size = self.settings.reduce_bucket_size * self.model_bytes
        count = 2 if self.settings.overlap_comm else 1
        self.buckets = [self.writer.allocate(size, "comm_buffers", "ipg_bucket") for _ in range(count)]

    def _accumulate(self, parameter: int, block: int) -> None:
        """Stage 1 lets autograd add up whole gradients."""
        if parameter in self.full:
            self.writer.free(block)
        else:
            self.full[parameter] = block

    def _into_bucket(self, parameter: int, block: int) -> None:
        numel = self.job.parameters[parameter].numel
        if self.bucket_elements + numel > self.settings.reduce_bucket_size:
            self._flush()
        if not self.settings.contiguous_gradients or numel > self.settings.reduce_bucket_size:
            if self.offload and self.settings.contiguous_gradients:
                clone = self.writer.allocate(numel * self.model_bytes, "gradients", "gradient clone")
                self.writer.free(block)
                block = clone
            self.oversize[parameter] = block
        else:
            self.writer.free(block)
        self.in_bucket.append(parameter)
        self.bucket_elements += numel

    def _flush(self) -> None:
        """`reduce_ipg_grads`: reduce what is in the bucket, keep what this rank owns."""
        if not self.in_bucket:
            return
        if self.settings.reduce_scatter and self._runs_in_bucket() > 1 or not self.settings.contiguous_gradients:
            self.writer.transient(self.bucket_elements * self.model_bytes, "reduce copy", self.side)
        for parameter in self.in_bucket:
            block = self.oversize.pop(parameter, 0)
            if parameter not in self.owned:
                self.writer.free(block)
            elif self.offload:
                self._to_host(parameter, block)
            else:
                self._keep(block)
        self.in_bucket, self.bucket_elements = [], 0

    def _runs_in_bucket(self) -> int:
        """Stretches of the bucket that go to different ranks."""
        ranks = [rank for parameter in self.in_bucket for rank in self.runs[parameter]]
        return sum(1 for a, b in zip([-1, *ranks], ranks, strict=False) if a != b)

    def _keep(self, block: int) -> None:
        if not self.own_gradients:
            self.own_gradients = self.writer.allocate(self.owned_elements * self.model_bytes, "gradients", "grads_in_partition", stream=self.side)
        self.writer.free(block)

    def _to_host(self, parameter: int, block: int) -> None:
        """Norm in fp64 and an fp32 copy on the GPU, at the boundary; before it, a 16-bit copy to the host and the gradient stays."""
        numel = self.job.parameters[parameter].numel
        if self.boundary:
            self.writer.transient(8 * numel, "gradient norm in fp64", self.side)
            if self.model_bytes == 2:
                self.writer.transient(4 * numel, "fp32 gradient copy", self.side)
            self.writer.free(block)
        elif block:
            self.full[parameter] = block

    def after_backward(self) -> None:
        if not self.partitions_gradients:
            if not self.boundary:
                return
            if not self.settings.overlap_comm:
                for parameter in self.trainable:
                    if parameter in self.full:
                        self._into_bucket(parameter, self.full.pop(parameter))
        self._flush()
        self.writer.free(*self.buckets, *self.full.values())
        self.buckets, self.full = [], {}
        if not self.offload:
            if self.kept_gradients and self.own_gradients:
                self.writer.free(self.own_gradients)
            else:
                self.kept_gradients = self.own_gradients
            self.own_gradients = 0

    # --- step

    def step(self) -> None:
        if self.offload:
            return
        w, s = self.writer, self.model_bytes
        self.norms([self._owned_slice(i) for i in sorted(self.owned)])
        flat = w.allocate(s * self.own, "temporary", "flat_grad_partition") if len(self.owned) > 1 or s == 4 else 0
        if s == 4:
            fp32 = flat
        else:
            fp32 = w.allocate(4 * self.own, "temporary", "single_partition_of_fp32_groups.grad")
            w.free(flat)
        w.free(self.kept_gradients)
        self.kept_gradients = 0
        if self.states is None:
            self.states = self.adam_states([self.own])
        self.optimizer_temporaries([self.own])
        w.free(fp32)

    def _owned_slice(self, parameter: int) -> int:
        return self.owned[parameter]


def _ownership(job: Job, trainable: tuple[int, ...], own: int, world_size: int, rank: int) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
    """(parameter → its elements in this rank's partition, parameter → the ranks it goes to, in order); `get_partition_info`."""
    owned: dict[int, int] = {}
    runs: dict[int, tuple[int, ...]] = {}
    start = 0
    for i in trainable:
        end = start + job.parameters[i].numel
        first, last = start // own, (end - 1) // own
        runs[i] = tuple(range(first, min(last, world_size - 1) + 1))
        overlap = min(end, (rank + 1) * own) - max(start, rank * own)
        if overlap > 0:
            owned[i] = overlap
        start = end
    return owned, runs


