"""DeepSpeed's C++ and CUDA extensions, compiled before the run and with a word about it (torch)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from explorer.dsconfig import Settings
from explorer.errors import CouldNotRun
from explorer.measure import locks, nvme

_OPTIMIZERS = {
    "FusedAdam": "FusedAdamBuilder", "DeepSpeedCPUAdam": "CPUAdamBuilder", "DeepSpeedCPUAdagrad": "CPUAdagradBuilder",
    "DeepSpeedCPULion": "CPULionBuilder", "FusedLion": "FusedLionBuilder", "FusedLamb": "FusedLambBuilder",
}
"""Optimizer class → the builder that DeepSpeed would call at its first use."""

_STOOD_IN_FOR = {"FusedAdam": "during the step", "DeepSpeedCPUAdam": "host memory and time during the step"}
"""Those that torch's AdamW can stand in for, and what that costs."""


def build(settings: Settings, say: Callable[[str], None]) -> str | None:
    """Compile and load what the run needs. Returns what is to be said where Adam cannot be, for which torch's stands in; raises CouldNotRun for all others."""
    _forget_killed_builds()
    _try_shared_memory(say)
    if nvme.on_disk(settings):
        _build_async_io(say)
    builder = _builder(_OPTIMIZERS.get(settings.optimizer.implementation))
    if builder is None:
        return None
    name = settings.optimizer.implementation
    reason = _load(builder, say)
    if reason is None:
        return None
    if name in _STOOD_IN_FOR:
        return f"DeepSpeed's {name} could not be compiled here, so torch's AdamW ran instead, which needs more {_STOOD_IN_FOR[name]} ({reason})"
    raise CouldNotRun(f"DeepSpeed's {name} could not be compiled here ({reason}); {_way_out(settings)}")


def _way_out(settings: Settings) -> str:
    if settings.offload_optimizer is not None:
        return "install a C++ compiler and ninja"
    return "it needs a GPU and its compiler, nvcc; another optimizer, AdamW say, may run"


def _build_async_io(say: Callable[[str], None]) -> None:
    builder = _builder("AsyncIOBuilder")
    if builder is None or not builder.is_compatible(verbose=False):
        raise CouldNotRun("offload to NVMe needs DeepSpeed's async_io, and that libaio with its header, which are not installed: apt install libaio-dev")
    reason = _load(builder, say)
    if reason:
        raise CouldNotRun(f"offload to NVMe needs DeepSpeed's async_io, which could not be compiled here ({reason})")


def _try_shared_memory(say: Callable[[str], None]) -> None:
    """The CPU accelerator's collectives in shared memory: where they cannot be compiled, DeepSpeed does without (comm/torch.py, `build_shm_op`)."""
    import deepspeed

    builder, known = _builder("ShareMemCommBuilder"), deepspeed.ops.__compatible_ops__
    if builder is not None and known.get(builder.NAME) and _load(builder, say) is not None:
        known[builder.NAME] = False


def _builder(name: str | None) -> Any:
    if name is None:
        return None
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().create_op_builder(name)


def _load(builder: Any, say: Callable[[str], None]) -> str | None:
    """Why it cannot be loaded; None where it was."""
    say(f"compiling DeepSpeed's {builder.NAME} (a minute or more, once per machine)")
    try:
        builder.load(verbose=False)
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return None


def _forget_killed_builds() -> None:
    """A probe cancelled while it compiled leaves a lock that the next one would wait for."""
    from torch.utils.cpp_extension import _get_build_directory

    for lock in Path(_get_build_directory("explorer", verbose=False)).parent.glob("*/lock"):
        locks.clear_abandoned(lock)
