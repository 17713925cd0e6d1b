"""Stages 1 and 2: DeepSpeedZeroOptimizer (deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8).

Parameters live in flat buffers on every rank, one a parameter group; the fp32 masters and the moments are a rank's own partitions.
Gradients pass through a bucket: a rank keeps those of its own parameters (whole ones, even where it owns a slice) until the step.
"""

from __future__ import annotations

from explorer.estimator.rules.base import Job, Rules, partition
from explorer.estimator.rules.flattening import decide
from explorer.estimator.stream import Writer


class Group:
    """A parameter group as one rank sees it; `get_partition_info`."""

    def __init__(self, job: Job, parameters: tuple[int, ...]) -> None:
        world_size, rank = job.settings.world_size, job.settings.rank
        self.parameters = parameters
        sizes = {i: _aligned(job, i) for i in parameters}
        self.own = partition(sum(sizes.values()), world_size)
        """Elements of this rank's partition."""
        self.owned: dict[int, int] = {}
        """Parameter → its elements in this rank's partition."""
        self.runs: dict[int, tuple[int, ...]] = {}
        """Parameter → the ranks it goes to, in order."""
        start = 0
        for i in parameters:
            end = start + sizes[i]
            first, last = start // self.own, (end - 1) // self.own
            self.runs[i] = tuple(range(first, min(last, world_size - 1) + 1))
            overlap = min(end, (rank + 1) * self.own) - max(start, rank * self.own)
            if overlap > 0:
                self.owned[i] = overlap
            start = end
        self.master = 0
        """Its fp32 master's block."""


