"""What every wrapper's rules share: the job, the host's ledger, and the moments at which DeepSpeed acts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from explorer.dsconfig import Settings
from explorer.errors import BadInput
from explorer.estimator.rules.flattening import Device, Flattening
from explorer.estimator.stream import COMPUTE, REDUCE, Writer
from explorer.estimator.tape import Parameter
from explorer.units import power_of_two

_MOST_BITSANDBYTES = 2**31 - 1
"""Elements of one tensor (bitsandbytes/backends/cuda/ops.py hands `c_int32(g.numel())` to its kernels, of 32 bit and of 8)."""
_MAP_8_BIT = 4 * 256
"""Bytes of a table of 256 fp32 values, one for each kind of state (bitsandbytes/functional.py, `create_dynamic_map`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """All that the rules need of a Setup and its tape."""

    settings: Settings
    parameters: tuple[Parameter, ...]
    buffers_bytes: int
    modules: tuple[str, ...]
    direct: tuple[tuple[int, ...], ...]
    """Per module: indices of its own parameters."""
    sent_in_16_bit: frozenset[int] = frozenset()
    """Under autocast: parameters whose gradients are reduced in 16 bit."""
    saved_as_views: frozenset[int] = frozenset()
    """Parameters of which autograd saves a view."""
    checkpointing: str = "none"
    """As in a tape's key."""
    device: Device | None = None
    """The card, where one is known."""

    @property
    def trainable(self) -> tuple[int, ...]:
        """Indices of the parameters that train, in DeepSpeed's order."""
        return tuple(i for i, p in enumerate(self.parameters) if p.trainable)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The optimizer's parameter groups: all that trains, or the Trainer's two, those that decay first (transformers/trainer.py, `create_optimizer`)."""
        if self.settings.parameter_groups == "one":
            return (self.trainable,)
        split = [tuple(i for i in self.trainable if self.parameters[i].decays is decays) for decays in (True, False)]
        return tuple(group for group in split if group)


@dataclass(slots=True)
class Host:
    """Host memory of one process, in bytes. PyTorch's pinned allocator rounds each block up to a power of two (CachingHostAllocator.h)."""

    pinned_bytes: int = 0
    pageable_bytes: int = 0
    transient_bytes: int = 0
    """The most that lives on top of both while DeepSpeed starts."""
    save_bytes: int = 0
    """A save's copy of the weights."""
    every_rank_saves: bool = False
    """Whether each rank makes one, or rank 0 alone."""
    earlier_bytes: int = 0
    """The most at a moment before all of both was there."""
    late_bytes: int = 0
    """Of the ordinary ones, those that the first step makes, when start-up's are gone."""
    owners: list[str] = field(default_factory=list)

    def pin(self, n_bytes: int, owner: str) -> None:
        """A page-locked block that stays."""
        self.pinned_bytes += power_of_two(n_bytes)
        self.owners.append(owner)

    def hold(self, n_bytes: int, owner: str) -> None:
        """An ordinary block that stays."""
        self.pageable_bytes += n_bytes
        self.owners.append(owner)

    def hold_late(self, n_bytes: int, owner: str) -> None:
        """An ordinary block that the first step makes, and that stays."""
        self.hold(n_bytes, owner)
        self.late_bytes += n_bytes

    @property
    def peak_bytes(self) -> int:
        """The most at any moment: start-up with what it holds for a moment, or everything later."""
        everything = self.pinned_bytes + self.pageable_bytes
        return max(everything, everything - self.late_bytes + self.transient_bytes, self.earlier_bytes)

    def put(self, n_bytes: int, owner: str, pinned: bool) -> None:
        """Pinned or ordinary, as the config says."""
        (self.pin if pinned else self.hold)(n_bytes, owner)

    def passing(self, n_bytes: int) -> None:
        """A block that start-up holds for a moment."""
        self.transient_bytes = max(self.transient_bytes, n_bytes)

    def saved(self, n_bytes: int, every_rank: bool) -> None:
        """A copy of the weights for a save: on each rank's host, or on rank 0's."""
        self.save_bytes, self.every_rank_saves = n_bytes, every_rank

    def peak_of(self, saves: bool) -> int:
        """The most at any moment, of a rank that has a copy of the weights at a save or has none."""
        held = self.pinned_bytes + self.pageable_bytes
        return max(self.peak_bytes, held + self.save_bytes if saves else 0)

    def passing_now(self, n_bytes: int) -> None:
        """A block that is gone before anything else is held."""
        self.earlier_bytes = max(self.earlier_bytes, self.pinned_bytes + self.pageable_bytes + n_bytes)


class Rules:
    """The moments of a step, in order. A subclass is one wrapper class of DeepSpeed; it writes events and keeps block numbers."""

    source: str
    """DeepSpeed's file with this wrapper."""
    wants_modules = False
    """Whether `enter` and `leave` are to be called (stage 3)."""

    def __init__(self, job: Job, writer: Writer) -> None:
        self.job, self.settings, self.writer = job, job.settings, writer
        self.host = Host()
        self.releases: set[int] = set()
        self.flattenings: list[Flattening] = []
        """Of each parameter group, where DeepSpeed asks the card about it."""
        self.states: list[int] | None = None
        """Optimizer states' blocks, once they exist."""
        self.has_maps = False
        """Whether the tables that 8-bit states are read by are on the GPU; one for all masters."""
        self.kept: Mapping[int, int] = {}
        """Whole weights that stage 3 has let go and autograd keeps: block → the position in the stream from which on it alone does."""
        self.side = REDUCE if self.settings.overlap_comm else COMPUTE

    # --- moments

    def init(self) -> None:
        """`deepspeed.initialize`, from the model in its dtype on the CPU to an engine that is ready."""
        raise NotImplementedError

    def before_micro(self, index: int) -> None:
        """A forward begins; `index` counts micro-batches of this step."""

    def enter(self, module: int, direction: int) -> None:
        """A module's forward, backward or recomputed forward begins."""

    def leave(self, module: int, direction: int) -> None:
        """And ends."""

    def gradient(self, parameter: int, block: int) -> None:
        """Autograd has a parameter's whole gradient for this micro-batch, in `block`."""
        raise NotImplementedError

    def after_backward(self) -> None:
        """Autograd is done with this micro-batch."""

    def step(self) -> None:
        """`engine.step()` at the boundary."""
        raise NotImplementedError

    def skipped_step(self) -> None:
        """`engine.step()` that finds an overflow: gradients are dropped, nothing is updated."""

    # --- between steps

    def before_evaluation(self) -> None:
        """Forwards without gradients begin."""

    def after_evaluation(self) -> None:
        """And have ended; what they left goes."""

    def gather_for_save(self) -> None:
        """Weights are gathered whole, module by module, to be saved (stage 3)."""

    # --- helpers

    @property
    def model_bytes(self) -> int:
        """Bytes of a parameter element."""
        return self.settings.model_bytes

    def numel(self, parameters: Sequence[int]) -> int:
        """Elements of some parameters."""
        return sum(self.job.parameters[i].numel for i in parameters)

    def empty_cache(self) -> None:
        """DeepSpeed returns cached blocks to the device here (runtime/utils.py, `empty_cache`)."""
        self.releases.add(len(self.writer.order) + 1)

    def load_model(self) -> dict[int, int]:
        """The model moved to the GPU, tensor by tensor; parameter → block (runtime/engine.py, `_configure_distributed_model`)."""
        blocks = {i: self.writer.allocate(p.numel * self.model_bytes, "parameters", p.name) for i, p in enumerate(self.job.parameters)}
        self.writer.allocate(self.job.buffers_bytes, "parameters", "module buffers", "traced")
        for _ in range(self.settings.optimizer.states_left_behind):
            for i in self.job.trainable:
                self.writer.allocate(self.job.parameters[i].numel * self.model_bytes, "optimizer", "states of the first instance")
        return blocks

    def optimizer_states(self, sizes: Sequence[int], owner: str = "optimizer states", matrices: Collection[int] = ()) -> list[int]:
        """The optimizer's state tensors for fp32 masters of these elements, one set per master; `matrices`: positions of those that keep a matrix's shape."""
        optimizer = self.settings.optimizer
        if max(sizes, default=0) > _MOST_BITSANDBYTES and optimizer.implementation.startswith("bitsandbytes"):
            raise BadInput("trainer.optim", f"is {optimizer.name}, whose kernels count at most 2³¹ - 1 elements, and one flat master here has {max(sizes):,}; use more GPUs or stage 3, or choose another optimizer")
        if not self.has_maps and any(optimizer.in_8_bit(n) for n in sizes):
            self.has_maps = True
            for _ in range(optimizer.moments):
                self.writer.allocate(_MAP_8_BIT, "optimizer", owner)
        each = [4] * optimizer.step_scalars
        return [self.writer.allocate(n_bytes, "optimizer", owner) for i, n in enumerate(sizes) for n_bytes in (*each, *optimizer.state_bytes(n, i in matrices))]

    def optimizer_temporaries(self, sizes: Sequence[int], decays: bool = True) -> None:
        """What the optimizer's own kernel holds while it updates masters of these elements: a foreach kernel for all at once, freed last to first.

        `decays`: whether they are of the group with weight decay, or of the only one.
        """
        optimizer = self.settings.optimizer
        count = optimizer.foreach_temporaries if decays else optimizer.undecayed_temporaries
        if optimizer.kernel == "single":
            for n in sizes:
                self.writer.free(*[self.writer.allocate(4 * n, "temporary", "optimizer temporaries") for _ in range(count)])
            return
        blocks = [self.writer.allocate(4 * n, "temporary", "optimizer temporaries") for _ in range(count) for n in sizes]
        self.writer.free(*reversed(blocks))

    def gather_copies(self, partitions: Sequence[int]) -> None:
        """What old releases' all-gather of the weights takes on top: torch's `all_gather` into a list fills one flat copy of all ranks' pieces.

        `partitions`: elements of a rank's partition of each group; a piece has at most about `allgather_bucket_size` elements
        of all ranks together, the last one a little more (runtime/utils.py, `all_gather_dp_groups`, 0.8.3).
        """
        if "all-gather-copies" not in self.settings.behaviours:
            return
        n = self.settings.world_size
        for own in partitions:
            count = max(1, own * n // max(1, self.settings.allgather_bucket_size))
            piece = own // count // 2 * 2
            for elements in {piece, own - (count - 1) * piece}:
                self.writer.transient(self.model_bytes * elements * n, "all-gather copy")

    def norms(self, sizes: Sequence[int], stream: int = COMPUTE) -> None:
        """The gradient norm, tensor by tensor in fp64 (runtime/zero/utils.py, `get_norm_dtype`)."""
        for n in sizes:
            self.writer.transient(8 * n, "gradient norm in fp64", stream)


def partition(elements: int, world_size: int) -> int:
    """Elements of one rank's flat partition: padded to twice the ranks (stage_1_and_2.py, `nccl_start_alignment_factor`)."""
    return ceil(elements / (2 * world_size)) * 2
