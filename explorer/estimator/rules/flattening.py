"""Where stages 1 and 2 flatten the weights: on the GPU, or by way of the host.

Since 0.18.7 DeepSpeed asks the card for its free memory, group by group, and flattens there where the flat copy has
room beside the weights (deepspeed/runtime/zero/stage_1_and_2.py, `__init__`, `flatten_on_accelerator`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from explorer.dsconfig import versions
from explorer.estimator.allocator import SIZE, Options, rounded
from explorer.estimator.expandable import make
from explorer.estimator.stream import Writer
from explorer.units import human

ON_CPU = "flatten-on-cpu"
"""The behaviour of releases that never flatten on the GPU (dsconfig/versions.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The card as DeepSpeed asks it for its free memory (accelerator/cuda_accelerator.py, `available_memory`)."""

    total_bytes: int
    outside_bytes: int
    """What the CUDA context, NCCL and other processes hold of it."""
    has_nvml: bool = True
    """Where there is no NVML (AMD's cards) DeepSpeed takes the total less what PyTorch has allocated."""
    options: Options = Options()
    assumed: bool = False
    """Whether no card is named, and one as large as the capacity is taken."""

    def free_bytes(self, writer: Writer, releases: Collection[int]) -> int:
        """Free bytes after the events written so far, once DeepSpeed has emptied PyTorch's cache."""
        sizes = rounded(np.array(writer.bytes, dtype=np.int64), self.options.divisions).tolist()
        allocator, live = make(self.options), {}
        for position, event in enumerate(writer.order, 1):
            if event < 0:
                allocator.free(live.pop(-event))
                continue
            if position in releases:
                allocator.release()
            live[event] = allocator.allocate(sizes[event - 1], writer.stream_of(event))
        allocator.release()
        if not self.has_nvml:
            return self.total_bytes - sum(block[SIZE] for block in live.values())
        return self.total_bytes - self.outside_bytes - allocator.reserved


class Flattening(NamedTuple):
    """How one parameter group is flattened, and why."""

    on_gpu: bool
    flat_bytes: int
    free_bytes: int | None = None
    """Of the card, when DeepSpeed asks; None where no card is known, and where the release does not ask."""
    by_version: bool = False


def decide(
    flat_bytes: int, device: Device | None, behaviours: Collection[str], writer: Writer, releases: Collection[int]
) -> Flattening:
    """Where DeepSpeed flattens a group of `flat_bytes`. Without a card it is the GPU, as on a card with room for both."""
    if ON_CPU in behaviours:
        return Flattening(False, flat_bytes, by_version=True)
    if device is None:
        return Flattening(True, flat_bytes)
    free = device.free_bytes(writer, releases)
    return Flattening(free >= flat_bytes, flat_bytes, free)


UNSURE = (
    "but only on a card of this size, where DeepSpeed flattens the weights on the CPU: a larger card with this as its limit "
    "runs out of memory as it flattens them on the GPU; name the card (gpu) to be sure"
)
"""Of a job that gives a capacity and no card, and that `asked_in_vain` holds for."""


def asked_in_vain(flattenings: Collection[Flattening]) -> bool:
    """Whether some group is flattened on the CPU because the card has too little free."""
    return any(not f.on_gpu and not f.by_version for f in flattenings)


def note(flattenings: Collection[Flattening], version: str, assumed: bool) -> str | None:
    """Which way was taken, and by which release's rule; None where nothing is flattened so. `assumed`: see `Device`."""
    if not flattenings:
        return None
    largest = max(flattenings, key=lambda f: f.flat_bytes)
    place = "on the GPU" if largest.on_gpu else "on the CPU"
    if len({f.on_gpu for f in flattenings}) == 2:
        place = "in part on the GPU and in part on the CPU"
    start = f"DeepSpeed {version} flattens the weights {place} as it starts"
    if largest.by_version:
        return f"{start}: every release before {versions.BEHAVIOURS[ON_CPU].before} does, at stages 1 and 2"
    if largest.free_bytes is None:
        return f"{start}: no card is named, and one with room for a second copy of them ({human(largest.flat_bytes)}) is taken"
    size = "; the card is taken to be as large as capacity_gib" if assumed else ""
    why = f"the flat copy takes {human(largest.flat_bytes)} and the card has {human(max(0, largest.free_bytes))} free then"
    return f"{start}: {why}{size}"
