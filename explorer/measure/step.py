"""What the worker is asked for: one job run for real, its Profile returned (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.measure import locks
from explorer.measure.run import Emit, Run
from explorer.measure.trainer import TrainerRun
from explorer.setup import Setup


def run_job(argument: Mapping[str, Any], emit: Emit) -> dict[str, Any]:
    """Worker entry: `argument` has "job", and "locks" (a folder) unless the caller guards the GPU itself; returns a Profile's record."""
    run = make_run(Setup.from_job(argument["job"]), emit)
    run.meter.alone = bool(argument.get("locks"))
    if not run.meter.alone:
        return run.profile().to_record()
    with locks.gpus(argument["locks"], locks.visible(1), lambda place: emit({"progress": f"waiting for the GPU (place {place})"})):
        return run.profile().to_record()


def make_run(setup: Setup, emit: Emit) -> Run:
    """The plain engine's run, or the Trainer's where the job has a trainer part."""
    return Run(setup, emit) if setup.trainer is None else TrainerRun(setup, emit)
