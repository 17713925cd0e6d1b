"""What CUDA kernels allocate that a recording on the meta device cannot see: the measurements behind `estimator/standins.py`.

    python benchmarks/gpu/kernels.py OUT.jsonl

Each line: an operation, which ATen kernel ran, and every block it asked of PyTorch's allocator in forward and in backward
(positive: allocated, negative: freed; bytes as requested), in order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

ATTENTION = ("_scaled_dot_product", "_flash", "_efficient", "_cudnn")


class Names(TorchDispatchMode):
    """The ATen operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def traced(work: Callable[[], object]) -> tuple[list[int], list[str], object]:
    """Allocations and frees during `work`, and its operations."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=100000)
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    with Names() as names:
        result = work()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    sizes = [t["size"] if t["action"] == "alloc" else -t["size"] for t in trace if t["action"] in ("alloc", "free_requested")]
    return sizes, names.names, result


def measure(name: str, make: Callable[[], tuple[Callable[[], torch.Tensor], list[torch.Tensor]]], out) -> None:
    """Run one operation forward and backward, twice (the first warms kernels up), and write its line."""
    row = {"operation": name}
    try:
        for _ in range(2):
            forward, leaves = make()
            sizes, names, result = traced(forward)
            gradient = torch.ones_like(result)
            row["forward"], row["forward_ops"] = sizes, sorted({n for n in names if any(a in n for a in ATTENTION)}) or names[:8]
            sizes, names, _ = traced(partial(result.backward, gradient))
            row["backward"], row["backward_ops"] = sizes, sorted({n for n in names if any(a in n for a in ATTENTION)}) or names[:8]
            del result, gradient, leaves, forward
    except Exception as error:  # a kernel this card or version lacks is a finding too
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    out.write(json.dumps(row) + "\n")
    out.flush()


def attention(dtype, b, h, hkv, s, d, causal=False, mask=None, dropout=0.0, layout="bshd", skv=None):
    def make():
        skv_ = skv or s
        q = torch.randn(b, s, h, d, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        k, v = (torch.randn(b, skv_, hkv, d, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(2))
        m = None
        if mask == "bool":
            m = torch.ones(b, 1, s, skv_, dtype=torch.bool, device="cuda")
            m[:, :, :, -1] = False
        elif mask == "float":
            m = torch.zeros(b, 1, s, skv_, dtype=dtype, device="cuda")
        elif mask == "bias":
            m = torch.zeros(1, h, s, skv_, dtype=dtype, device="cuda").requires_grad_()
        gqa = {"enable_gqa": True} if hkv != h else {}
        return (lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=m, dropout_p=dropout, is_causal=causal, **gqa)), [q, k, v]

    return make


def forced(backend: str, make):
    """An attention case with the kernel that other cards would pick."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def wrapped():
        forward, leaves = make()

        def run():
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return forward()

        return run, leaves

    return wrapped


def module(build, shape, dtype, integer=None):
    def make():
        layer = build().to("cuda", dtype)
        x = torch.randint(0, integer, shape, device="cuda") if integer else torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
        return (lambda: layer(x)), [x, *layer.parameters()]

    return make


