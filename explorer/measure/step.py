"""What the worker is asked for: one job run for real, its Profile returned (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from explorer.dsconfig import resolve
from explorer.measure import locks
from explorer.measure.ranks import run_ranks
from explorer.measure.run import Emit, Run
from explorer.measure.trainer import TrainerRun
from explorer.measure.world import World
from explorer.setup import Setup


def run_job(argument: Mapping[str, Any], emit: Emit) -> dict[str, Any]:
    """Worker entry; returns a Profile's record. Every rank runs where there is a GPU for each, else one process stands in for the asked one.

    `argument` has "job"; "locks" (a folder) unless the caller guards the GPUs itself; "every_rank" where all shall run on the CPU accelerator too.
    """
    setup = Setup.from_job(argument["job"])
    count = setup.world_size if _room_for_all(setup, bool(argument.get("every_rank"))) else 1
    devices = locks.visible(count)
    guard = locks.gpus(argument["locks"], devices, lambda place: emit({"progress": f"waiting for the GPU (place {place})"})) if argument.get("locks") else nullcontext()
    if count == 1:
        run = make_run(setup, emit)
        run.meter.alone = bool(argument.get("locks"))
    with guard:
        return run.profile().to_record() if count == 1 else run_ranks(argument, devices, emit)


def make_run(setup: Setup, emit: Emit, world: World | None = None) -> Run:
    """The plain engine's run, or the Trainer's where the job has a trainer part."""
    return Run(setup, emit, world) if setup.trainer is None else TrainerRun(setup, emit, world)


def _room_for_all(setup: Setup, asked: bool) -> bool:
    """Whether this machine has a GPU for each rank of the job, and the job is one of a single node whose ranks all divide its state."""
    import torch
    from deepspeed.accelerator import get_accelerator

    size = setup.world_size
    if size == 1 or size > setup.gpus_per_node or resolve(setup).world_size != size:
        return False
    return torch.cuda.device_count() >= size if get_accelerator()._name == "cuda" else asked
