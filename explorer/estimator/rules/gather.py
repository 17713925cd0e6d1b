"""Which parameters stage 3 holds gathered, and when: PartitionedParameterCoordinator (runtime/zero/partitioned_param_coordinator.py, 0.19.8).

Every module fetches its own parameters before it runs, forward and backward. Once one micro-batch has been recorded, the
coordinator also prefetches along the recorded order, and keeps what is used again soon.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from math import ceil

from explorer.dsconfig import Settings
from explorer.estimator.program import BACKWARD, FORWARD, RECOMPUTE
from explorer.estimator.rules.base import Job
from explorer.estimator.stream import COMPUTE, GATHER, Writer

_NEVER = -(10**10)


class _Handle:
    """One coalesced all-gather: a flat buffer now, a copy per parameter at the first wait, the buffer gone after the last."""

    def __init__(self, flat: int, parameters: list[int]) -> None:
        self.flat, self.waiting, self.complete = flat, set(parameters), False
        self.parameters = parameters


class Coordinator:
    """Gathered parameters. `blocks` maps an available or in-flight parameter to its block (0 where it needs none)."""

    def __init__(self, job: Job, writer: Writer) -> None:
        self.job, self.writer, self.settings = job, writer, job.settings
        self.stream = GATHER if job.settings.overlap_comm else COMPUTE
        self.persistent = _persistent(job, job.settings)
        self.blocks: dict[int, int] = {}
        self.handles: dict[int, _Handle] = {}
        self.active: dict[int, set[int]] = defaultdict(set)
        self.saved: dict[int, list[int]] = defaultdict(list)
        """Module → blocks that its backward still needs."""
        self.kept: dict[int, int] = {}
        """Such a block → the position in the stream from which on autograd alone keeps it."""
        self.available = 0
        self.order: tuple[int, ...] = ()
        """Modules in hook order, from the recorded micro-batch."""
        self.entries: list[tuple[int, int]] = []
        """(parameter, step) along the order."""
        self.uses: dict[int, list[int]] = defaultdict(list)
        """Parameter → the steps at which a module with it runs, ascending."""
        self.elements_before: list[int] = [0]
        """Step → elements that the modules before it take."""
        self.recorded: list[int] = []
        self.queue: deque[tuple[int, int]] = deque()
        self.fetched_for: dict[int, int] = {}
        self.micro = 0
        self.step_id = 0
        self.with_gradients = True
        """Whether autograd keeps what a backward needs."""

    @property
    def complete(self) -> bool:
        """Whether there is a trace to prefetch along."""
        return bool(self.order)

    def start_micro(self) -> None:
        """`reset_step`, before each forward: the second one turns the recording into a trace."""
        if self.micro == 1:
            self._build_trace()
        self.micro += 1
        self.step_id = self.available = 0
        self.queue = deque(self.entries)
        self.fetched_for = defaultdict(lambda: _NEVER)

    def _build_trace(self) -> None:
        self.order = tuple(self.recorded)
        for step, module in enumerate(self.order):
            taken = 0
            for parameter in self.job.direct[module]:
                self.entries.append((parameter, step))
                self.uses[parameter].append(step)
                taken += self._numel(parameter)
            self.elements_before.append(self.elements_before[-1] + taken)

    # --- fetch and release

    def fetch(self, module: int) -> None:
        """`fetch_sub_module`."""
        if self.micro == 1:
            self.recorded.append(module)
        needed = self.job.direct[module]
        self._gather([p for p in needed if p not in self.blocks])
        for parameter in needed:
            self.active[parameter].add(module)
            self._wait(parameter)
        if self.complete:
            self._drop_from_queue(needed)
            self._prefetch()
        self.step_id += 1

    def _drop_from_queue(self, needed: tuple[int, ...]) -> None:
        due = {p for p in needed if self.fetched_for[p] < self.step_id}
        dropped: set[int] = set()
        while self.queue and len(dropped) < len(due):
            parameter, step = self.queue.popleft()
            self.fetched_for[parameter] = step
            dropped.add(parameter)

    def _prefetch(self) -> None:
        if self.settings.prefetch_bucket_size <= 0:
            return
        room = min(self.settings.max_live_parameters - self.available, self.settings.prefetch_bucket_size)
        chosen: list[int] = []
        taken = 0
        while self.queue and taken < room:
            parameter, step = self.queue.popleft()
            self.fetched_for[parameter] = max(self.fetched_for[parameter], step)
            if parameter not in self.blocks and parameter not in chosen:
                chosen.append(parameter)
                taken += self._numel(parameter)
        self._gather(chosen)

    def release(self, module: int, direction: int) -> None:
        """`release_sub_module`."""
        going = self._to_release(module)
        for parameter in self.job.direct[module]:
            self.active[parameter].discard(module)
            if parameter in going:
                self._free(parameter, module if self._saved_as_it_is(parameter, direction) else None)
        if direction == BACKWARD:
            self.writer.free(*self.saved.pop(module, ()))

    def _saved_as_it_is(self, parameter: int, direction: int) -> bool:
        """Whether autograd keeps the data that a module ran with, where it usually keeps the parameter, whose data comes and goes.

        A view of a parameter is saved with its data; and non-reentrant checkpointing detaches all that is saved while a module is
        recomputed (torch/utils/checkpoint.py). Biases are not saved.
        """
        if not self.with_gradients:
            return False
        if direction == RECOMPUTE and self.job.checkpointing == "non_reentrant":
            return not self.job.parameters[parameter].name.endswith("bias")
        runs_once = direction == FORWARD and self.job.checkpointing == "none"
        return parameter in self.job.saved_as_views and (runs_once or direction == RECOMPUTE)

    def _to_release(self, module: int) -> set[int]:
        if not self.complete:
            return set(self.job.direct[module])
        return {p for p in self.job.direct[module] if p not in self.persistent and self.fetched_for[p] <= self.step_id and not self._used_soon(p)}

    def _used_soon(self, parameter: int) -> bool:
        """Whether a later module needs it before `max_reuse_distance` elements have passed."""
        steps = self.uses[parameter]
        i = bisect_left(steps, self.step_id)
        if i == len(steps):
            return False
        return self.elements_before[steps[i]] - self.elements_before[self.step_id] < self.settings.max_reuse_distance

    def release_all(self) -> None:
        """Before the step everything is partitioned again."""
        for handle in {id(h): h for h in self.handles.values()}.values():
            if not handle.complete:
                self._complete(handle)
            self.writer.free(handle.flat)
        self.handles.clear()
        self.active.clear()
        for parameter in list(self.blocks):
            self._free(parameter)

    def gather_persistent(self) -> None:
        """After the step the small ones are gathered again (`_post_step`)."""
        missing = sorted(p for p in self.persistent if p not in self.blocks)
        for parameter in missing:
            self.blocks[parameter] = self._allocate(parameter, self._numel(parameter))

    def visit(self, parameters: tuple[int, ...]) -> None:
        """Gathered and let go again: one module's at a save (`GatheredParameters`; partition_parameters.py, `_allgather_params_coalesced`)."""
        n = self.settings.world_size
        blocks = [self._allocate(p, n * ceil(self._numel(p) / n)) for p in parameters]
        self.writer.free(*blocks)

    # --- blocks

    def _numel(self, parameter: int) -> int:
        return self.job.parameters[parameter].numel

    @property
    def _free_of_charge(self) -> bool:
        """On one GPU that holds its parameters, a gathered parameter is a view of its partition."""
        return self.settings.world_size == 1 and self.settings.offload_param is None

    def _allocate(self, parameter: int, elements: int) -> int:
        if self._free_of_charge:
            return 0
        return self.writer.allocate(elements * self.settings.model_bytes, "gathered", self.job.parameters[parameter].name, stream=self.stream)

    def _gather(self, parameters: list[int]) -> None:
        if not parameters:
            return
        n, size = self.settings.world_size, self.settings.model_bytes
        self.available += sum(self._numel(p) for p in parameters)
        if n == 1:
            for p in parameters:
                self.blocks[p] = self._allocate(p, self._numel(p))
            return
        if len(parameters) == 1:
            (p,) = parameters
            self.blocks[p] = self._allocate(p, n * ceil(self._numel(p) / n))
            self._staging(parameters)
            return
        flat = self.writer.allocate(size * n * sum(ceil(self._numel(p) / n) for p in parameters), "gathered", "all-gather buffer", stream=self.stream)
        self._staging(parameters)
        handle = _Handle(flat, parameters)
        for p in parameters:
            self.blocks[p] = 0
            self.handles[p] = handle

    def _staging(self, parameters: list[int]) -> None:
        """Offloaded partitions are copied to the GPU before they are gathered."""
        if self.settings.offload_param is not None:
            n = self.settings.world_size
            blocks = [self.writer.allocate(ceil(self._numel(p) / n) * self.settings.model_bytes, "temporary", "partition on its way to the GPU", stream=self.stream) for p in parameters]
            self.writer.free(*blocks)

    def _wait(self, parameter: int) -> None:
        handle = self.handles.pop(parameter, None)
        if handle is None:
            return
        if not handle.complete:
            self._complete(handle)
        handle.waiting.discard(parameter)
        if not handle.waiting:
            self.writer.free(handle.flat)

    def _complete(self, handle: _Handle) -> None:
        for p in handle.parameters:
            self.blocks[p] = self._allocate(p, self._numel(p))
        handle.complete = True

    def _free(self, parameter: int, saved_by: int | None = None) -> None:
        """`saved_by`: the module whose backward still needs the block."""
        handle = self.handles.get(parameter)
        in_flight = handle is not None and not handle.complete
        if parameter in self.blocks and not self.active[parameter] and not in_flight:
            block = self.blocks.pop(parameter)
            if saved_by is None:
                self.writer.free(block)
            else:
                self.saved[saved_by].append(block)
                if block:
                    self.kept[block] = len(self.writer.order)
            self.available -= self._numel(parameter)


def _persistent(job: Job, settings: Settings) -> frozenset[int]:
    """Parameters too small to partition away (parameter_offload.py, `mark_persistent_parameters`)."""
    kept, total = [], 0
    for i, p in enumerate(job.parameters):
        if p.numel <= settings.param_persistence_threshold and total + p.numel <= settings.model_persistence_threshold:
            kept.append(i)
            total += p.numel
    return frozenset(kept)
