"""A node's memory, where that ran out and not the GPU's: whether it did, and what there is to say of it. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.advice.message import Message
from explorer.advice.remarks import Remark
from explorer.dsconfig import resolve
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import GiB, human


def holds(setup: Setup, profile: Profile) -> bool:
    """Whether a node has the host memory, as far as the job says what it has."""
    return setup.host_ram_gib is None or profile.host.per_node_bytes <= setup.host_ram_gib * GiB


def is_short(setup: Setup, profile: Profile, message: Message | None) -> bool:
    """Whether host memory is what is to be saved: a message says so, or the node cannot hold what fits the GPU."""
    return message is not None and message.is_host or profile.verdict.answer == "fits" and not holds(setup, profile)


def remarks(setup: Setup, profile: Profile, message: Message | None) -> Iterator[Remark]:
    """What the job takes of the host, against what the node has."""
    if message is not None and message.is_host:
        yield Remark(id="host-estimate", severity="cause", key="host_ram_gib", text=_estimate(setup, profile))
    if not holds(setup, profile):
        yield Remark(id="host-too-small", severity="cause", key="host_ram_gib", text=f"The processes of one node take {human(profile.host.per_node_bytes)} of host memory, and it has {human(int(setup.host_ram_gib * GiB))}: the operating system would kill them (-9). Keep parameters on the GPU, or offload to NVMe at stage 3.")


def _estimate(setup: Setup, profile: Profile) -> str:
    settings, host = resolve(setup), profile.host
    each = min(setup.world_size, setup.gpus_per_node)
    pinned = f", {human(host.pinned_bytes)} of it pinned" if host.pinned_bytes else ""
    node = f", and the {each} of one node {human(host.per_node_bytes)}" if each > 1 else ", the only one of its node"
    text = f"By the estimate a process takes {human(host.peak_bytes)} of host memory at its peak{pinned}{node}."
    if settings.offload_optimizer is None and settings.offload_param is None:
        text += " Nothing is offloaded, so no setting of DeepSpeed is behind it."
    text += f" Not in that: data-loader workers, and loading, where each process that reads the whole model by itself holds its {human(profile.parameters * settings.model_bytes)} once more."
    if setup.host_ram_gib is None:
        return f"{text} What the node has is not said: give host_ram_gib, and each change is held against it."
    if holds(setup, profile):
        return f"{text} The node's {setup.host_ram_gib:g} GiB would hold what the step takes: look at those two, at other jobs, and at a limit below the node's memory (Slurm, a container)."
    return text
