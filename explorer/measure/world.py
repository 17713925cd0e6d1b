"""Which rank of how many a run is: one of a real process group, or one process that stands in for it (torch)."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StandIn:
    """One process alone, whatever the job's world is."""

    rank: int
    size: int
    device: int = 0
    """Number of its GPU among those that this process sees."""

    def join(self, accelerator: str) -> str | None:
        """Set the environment and make the process group: real for one rank on a GPU, else fake. Returns what is to be said of it."""
        import torch.distributed as dist

        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        if self.size == 1 and accelerator == "cuda":
            # A store inside the process: nothing listens on a port.
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
            return None
        stand_in(self.rank, self.size)  # on the CPU for one rank too: gloo's threads let go of tensors where the profiler does not look
        if self.size == 1:
            return None
        _patch_for_one_rank()
        return f"one process stands in for rank {self.rank} of {self.size}: collectives do nothing, NCCL's own memory is not included"

    def agree(self, number: int, done: bool) -> bool:
        """Whether every rank is done after `number` steps."""
        return done


@dataclass(frozen=True, slots=True)
class Launched:
    """One of the processes that DeepSpeed's launcher started, which has set the environment."""

    rank: int
    size: int
    device: int = 0

    def join(self, accelerator: str) -> str | None:
        """Make the process group."""
        import torch.distributed as dist

        os.environ["LOCAL_WORLD_SIZE"] = str(self.size)
        dist.init_process_group("nccl" if accelerator == "cuda" else "gloo")
        return None

    def agree(self, number: int, done: bool) -> bool:
        """Whether every rank is done after `number` steps: a rank that stopped alone would leave the others in a collective. Asked over the group's store, so no GPU memory."""
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        store.set(f"done {number} {self.rank}", str(int(done)))
        return all(store.get(f"done {number} {rank}") == b"1" for rank in range(self.size))


World = StandIn | Launched


def stand_in(rank: int, world: int) -> None:
    """A process group in which this process is rank `rank` of `world` and no other exists."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def _patch_for_one_rank() -> None:
    """A fake group's all-gather would overwrite every partition with this rank's: leave the weights as they are. Memory is the same."""
    import deepspeed.runtime.bf16_optimizer as bf16_optimizer
    import deepspeed.runtime.zero.partition_parameters as partition_parameters
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    import deepspeed.runtime.zero.stage_1_and_2 as stage_1_and_2

    for module, name in ((stage_1_and_2, "all_gather_dp_groups"), (bf16_optimizer, "all_gather_dp_groups")):
        if hasattr(module, name):
            setattr(module, name, lambda *_, **__: None)
    for module in (coordinator, partition_parameters):
        if hasattr(module, "assert_ints_same_as_other_ranks"):
            module.assert_ints_same_as_other_ranks = lambda *_, **__: None
