"""Stage 3: DeepSpeedZeroOptimizer_Stage3 (deepspeed/runtime/zero/stage3.py, 0.19.8).

Each rank holds ceil(n / N) elements of every parameter in one flat buffer, with fp32 masters, moments and a flat gradient
buffer of the same length, and one reduce bucket for good. Whole parameters exist only while gathered (gather.py).
"""

from __future__ import annotations

from math import ceil

from explorer.estimator.rules.base import Job, Rules
from explorer.estimator.rules.gather import Coordinator
from explorer.estimator.stream import Writer

_NORM_CHUNK = 250_000_000
"""Elements of one fp64 norm under offload (stage3.py, `constant_buffered_norm2`)."""


class Stage3(Rules):
    """One parameter group, cut into sub-groups for the step."""

    source = "runtime/zero/stage3.py"

    wants_modules = True

    def __init__(self, job: Job, writer: Writer) -> None:
        super().__init__(job, writer)
        self.n = self.settings.world_size
        self.trainable = job.trainable
        self.shares = {i: ceil(p.numel / self.n) for i, p in enumerate(job.parameters)}
        self.own = sum(self.shares[i] for i in self.trainable)
        self.sub_groups = self._sub_groups()
        self.coordinator = Coordinator(job, writer)
        self.kept = self.coordinator.kept
        self.offload = self.settings.offload_optimizer is not None
        self.offload_param = self.settings.offload_param is not None
        self.in_bucket: list[int] = []
        self.bucket_elements = 0
        self.oversize: dict[int, int] = {}
        self.micro = 0

    def _sub_groups(self) -> list[list[int]]:
        """Parameters in groups that just pass `sub_group_size` elements of a partition, each inside one parameter group (`_create_fp16_sub_groups`)."""
        groups: list[list[int]] = []
        for parameters in self.job.groups:
            groups.append([])
            elements = 0
            for i in parameters:
                groups[-1].append(i)
                elements += self.shares[i]
                if elements >= self.settings.sub_group_size:
                    groups.append([])
                    elements = 0
        return [g for g in groups if g]

    def _elements(self, group: list[int]) -> int:
        return sum(self.shares[i] for i in group)

    # --- init

    def init(self) -> None:
        partitions = self._partition_parameters()
        w, s = self.writer, self.model_bytes
        if not self.offload_param:
            self.host.passing(s * self.own)
            w.free(*(partitions[i] for i in self.trainable))
            self.empty_cache()
            w.allocate(s * self.own, "parameters", "lp_param_buffer")
        self._masters()
        if self.offload:
            self._init_host()
        else:
            largest = max((self._elements(g) for g in self.sub_groups), default=0)
            w.transient(4 * largest, "initialize_optimizer_states")
            if self.settings.optimizer.states_at_init:
                self.states = self.optimizer_states([self._elements(g) for g in self.sub_groups])
        if self.settings.contiguous_gradients:
            w.allocate(self.settings.reduce_bucket_size * s, "comm_buffers", "ipg_bucket")
        if not self.offload:
            w.allocate(self.settings.accum_bytes * self.own, "gradients", "grad_partitions_flat_buffer")
        if self.offload_param:
            self._param_host()
        self._gather_once()

    def _gather_once(self) -> None:
        """Each parameter is gathered for a moment while its gradient hook is made (`create_reduce_and_remove_grad_hooks`)."""
        w, s = self.writer, self.model_bytes
        for i in self.trainable:
            whole = w.allocate(self.n * self.shares[i] * s, "gathered", self.job.parameters[i].name)
            staged = w.allocate(self.shares[i] * s, "temporary", "partition on its way to the GPU") if self.offload_param else 0
            w.free(whole, staged)

    def _partition_parameters(self) -> dict[int, int]:
        """Each parameter visits the GPU whole, then its share stays: there, or pinned on the host (partition_parameters.py)."""
        w, s = self.writer, self.model_bytes
        whole = {} if self.settings.zero_init else self.load_model()
        partitions = {}
        for i, p in enumerate(self.job.parameters):
            block = whole.get(i) or w.allocate(p.numel * s, "parameters", p.name)
            if not self.offload_param:
                partitions[i] = w.allocate(self.shares[i] * s, "parameters", p.name)
            w.free(block)
        if self.settings.zero_init:
            w.allocate(self.job.buffers_bytes, "parameters", "module buffers", "traced")
        return partitions

    def _masters(self) -> None:
        """fp32 copies, each through a conversion that is cloned; the one before lives on until the next is made."""
        if self.offload:
            return
        w, previous = self.writer, 0
        for group in self.sub_groups:
            elements = self._elements(group)
            converted = w.allocate(4 * elements, "temporary", "fp32 conversion") if self.model_bytes == 2 or self.offload_param else 0
            w.free(previous)
            w.allocate(4 * elements, "optimizer", "fp32_partitioned_groups_flat")
            previous = converted
        w.free(previous)

    def _init_host(self) -> None:
        host, settings = self.host, self.settings
        nvme = settings.offload_optimizer.device == "nvme"
        pinned = settings.offload_optimizer.pin_memory
        host.put(settings.accum_bytes * self.own, "grad_partitions_flat_buffer", pinned)
        sizes = [self._elements(g) for g in self.sub_groups]
        swapped = [n for n in sizes if nvme and 4 * n >= 1 << 20]
        for n in sizes:
            if n not in swapped:
                host.hold(4 * n, "fp32 master")
                host.hold_late(4 * n * settings.optimizer.moments, "optimizer states")
                host.put(4 * n, "fp32 gradients", pinned)
        if swapped:
            # Locked by mlock, not by CUDA: PyTorch's pinned allocator does not know of it (csrc/aio/py_lib/deepspeed_pin_tensor_client.cpp).
            host.hold(settings.offload_optimizer.buffer_count * 4 * max(swapped), "SwapBufferManager")
            host.passing(4 * settings.optimizer.moments * max(swapped))
        host.passing(4 * max(sizes, default=0))

    def _param_host(self) -> None:
        offload, s = self.settings.offload_param, self.model_bytes
        if offload.device == "nvme":
            self.host.hold(offload.buffer_count * offload.buffer_size * s, "AsyncPartitionedParameterSwapper.buffers")
            self.host.pin(min(self.own, offload.max_in_cpu) * s, "param_groups_fp16_flat_cpu_memory")
            return
        self.host.pin(self.own * s, "param_groups_fp16_flat_cpu_memory")
        for i in self.trainable:
            self.host.pin(self.shares[i] * s, "partitions pinned one by one, kept in PyTorch's cache")
        for i, p in enumerate(self.job.parameters):
            if not p.trainable:
                self.host.pin(self.shares[i] * s, p.name)

    # --- a micro-batch

    def before_micro(self, index: int) -> None:
        self.micro = index
        self.coordinator.start_micro()

    def before_evaluation(self) -> None:
        self.coordinator.with_gradients = False

    def after_evaluation(self) -> None:
        self.coordinator.with_gradients = True
        self.coordinator.release_all()
        self.coordinator.gather_persistent()

    def gather_for_save(self) -> None:
        self.coordinator.release_all()
        for own in self.job.direct:
            self.coordinator.visit(own)
        self.coordinator.gather_persistent()

    def enter(self, module: int, direction: int) -> None:
        self.coordinator.fetch(module)

    def leave(self, module: int, direction: int) -> None:
        self.coordinator.release(module, direction)

    def gradient(self, parameter: int, block: int) -> None:
        self.writer.rename(block, "gradients")
        numel = self.job.parameters[parameter].numel
        if self.bucket_elements + numel > self.settings.reduce_bucket_size and self.in_bucket:
            self._flush()
        if self.settings.contiguous_gradients and self.bucket_elements + numel <= self.settings.reduce_bucket_size:
            self.writer.free(block)
        else:
            self.oversize[parameter] = block
        self.in_bucket.append(parameter)
        self.bucket_elements += numel

    def after_backward(self) -> None:
        self._flush()

    def _flush(self) -> None:
        """`__reduce_and_partition_ipg_grads`: a padded copy is reduced and scattered; a rank's shares go to its flat buffer."""
        if not self.in_bucket:
            return
        w, s = self.writer, self.model_bytes
        padded = sum(self.n * self.shares[i] for i in self.in_bucket)
        aligned = len(self.in_bucket) == 1 and padded == self.job.parameters[self.in_bucket[0]].numel
        copy = 0 if aligned or not self.settings.reduce_scatter else w.allocate(padded * s, "temporary", "reduce-scatter input", stream=self.side)
        if self.offload:
            self._to_host()
        elif self.settings.accum_bytes != s:
            w.free(*[w.allocate(self.settings.accum_bytes * self.shares[i], "temporary", "share in the accumulation dtype", stream=self.side) for i in self.in_bucket])
        w.free(copy, *(self.oversize.pop(i, 0) for i in self.in_bucket))
        self.in_bucket, self.bucket_elements = [], 0

    def _to_host(self) -> None:
        """Per parameter: the share back on the GPU, its norm in fp64, its fp32 copy (stage3.py, `partition_grads`)."""
        w, accum = self.writer, self.settings.accum_bytes
        boundary = self.micro == self.settings.gradient_accumulation_steps - 1
        for i in self.in_bucket:
            share = self.shares[i]
            back = w.allocate(accum * share, "temporary", "gradient share", stream=self.side)
            if boundary:
                w.transient(8 * min(share, _NORM_CHUNK), "gradient norm in fp64", self.side)
                if accum != 4:
                    w.transient(4 * share, "fp32 gradient copy", self.side)
            w.free(back)

    # --- step

    def step(self) -> None:
        self.coordinator.release_all()
        if not self.offload:
            self._step_on_gpu()
        self.coordinator.gather_persistent()

    def skipped_step(self) -> None:
        self.coordinator.release_all()

    def _step_on_gpu(self) -> None:
        w, accum = self.writer, self.settings.accum_bytes
        if self.settings.precision == "fp16":
            w.transient((accum + 1) * self.own, "overflow check")
        self.norms([self.shares[i] for i in self.trainable])
        new = self.states is None
        self.states = self.states or []
        for group in self.sub_groups:
            elements = self._elements(group)
            flat = w.allocate(accum * elements, "temporary", "flat gradients") if len(group) > 1 else 0
            fp32 = flat
            if accum != 4:
                fp32 = w.allocate(4 * elements, "temporary", "fp32 gradients")
                w.free(flat)
            if new:
                self.states += self.optimizer_states([elements])
            self.optimizer_temporaries([elements], decays=group[0] in self.job.groups[0])
            w.free(fp32)