def _aligned(job: Job, parameter: int) -> int:
    """Elements of a parameter in its flat buffer: up to 16 bytes where `parameter_alignment` asks for it."""
    numel = job.parameters[parameter].numel
    if not job.settings.parameter_alignment:
        return numel
    per = 16 // job.settings.model_bytes
    return -(-numel // per) * per


class Bucket:
    """Gradients on their way to a reduction (`IPGBucket`)."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        """The contiguous buffer, two where reductions overlap."""
        self.parameters: list[int] = []
        self.elements = 0


class Stage12(Rules):
    """Gradients accumulate in the model's own dtype."""

    source = "runtime/zero/stage_1_and_2.py"

    def __init__(self, job: Job, writer: Writer) -> None:
        super().__init__(job, writer)
        s = self.settings
        self.offload = s.offload_optimizer is not None
        self.partitions_gradients = s.stage == 2
        self.trainable = job.trainable
        self.groups = [Group(job, parameters) for parameters in job.groups]
        self.group_of = {i: group for group in self.groups for i in group.parameters}
        self.owned = {i for group in self.groups for i in group.owned}
        self.owned_elements = self.numel(sorted(self.owned))
        self.micro = 0
        self.buckets = [Bucket()]
        self.oversize: dict[int, int] = {}
        """Parameter → its gradient's own block, until the next flush."""
        self.full: dict[int, int] = {}
        """Parameter → its whole gradient: at stage 1 until the boundary, under offload until the backward ends."""
        self.own_gradients = 0
        """`grads_in_partition` of this micro-batch."""
        self.kept_gradients = 0
        """And of the micro-batches before it."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient's element on its way through the bucket."""
        return self.model_bytes

    # --- init

    def init(self) -> None:
        blocks = self.load_model()
        for group in self.groups:
            self.empty_cache()
            self._flatten(group, blocks)
        if self.offload:
            self._init_host()
        else:
            for group in self.groups:
                self.writer.transient(4 * group.own, "initialize_optimizer_states")
            if self.settings.optimizer.states_at_init:
                self.states = self.optimizer_states([group.own for group in self.groups])

    def _flatten(self, group: Group, blocks: dict[int, int]) -> None:
        w, s = self.writer, self.model_bytes
        flat_bytes = s * group.own * self.settings.world_size
        way = decide(flat_bytes, self.job.device, self.settings.behaviours, w, self.releases)
        self.flattenings.append(way)
        if not way.on_gpu:
            self._to_cpu(group, blocks, flat_bytes)
        w.allocate(flat_bytes, "parameters", "bit16_groups_flat")
        w.free(*(blocks[i] for i in group.parameters))
        clone = w.allocate(s * group.own, "temporary", "partition clone")
        if self.offload:
            w.free(clone)
        elif s == 4:
            w.rename(clone, "optimizer")
            group.master = clone
        else:
            group.master = w.allocate(4 * group.own, "optimizer", "single_partition_of_fp32_groups")
            w.free(clone)

    def _to_cpu(self, group: Group, blocks: dict[int, int], flat_bytes: int) -> None:
        """Weights leave the GPU one by one, each for a tensor of one element, and the flat copy is made of the host's."""
        for i in group.parameters:
            placeholder = self.writer.allocate(4, "parameters", "empty parameter")
            self.writer.free(blocks[i])
            blocks[i] = placeholder
        self.empty_cache()
        self.host.passing_now(self.model_bytes * self.numel(group.parameters) + flat_bytes)

    def _init_host(self) -> None:
        s, pinned = self.model_bytes, self.settings.offload_optimizer.pin_memory
        largest = max((self.job.parameters[i].numel for i in self.trainable), default=0)
        for group in self.groups:
            self.host.put(4 * group.own, "fp32 master", pinned)
            self.host.put(4 * group.own, "fp32 gradients", pinned)
            self.host.put(s * group.own, "16-bit parameters for the copy back", pinned)
            self.host.hold_late(4 * group.own * self.settings.optimizer.moments, "optimizer states")
            self.host.passing(4 * group.own if pinned else 0)
        self.host.put(s * largest, "temp_grad_buffer_for_cpu_offload", pinned)
        self.writer.allocate(s * largest, "comm_buffers", "temp_grad_buffer_for_gpu_offload")
        if self.settings.gradient_accumulation_steps > 1:
            self._accumulate_on_host()

    def _accumulate_on_host(self) -> None:
        for i in sorted(self.owned):
            self.host.put(self.model_bytes * self.job.parameters[i].numel, "accumulated_grads_in_cpu", self.settings.offload_optimizer.pin_memory)

    # --- backward

    @property
    def boundary(self) -> bool:
        """Whether this is a step's last micro-batch."""
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

    def bucket_of(self, parameter: int) -> Bucket:
        """Where a parameter's gradient goes."""
        return self.buckets[0]

    def _set_up_buckets(self) -> None:
        if self.buckets[0].blocks or not self.settings.contiguous_gradients:
            return
        elements = self.settings.reduce_bucket_size
        size = (int(elements * 4.5) if "bucket-4.5" in self.settings.behaviours else elements) * self.gradient_bytes
        count = 2 if self.settings.overlap_comm else 1
        for bucket in self.buckets:
            bucket.blocks = [self.writer.allocate(size, "comm_buffers", "ipg_bucket") for _ in range(count)]

    def _free_buckets(self) -> None:
        for bucket in self.buckets:
            self.writer.free(*bucket.blocks)
            bucket.blocks = []

    def _accumulate(self, parameter: int, block: int) -> None:
        """Stage 1 lets autograd add up whole gradients."""
        if parameter in self.full:
            self.writer.free(block)
        else:
            self.full[parameter] = block

    def _into_bucket(self, parameter: int, block: int) -> None:
        numel, bucket = self.job.parameters[parameter].numel, self.bucket_of(parameter)
        if bucket.elements + numel > self.settings.reduce_bucket_size:
            self._flush(bucket)
        if not self.settings.contiguous_gradients or numel > self.settings.reduce_bucket_size:
            if self.offload and self.settings.contiguous_gradients:
                clone = self.writer.allocate(numel * self.gradient_bytes, "gradients", "gradient clone")
                self.writer.free(block)
                block = clone
            self.oversize[parameter] = block
        else:
            self.writer.free(block)
        bucket.parameters.append(parameter)
        bucket.elements += numel

    def _flush(self, bucket: Bucket) -> None:
        """`reduce_ipg_grads`: reduce what is in the bucket, keep what this rank owns."""
        if not bucket.parameters:
            return
        self._reduce(bucket)
        for parameter in bucket.parameters:
            block = self.oversize.pop(parameter, 0)
            if parameter not in self.owned:
                self._drop(parameter, block)
            elif self.offload:
                self._to_host(parameter, block)
            else:
                self._keep(parameter, block)
        bucket.parameters, bucket.elements = [], 0

    def _drop(self, parameter: int, block: int) -> None:
        """What another rank owns."""
        self.writer.free(block)

    def _reduce(self, bucket: Bucket) -> None:
        """`average_tensor`: a flat copy where the bucket goes to several ranks."""
        if self._copies(bucket):
            self.writer.transient(bucket.elements * self.gradient_bytes, "reduce copy", self.side)

    def _copies(self, bucket: Bucket) -> bool:
        return self.settings.reduce_scatter and self._runs(bucket) > 1 or not self.settings.contiguous_gradients

    def _runs(self, bucket: Bucket) -> int:
        """Stretches of a bucket that go to different ranks."""
        ranks = [rank for parameter in bucket.parameters for rank in self.group_of[parameter].runs[parameter]]
        return sum(1 for a, b in zip([-1, *ranks], ranks, strict=False) if a != b)

    def _keep(self, parameter: int, block: int) -> None:
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
                for parameter in (i for group in self.groups for i in group.parameters):
                    if parameter in self.full:
                        self._into_bucket(parameter, self.full.pop(parameter))
        for bucket in self.buckets:
            self._flush(bucket)
        self._end_backward()

    def _end_backward(self) -> None:
        self._free_buckets()
        self.writer.free(*self.full.values())
        self.full = {}
        if not self.offload:
            if self.kept_gradients and self.own_gradients:
                self.writer.free(self.own_gradients)
            else:
                self.kept_gradients = self.own_gradients
            self.own_gradients = 0

    # --- step

    def step(self) -> None:
        if self.offload:
            self._forget_unowned()
            if "fp32-copy-at-step" in self.settings.behaviours:
                for group in self.groups:
                    self.writer.transient(4 * group.own, "fp32 partition on its way to 16 bit")
            self.gather_copies([group.own for group in self.groups])
            return
        for group in self.groups:
            self.norms([group.owned[i] for i in sorted(group.owned)])
        self._forget_unowned()
        first = self.states is None
        self.states = self.states or []
        for group in self.groups:
            fp32 = self._master_gradient(group)
            if group is self.groups[-1]:
                self._drop_kept()
            if first:
                self.states += self.optimizer_states([group.own])
            self.optimizer_temporaries([group.own], decays=group is self.groups[0])
            self.writer.free(fp32)
        self.gather_copies([group.own for group in self.groups])

    def skipped_step(self) -> None:
        """Gradients alone go: no norm is taken."""
        self._forget_unowned()
        self._drop_kept()

    def _forget_unowned(self) -> None:
        """Gradients of other ranks' parameters, where some are left (`free_grad_in_param_list`)."""

    def _master_gradient(self, group: Group) -> int:
        """The master's gradient in fp32, through a flat copy where a rank owns several."""
        w, s = self.writer, self.model_bytes
        flat = w.allocate(s * group.own, "temporary", "flat_grad_partition") if len(group.owned) > 1 or s == 4 else 0
        if s == 4:
            return flat
        fp32 = w.allocate(4 * group.own, "temporary", "single_partition_of_fp32_groups.grad")
        w.free(flat)
        return fp32

    def _drop_kept(self) -> None:
        """`grads_in_partition` serves every group, and goes with the last."""
        self.writer.free(self.kept_gradients)
        self.kept_gradients = 0
