"""A folder of the probe's own for what DeepSpeed swaps to disk (ZeRO-3 only), gone when the probe ends. No torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from explorer.dsconfig import Settings
from explorer.errors import CouldNotRun
from explorer.units import human

_NAME = "explorer-swap-"


def on_disk(settings: Settings) -> bool:
    """Whether DeepSpeed writes to disk at all: below stage 3 it takes "nvme" as "cpu" (runtime/zero/stage_1_and_2.py)."""
    return settings.stage == 3 and bool(_sections(settings))


def swap_bytes(settings: Settings, parameters: int) -> int:
    """Bytes one rank writes: fp32 master and two moments, gradients while they wait, and its share of the weights."""
    each = {"offload_optimizer": 16, "offload_param": settings.model_bytes}
    return sum(each[name] for name, _ in _sections(settings)) * parameters // settings.world_size


@contextlib.contextmanager
def swap_folder(settings: Settings, parameters: int) -> Iterator[Path | None]:
    """An empty folder under the job's nvme_path, or under the system's temporary folder where the job names none; None where nothing is swapped.

    Raises CouldNotRun where the path is missing, closed or too full.
    """
    if not on_disk(settings):
        yield None
        return
    base = _base(settings)
    needed, free = swap_bytes(settings, parameters), shutil.disk_usage(base).free
    if needed > free * 9 // 10:
        raise CouldNotRun(f"the step would write about {human(needed)} to {base}, which has {human(free)} free; name another folder as nvme_path")
    _remove_abandoned(base)
    folder = base / f"{_NAME}{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise CouldNotRun(f"nothing can be written to nvme_path {base} ({error.strerror}); name another folder, on a fast disk") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sections(settings: Settings) -> list[tuple[str, str | None]]:
    """(section, nvme_path) of each that swaps to disk."""
    found = (("offload_optimizer", settings.offload_optimizer), ("offload_param", settings.offload_param))
    return [(name, offload.nvme_path) for name, offload in found if offload is not None and offload.device == "nvme"]


def _base(settings: Settings) -> Path:
    named = next(((name, path) for name, path in _sections(settings) if path), None)
    if named is None:
        return Path(tempfile.gettempdir())
    base = Path(named[1])
    if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        why = "is not a folder on this machine" if not base.is_dir() else "cannot be written to"
        raise CouldNotRun(f"zero_optimization.{named[0]}.nvme_path {base} {why}; name one that is, on a fast disk")
    return base


def _remove_abandoned(base: Path) -> None:
    """What probes left that were killed."""
    for folder in base.glob(f"{_NAME}*"):
        pid = folder.name.removeprefix(_NAME)
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