def main(path: str) -> None:
    """Measure every operation and write the lines to `path`."""
    half, full = torch.float16, torch.float32
    bf = torch.bfloat16
    cases = {}
    for dtype, n in ((bf, "bf16"), (half, "fp16"), (full, "fp32")):
        for causal in (False, True):
            cases[f"sdpa {n} b4 h16 s512 d64 causal={causal}"] = attention(dtype, 4, 16, 16, 512, 64, causal)
        cases[f"sdpa {n} b4 h16 s257 d64"] = attention(dtype, 4, 16, 16, 257, 64)
        cases[f"sdpa {n} b4 h16 s512 d128 causal"] = attention(dtype, 4, 16, 16, 512, 128, True)
        cases[f"sdpa {n} b4 h32/8 s512 d64 gqa causal"] = attention(dtype, 4, 32, 8, 512, 64, True)
        cases[f"sdpa {n} b4 h32/8 s512 d128 gqa causal"] = attention(dtype, 4, 32, 8, 512, 128, True)
        cases[f"sdpa {n} b4 h16 s512 d64 dropout causal"] = attention(dtype, 4, 16, 16, 512, 64, True, dropout=0.1)
        cases[f"sdpa {n} b4 h16 s512 d64 bool mask"] = attention(dtype, 4, 16, 16, 512, 64, mask="bool")
        cases[f"sdpa {n} b4 h16 s500 d64 bool mask"] = attention(dtype, 4, 16, 16, 500, 64, mask="bool")
        cases[f"sdpa {n} b4 h16 s512 d64 float mask"] = attention(dtype, 4, 16, 16, 512, 64, mask="float")
        cases[f"sdpa {n} b4 h12 s512 d64 bias grad"] = attention(dtype, 4, 12, 12, 512, 64, mask="bias")
        cases[f"sdpa {n} b4 h16 s448 k1500 d64 cross"] = attention(dtype, 4, 16, 16, 448, 64, skv=1500)
        cases[f"sdpa {n} b4 h16 s77 d72"] = attention(dtype, 4, 16, 16, 77, 72)
        cases[f"sdpa {n} b4 h8/4 s512 d256 gqa causal"] = attention(dtype, 4, 8, 4, 512, 256, True)
        for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
            for heads, dim in ((16, 64), (32, 64), (16, 128), (16, 72), (8, 256)):
                for grouped in (False, True):
                    kv = heads // 4 if grouped else heads
                    cases[f"{backend} {n} b4 h{heads}/{kv} s500 d{dim} causal"] = forced(backend, attention(dtype, 4, heads, kv, 500, dim, True))
            cases[f"{backend} {n} b4 h16 s512 d64 bool mask"] = forced(backend, attention(dtype, 4, 16, 16, 512, 64, mask="bool"))
        cases[f"conv2d patch14 {n} b64"] = module(lambda: torch.nn.Conv2d(3, 1024, 14, 14, bias=False), (64, 3, 224, 224), dtype)
        cases[f"conv2d patch16 {n} b16"] = module(lambda: torch.nn.Conv2d(3, 768, 16, 16), (16, 3, 224, 224), dtype)
        cases[f"conv1d whisper1 {n} b8"] = module(lambda: torch.nn.Conv1d(80, 768, 3, padding=1), (8, 80, 3000), dtype)
        cases[f"conv1d whisper2 {n} b8"] = module(lambda: torch.nn.Conv1d(768, 768, 3, stride=2, padding=1), (8, 768, 3000), dtype)
        cases[f"linear bias {n}"] = module(lambda: torch.nn.Linear(1024, 4096), (8, 257, 1024), dtype)
        cases[f"linear {n}"] = module(lambda: torch.nn.Linear(2048, 8192, bias=False), (4, 512, 2048), dtype)
        cases[f"layernorm {n}"] = module(lambda: torch.nn.LayerNorm(1024), (8, 257, 1024), dtype)
        cases[f"dropout {n}"] = module(lambda: torch.nn.Dropout(0.1), (8, 512, 1024), dtype)
        for tokens, vocab, width in ((512, 50257, 768), (4096, 50257, 768), (4096, 128256, 2048), (32768, 50257, 768)):
            cases[f"embedding {n} tokens{tokens} vocab{vocab} width{width}"] = module(lambda v=vocab, w=width: torch.nn.Embedding(v, w), (1, tokens), dtype, vocab)
        cases[f"embedding positions {n} b4 s512 table1024 width768"] = module(lambda: torch.nn.Embedding(1024, 768), (1, 512), dtype, 1024)
        def softmax(dtype=dtype):
            x = torch.randn(4, 16, 512, 512, device="cuda", dtype=dtype, requires_grad=True)
            return (lambda: F.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)), [x]
        cases[f"softmax to fp32 {n}"] = softmax
        def loss(dtype=dtype):
            x = torch.randn(2048, 50257, device="cuda", dtype=dtype, requires_grad=True)
            y = torch.randint(0, 50257, (2048,), device="cuda")
            return (lambda: F.cross_entropy(x.float(), y)), [x, y]
        cases[f"cross entropy {n}"] = loss
        def pow_mean(dtype=dtype):
            x = torch.randn(4, 512, 2048, device="cuda", dtype=dtype, requires_grad=True)
            return (lambda: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)), [x]
        cases[f"rms {n}"] = pow_mean
        def grouped(dtype=dtype):
            x = torch.randn(2048, 1024, device="cuda", dtype=dtype, requires_grad=True)
            w = torch.randn(8, 1024, 3584, device="cuda", dtype=dtype, requires_grad=True)
            offs = torch.arange(256, 2049, 256, device="cuda", dtype=torch.int32)
            return (lambda: torch._grouped_mm(x, w, offs=offs)), [x, w]
        cases[f"grouped_mm {n}"] = grouped
        def norm(dtype=dtype):
            x = torch.randn(1 << 22, device="cuda", dtype=dtype, requires_grad=True)
            return (lambda: torch.linalg.vector_norm(x.double())), [x]
        cases[f"norm fp64 {n}"] = norm
    with open(path, "a") as out:
        for name, make in cases.items():
            measure(name, make, out)
        used = {}
        free, total = torch.cuda.mem_get_info()
        out.write(json.dumps({"operation": "device", "name": torch.cuda.get_device_name(), "total": total, "used": total - free, "reserved": torch.cuda.memory_reserved(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), **used}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
