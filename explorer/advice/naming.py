"""Which tensor the failing request was: the request, rounded as PyTorch rounds it, against every event of the job's estimate. No torch.

A match is a candidate; the one whose memory at that moment is nearest to what the message says was allocated comes first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from explorer.advice.message import Message, Size
from explorer.estimator.estimate import Events
from explorer.estimator.verdict import device_request, phase_at
from explorer.profile import CATEGORIES
from explorer.units import MiB, human

SMALLEST = 20 * MiB
"""A request of this or less is any small tensor's."""
_MOST = 3
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A tensor of the job that would be asked for with the message's number of bytes."""

    owner: str
    """A module, a parameter or a DeepSpeed buffer; layers that repeat are one, "layers.*"."""
    category: str
    n_bytes: int
    phase: str
    step: str
    allocated_bytes: int
    """What the estimate has allocated when it is asked for."""
    times: int
    """How often the job asks for it."""

    @property
    def text(self) -> str:
        """What it is, in words."""
        what = _BUFFERS.get(self.owner) or (f"the gathered weights of {self.owner}" if self.category == "gathered" else f"a gradient of {self.owner}" if self.category == "gradients" else f"a tensor that {self.owner} makes")
        return f"{what}, {human(self.n_bytes)}, in {self.phase}"


_BUFFERS = {
    "ipg_bucket": "DeepSpeed's reduce bucket (reduce_bucket_size)", "bit16_groups_flat": "DeepSpeed's flat copy of the 16-bit weights, made at init", "partition clone": "a copy of this rank's weights that DeepSpeed makes at init",
    "single_partition_of_fp32_groups": "this rank's fp32 master weights", "initialize_optimizer_states": "DeepSpeed's zero gradients at init, as large as the masters",
    "optimizer states": "an optimizer state (moment), made in the first step", "optimizer temporaries": "a temporary of the optimizer's step", "flat_grad_partition": "the flat copy of this rank's gradients in the step",
    "single_partition_of_fp32_groups.grad": "this rank's gradients in fp32, made in the step", "grads_in_partition": "the gradients this rank keeps", "reduce copy": "the flat copy of a bucket that is being reduced",
    "gradient norm in fp64": "a gradient in fp64, for its norm", "fp32 gradient copy": "a gradient in fp32 on its way to the host", "lp_param_buffer": "DeepSpeed's flat buffer of this rank's weights", "all-gather buffer": "the buffer of a gather (stage 3)",
    "fp32_partitioned_groups_flat": "this rank's fp32 master weights", "fp32 conversion": "a conversion of this rank's weights to fp32 at init", "grad_partitions_flat_buffer": "DeepSpeed's flat buffer of this rank's gradients", "batch": "the batch",
    "temp_grad_buffer_for_gpu_offload": "DeepSpeed's staging buffer for the largest gradient",
}


def name(events: Events, message: Message) -> list[Named]:
    """Candidates, likeliest first; none where the request is any small tensor's, or no tensor of the job is of that size."""
    found = list(_candidates(events, places(events, message)))
    said = message.allocated if not message.doubted("allocated") else None
    return sorted(found, key=lambda c: abs(c.allocated_bytes - said.bytes) if said else -c.allocated_bytes)[:_MOST]


def places(events: Events, message: Message) -> np.ndarray:
    """Positions in the stream at which a tensor of the request's size is asked for; none where the request is any small tensor's."""
    requested = message.requested
    if requested is None or requested.bytes <= SMALLEST or message.doubted("requested"):
        return np.empty(0, dtype=int)
    stream = events.stream
    positions = np.flatnonzero(stream.order > 0)
    sizes = stream.bytes[stream.order[positions] - 1]
    fitting = [n for n in np.unique(sizes) if requested.holds(device_request(-(-int(n) // 512) * 512))]
    return positions[np.isin(sizes, fitting)]


def _candidates(events: Events, positions: np.ndarray) -> Iterator[Named]:
    """One for each owner, size and phase: where most is allocated."""
    stream, usage = events.stream, events.usage
    groups: dict[tuple, list[int]] = {}
    for position in positions.tolist():
        block = int(stream.order[position]) - 1
        owner = _NUMBER.sub(".*", stream.owners[block])
        mark = phase_at(stream.marks, position)
        groups.setdefault((owner, int(stream.categories[block]), int(stream.bytes[block]), mark.phase), []).append(position)
    for (owner, category, n_bytes, phase), places in groups.items():
        worst = max(places, key=lambda p: int(usage.allocated[p]))
        yield Named(owner=owner or "the model", category=CATEGORIES[category], n_bytes=n_bytes, phase=phase, step=phase_at(stream.marks, worst).step, allocated_bytes=int(usage.allocated[worst]), times=len(places))


def weights(parameters: tuple, requested: Size) -> list[tuple[str, int]]:
    """(parameter, bytes of an element) of the parameters whose gradient, gathered weight or copy is of that size: in 16 bit and in fp32."""
    found: dict[tuple[str, int], None] = {}
    for parameter in parameters:
        for width in (2, 4):
            n_bytes = parameter.numel * width
            if n_bytes > SMALLEST and requested.holds(device_request(-(-n_bytes // 512) * 512)):
                found[_NUMBER.sub(".*", parameter.name), width] = None
    return list(found)


def tokens(requested: Size, vocabulary: int, width: int) -> int:
    """Positions whose logits, `width` bytes each, take the request."""
    return round(requested.bytes / (vocabulary * width))
