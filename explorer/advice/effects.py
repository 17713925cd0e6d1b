"""What the settings do: what DeepSpeed ignores, what is not followed, what fills an "auto", and what costs more than people think. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from explorer.advice.remarks import Remark, of_findings
from explorer.dsconfig import Settings, resolve, versions
from explorer.dsconfig.auto import FORMULAS
from explorer.errors import shown
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import human

_HARMLESS = frozenset(("allgather-key-ignored", "stage3-key-ignored", "unknown-key"))


def effects(setup: Setup, profile: Profile, launcher: str | None) -> Iterator[Remark]:
    """What DeepSpeed ignores, what is not modelled, what "auto" became, what costs more than people think, and what is right. `launcher`: as in `Pasted`."""
    settings = resolve(setup)
    yield from of_findings((f for f in settings.findings if f.id not in _HARMLESS), "problem")
    yield from of_findings((f for f in settings.findings if f.id in _HARMLESS), "note")
    yield from of_findings(settings.not_modelled, "note")
    autos = [path for path in _autos(setup.deepspeed, "") if path.partition(".")[0] != "scheduler"]
    if autos:
        values = ", ".join(f"{path} = {shown(_at(settings.config, path))}{f' ({FORMULAS[path]})' if path in FORMULAS else ''}" for path in autos)
        yield Remark(id="auto-resolved", severity="note", key="deepspeed", text=f"\"auto\" is no uncertainty: the Trainer fills it from its arguments. Here: {values}.")
    if settings.offload_optimizer is not None and settings.stage in (1, 2):
        yield Remark(id="offload-moves", severity="note", key="zero_optimization.offload_optimizer", text=f"At stage {settings.stage} offload_optimizer moves the fp32 masters, the moments and this rank's gradients to the host, and the step with them; weights and activations stay on the GPU, and the forward and backward are never computed elsewhere.")
    yield from _buffers(setup, settings, profile)
    yield from _overlap(setup, settings)
    yield from _pinned(settings, profile)
    if launcher in ("deepspeed", "accelerate", "torchrun") and setup.method == "deepspeed":
        yield Remark(id="launcher-right", severity="note", key="launcher", text=f"It is launched with {launcher}, as DeepSpeed wants.")
    if setup.trainer is not None:
        yield Remark(id="batch-agrees", severity="note", key="micro_batch", text=f"per_device_train_batch_size and train_micro_batch_size_per_gpu agree: {setup.micro_batch}.")


_WORTH_SAYING = 0.01
"""Of the peak."""


def _buffers(setup: Setup, settings: Settings, profile: Profile) -> Iterator[Remark]:
    """What DeepSpeed's buffers take when they are largest, whatever the model's size."""
    most = max((phase.at_peak.get("comm_buffers", 0) for phases in profile.steps.values() for phase in phases), default=0)
    if most <= _WORTH_SAYING * profile.peak.allocated_bytes:
        return
    given = "reduce_bucket_size" in setup.deepspeed.get("zero_optimization", {})
    twice = ", and overlap_comm makes two of that" if settings.overlap_comm and settings.stage in (1, 2) else ""
    yield Remark(id="buffers-cost", severity="note", key="zero_optimization.reduce_bucket_size", text=f"DeepSpeed's own buffers take up to {human(most)} here: reduce_bucket_size is {settings.reduce_bucket_size:,} elements{'' if given else ', its default since the config gives none'}{twice}. It does not depend on the model.")


def _overlap(setup: Setup, settings: Settings) -> Iterator[Remark]:
    """What DeepSpeed's users saw of 0.14 (#6351), where smaller buckets make it likelier."""
    if setup.deepspeed_version is not None and versions.read(setup.deepspeed_version).release[:2] == (0, 14) and settings.overlap_comm and settings.stage in (1, 2):
        yield Remark(id="overlap-of-0.14", severity="hint", key="zero_optimization.overlap_comm", text="In DeepSpeed 0.14 overlap_comm with small reduce buckets gave worse losses, or none (NaN): watch the loss after making them smaller, or turn overlap_comm off.")


def _pinned(settings: Settings, profile: Profile) -> Iterator[Remark]:
    if profile.host.pinned_bytes:
        section = "offload_optimizer" if settings.offload_optimizer is not None else "offload_param"
        yield Remark(id="pinned-host", severity="note", key=f"zero_optimization.{section}.pin_memory", text=f"pin_memory locks {human(profile.host.pinned_bytes)} of the host's memory for each process, where PyTorch rounds every block up to a power of two; one node's processes take {human(profile.host.per_node_bytes)} in all at their peak.")


def _autos(value: Any, path: str) -> Iterator[str]:
    for key, inner in value.items() if hasattr(value, "items") else ():
        here = f"{path}.{key}" if path else key
        if inner == "auto":
            yield here
        else:
            yield from _autos(inner, here)


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if hasattr(config, "get") else None
    return config
