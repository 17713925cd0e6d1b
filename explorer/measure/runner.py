"""The probe as a kernel sees it: run a real step and keep its record. No torch; it runs in the dashboard's kernel."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from explorer.errors import CouldNotRun
from explorer.measure import records
from explorer.measure.client import Progress, accelerator, lock_folder, run_in_worker
from explorer.measure.limits import why_not
from explorer.profile import Profile
from explorer.setup import Setup

__all__ = ["accelerator", "probe", "run_in_worker", "why_not"]


def probe(setup: Setup | Mapping[str, Any], *, on_progress: Progress | None = None, cancel: threading.Event | None = None, timeout_s: float = 900, save: bool = True, every_rank: bool = False) -> Profile:
    """One real training step of `setup`, measured: by all its ranks where there is a GPU for each, or `every_rank` asks for it on the CPU accelerator. Running out of GPU memory is a result; not being able to run raises CouldNotRun."""
    job = setup if isinstance(setup, Setup) else Setup.from_job(setup)
    reason = why_not(job)
    if reason:
        raise CouldNotRun(reason)
    argument = {"job": job.to_job(), "locks": str(lock_folder()), "every_rank": every_rank}
    profile = Profile.from_json(run_in_worker("explorer.measure.step:run_job", argument, on_progress=on_progress, cancel=cancel, timeout_s=timeout_s))
    return _kept(job, profile) if save else profile


def _kept(setup: Setup, profile: Profile) -> Profile:
    """The profile with its record written; where that cannot be it says so, and the measurement is not lost."""
    try:
        records.save(setup, profile)
    except OSError as error:
        return replace(profile, notes=(*profile.notes, f"this measurement could not be kept: {records.folder()} cannot be written to ({error.strerror}); EXPLORER_DATA names another folder"))
    return profile
