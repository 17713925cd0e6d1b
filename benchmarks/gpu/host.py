"""Resident host memory that each part of CUDA adds to a process: one JSON line for one order of first uses.

    python benchmarks/gpu/host.py mm16,sdpa16,ops16,fused,nccl >> host-h200.jsonl

What is used first pays for what it shares with the others, so orders differ by some tens of MB. `host-h200.jsonl` holds five.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F


def resident() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def product(dtype: torch.dtype) -> None:
    """cuBLAS and cuBLASLt, forward and backward."""
    x, bias = torch.randn(512, 512, device="cuda", dtype=dtype, requires_grad=True), torch.randn(512, device="cuda", dtype=dtype)
    torch.addmm(bias, x, x).sum().backward()


def attention(dtype: torch.dtype) -> None:
    """Fused attention."""
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def convolution(dtype: torch.dtype) -> None:
    """A patch embedding."""
    x, w = torch.randn(8, 3, 224, 224, device="cuda", dtype=dtype), torch.randn(64, 3, 16, 16, device="cuda", dtype=dtype, requires_grad=True)
    F.conv2d(x, w, stride=16).sum().backward()


def operations(dtype: torch.dtype) -> None:
    """PyTorch's own kernels: norm, dropout, GELU, softmax, embedding, cross-entropy."""
    x, w = torch.randn(64, 1024, device="cuda", dtype=dtype, requires_grad=True), torch.ones(1024, device="cuda", dtype=dtype, requires_grad=True)
    y = F.softmax(F.gelu(F.dropout(F.layer_norm(x, (1024,), w, w))), -1)
    places = torch.arange(64, device="cuda")
    e = F.embedding(places, torch.randn(100, 1024, device="cuda", dtype=dtype, requires_grad=True))
    F.cross_entropy((y + e).float(), places).backward()


def nccl(_: torch.dtype) -> None:
    """A process group of one and its first collective."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29500 + os.getpid() % 1000), RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("nccl")
    torch.distributed.all_reduce(torch.ones(1 << 20, device="cuda"))


def fused(_: torch.dtype) -> None:
    """DeepSpeed's FusedAdam."""
    from deepspeed.ops.adam import FusedAdam

    parameter = torch.nn.Parameter(torch.randn(1 << 20, device="cuda"))
    parameter.grad = torch.randn_like(parameter)
    FusedAdam([parameter]).step()


PARTS: dict[str, tuple[Callable[[torch.dtype], None], torch.dtype]] = {
    **{f"{name}{bits}": (part, dtype) for name, part in (("mm", product), ("sdpa", attention), ("conv", convolution), ("ops", operations)) for bits, dtype in ((16, torch.bfloat16), (32, torch.float32))},
    "nccl": (nccl, torch.float32),
    "fused": (fused, torch.float32),
}


def main() -> None:
    """Use the parts in the order given."""
    import deepspeed  # noqa: F401 (what importing it adds is not CUDA's)

    order, adds, before = sys.argv[1].split(","), {}, resident()
    torch.zeros(1, device="cuda")
    for name in ("context", *order):
        if name in PARTS:
            part, dtype = PARTS[name]
            part(dtype)
        torch.cuda.synchronize()
        adds[name], before = resident() - before, resident()
    print(json.dumps({"order": ["context", *order], "adds_bytes": adds, "environment": {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0)}}))


if __name__ == "__main__":
    main()
