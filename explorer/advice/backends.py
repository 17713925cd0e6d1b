"""What the allocator of each backend can be told, and by which variable: advice that fits one is wrong for another. No torch.

Sources: c10/cuda/CUDAAllocatorConfig.cpp (HIP is its copy, reads PYTORCH_HIP_ALLOC_CONF where PYTORCH_CUDA_ALLOC_CONF is not set,
and without virtual memory calls warns "expandable_segments not supported on this platform"); c10/xpu/XPUCachingAllocator.cpp;
torch_npu's NPUCachingAllocator.cpp; aten/src/ATen/mps/MPSAllocator.mm.
"""

from __future__ import annotations

from typing import NamedTuple

from explorer.advice.message import Kind, Message
from explorer.units import pytorch_size


class Backend(NamedTuple):
    """An allocator: its variable, and which of PyTorch's options it heeds."""

    variable: str
    expandable: bool
    split: bool
    words: str
    """What is to be known of it, in a sentence."""


BACKENDS: dict[Kind, Backend] = {
    "cuda": Backend("PYTORCH_CUDA_ALLOC_CONF", True, True, ""),
    "hip": Backend("PYTORCH_HIP_ALLOC_CONF", False, True, "On ROCm most PyTorch releases do not support growing segments, whatever the message suggests."),
    "npu": Backend("PYTORCH_NPU_ALLOC_CONF", True, True, ""),
    "xpu": Backend("PYTORCH_ALLOC_CONF", False, False, "Most PyTorch releases for XPU have no option of the allocator against fragments; torch.xpu.empty_cache() returns what is cached."),
    "mps": Backend("PYTORCH_MPS_HIGH_WATERMARK_RATIO", False, False, "MPS has no option against fragments; torch.mps.empty_cache() returns what is cached."),
}


def backend(message: Message | None) -> Backend:
    """Of a message's device; CUDA's where there is none."""
    return BACKENDS.get(message.kind, BACKENDS["cuda"]) if message is not None else BACKENDS["cuda"]


def remedy(message: Message) -> str:
    """What may let a fragmented request through, with its variable, and how far that goes; by the message alone."""
    return f"{_option(message)} It gives {pytorch_size(message.cached_bytes)} at most, and nothing towards the next larger batch." if message.cached_bytes else _option(message)


def is_old(message: Message) -> bool:
    """Whether the message is of a PyTorch that may be older than expandable_segments (2.1)."""
    return message.form in ("reserved", "cached") and message.kind == "cuda"


def _option(message: Message) -> str:
    of = backend(message)
    if is_old(message):
        return f"max_split_size_mb ({of.variable}) may let it through; expandable_segments, which does so better, needs PyTorch 2.1."
    if of.expandable:
        return f"{of.variable}=expandable_segments:True may let it through."
    if of.split:
        return f"{of.variable}=max_split_size_mb:512 may let it through. {of.words}"
    return of.words
