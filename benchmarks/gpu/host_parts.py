"""Host memory of a fresh process: imports, each part of CUDA as it is first used, page-locked blocks, a data loader with its workers.

    python -m benchmarks.gpu.host_parts import:torch,context,mm16,sdpa16,ops16,fused,nccl

What is used first pays for what it shares with the others, so orders differ by some tens of MB.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

MiB, GiB = 1 << 20, 1 << 30
_KINDS = {"VmRSS:": "rss", "RssAnon:": "anon", "RssFile:": "file", "RssShmem:": "shmem", "VmHWM:": "most", "VmLck:": "locked", "VmPin:": "pinned"}


def reading(pid: int | str = "self") -> dict[str, int]:
    """Resident bytes of a process by kind (proc_pid_status(5)), and the most it ever had."""
    with open(f"/proc/{pid}/status") as f:
        rows = [line.split() for line in f]
    return {_KINDS[row[0]]: int(row[1]) << 10 for row in rows if row and row[0] in _KINDS}


class Watch:
    """The reading with the highest resident memory, and one for each moment that was marked."""

    def __init__(self) -> None:
        self.before, self.peak, self.marks = reading(), reading(), []
        self.stop = threading.Event()

    def look(self) -> dict[str, int]:
        """Read now."""
        now = reading()
        if now.get("rss", 0) > self.peak.get("rss", 0):
            self.peak = now
        return now

    def mark(self, label: str) -> None:
        """Read now, under a name."""
        self.marks.append((label, self.look()))

    def follow(self) -> None:
        """Read every 10 ms."""
        while not self.stop.wait(0.01):
            self.look()

    def result(self) -> dict[str, Any]:
        """All that was read."""
        return {"before": self.before, "peak": self.peak, "after": self.look(), "marks": self.marks}


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Watch this process meanwhile."""
    watch = Watch()
    thread = threading.Thread(target=watch.follow, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.stop.set()
        thread.join()


# --- parts of CUDA, each with backward


def context(_: Any) -> None:
    """CUDA's context and PyTorch's own start."""
    import torch

    torch.zeros(1, device="cuda")


def product(dtype: Any) -> None:
    """cuBLAS and cuBLASLt."""
    import torch

    x, bias = torch.randn(512, 512, device="cuda", dtype=dtype, requires_grad=True), torch.randn(512, device="cuda", dtype=dtype)
    torch.addmm(bias, x, x).sum().backward()


def attention(dtype: Any) -> None:
    """Fused attention; with fp32, what it falls to."""
    import torch

    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def masked_attention(dtype: Any) -> None:
    """Attention with a mask of its own, which takes the memory-efficient kernel."""
    import torch

    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
    mask = torch.zeros(2, 1, 128, 128, device="cuda", dtype=dtype)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()


def attention_by_hand(dtype: Any) -> None:
    """Two batched products and a softmax, as "eager" does."""
    import torch

    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
    (torch.softmax(q @ q.transpose(-1, -2), -1, dtype=torch.float32).to(dtype) @ q).sum().backward()


def long_embedding(dtype: Any) -> None:
    """More than 3072 tokens: the backward sorts them (ATen/native/cuda/Embedding.cu, `embedding_dense_backward_cuda`)."""
    import torch

    table = torch.randn(1000, 256, device="cuda", dtype=dtype, requires_grad=True)
    torch.nn.functional.embedding(torch.arange(4096, device="cuda") % 1000, table).sum().backward()


def routing(_: Any) -> None:
    """What a mixture of experts asks: top-k, sort, one-hot, cumulative sum, index_add."""
    import torch

    scores = torch.randn(512, 8, device="cuda", requires_grad=True)
    weights, chosen = torch.topk(scores.softmax(-1), 2)
    places = torch.nn.functional.one_hot(chosen, 8).cumsum(0).nonzero()
    order = chosen.flatten().sort().indices
    torch.zeros(512, device="cuda").index_add_(0, order % 512, weights.flatten()[order]).sum().backward()
    places.sum().item()


def convolution(dtype: Any) -> None:
    """A patch embedding."""
    import torch

    x, w = torch.randn(8, 3, 224, 224, device="cuda", dtype=dtype), torch.randn(64, 3, 16, 16, device="cuda", dtype=dtype, requires_grad=True)
    torch.nn.functional.conv2d(x, w, stride=16).sum().backward()


def convolution_1d(dtype: Any) -> None:
    """A speech model's first layers."""
    import torch

    x, w = torch.randn(4, 80, 3000, device="cuda", dtype=dtype), torch.randn(384, 80, 3, device="cuda", dtype=dtype, requires_grad=True)
    torch.nn.functional.conv1d(x, w, padding=1).sum().backward()


def operations(dtype: Any) -> None:
    """PyTorch's own kernels: norm, dropout, GELU, softmax, embedding, cross-entropy."""
    import torch
    from torch.nn import functional

    x, w = torch.randn(64, 1024, device="cuda", dtype=dtype, requires_grad=True), torch.ones(1024, device="cuda", dtype=dtype, requires_grad=True)
    y = functional.softmax(functional.gelu(functional.dropout(functional.layer_norm(x, (1024,), w, w))), -1)
    places = torch.arange(64, device="cuda")
    e = functional.embedding(places, torch.randn(100, 1024, device="cuda", dtype=dtype, requires_grad=True))
    functional.cross_entropy((y + e).float(), places).backward()


def nccl(_: Any) -> None:
    """A process group of one and its first collective."""
    import torch

    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.distributed.all_reduce(torch.ones(1 << 20, device="cuda"))


def nccl_gather(_: Any) -> None:
    """Two more collectives of the same group."""
    import torch

    one = torch.ones(1 << 20, device="cuda")
    torch.distributed.all_gather_into_tensor(torch.empty_like(one), one)
    torch.distributed.reduce_scatter_tensor(torch.empty_like(one), one)


def fused(_: Any) -> None:
    """DeepSpeed's FusedAdam."""
    import torch
    from deepspeed.ops.adam import FusedAdam

    os.environ["TORCH_CUDA_ARCH_LIST"] = ".".join(map(str, torch.cuda.get_device_capability()))
    parameter = torch.nn.Parameter(torch.randn(1 << 20, device="cuda"))
    parameter.grad = torch.randn_like(parameter)
    FusedAdam([parameter]).step()


def cpu_adam(_: Any) -> None:
    """DeepSpeed's CPUAdam on 64 Mi elements: its states, and what its threads hold."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(torch.zeros(64 * MiB))
    parameter.grad = torch.zeros_like(parameter)
    DeepSpeedCPUAdam([parameter]).step()


def foreach(_: Any) -> None:
    """torch's AdamW."""
    import torch

    parameter = torch.nn.Parameter(torch.randn(1 << 20, device="cuda"))
    parameter.grad = torch.randn_like(parameter)
    torch.optim.AdamW([parameter]).step()


def norms(_: Any) -> None:
    """The gradient norm in fp64, and the clipping."""
    import torch

    torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(torch.randn(1 << 20, device="cuda"))], 1.0)
    torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16).double().norm(2).item()


PARTS: dict[str, tuple[Callable[[Any], None], str]] = {
    **{f"{name}{bits}": (part, dtype) for name, part in (("mm", product), ("sdpa", attention), ("masked", masked_attention), ("hand", attention_by_hand), ("embed", long_embedding), ("conv", convolution), ("conv1d", convolution_1d), ("ops", operations))
       for bits, dtype in (("16", "bfloat16"), ("h", "float16"), ("32", "float32"))},
    **{name: (part, "float32") for name, part in (("context", context), ("nccl", nccl), ("nccl2", nccl_gather), ("fused", fused), ("cpu_adam", cpu_adam), ("foreach", foreach), ("norms", norms), ("routing", routing))},
}


def steps(names: list[str]) -> dict[str, Any]:
    """Use the parts in the order given; readings after each."""
    read: list[tuple[str, dict[str, int]]] = [("start", reading())]
    for name in names:
        if name.startswith("import:"):
            importlib.import_module(name.partition(":")[2])
        else:
            import torch

            part, dtype = PARTS[name]
            part(getattr(torch, dtype))
            torch.cuda.synchronize()
        read.append((name, reading()))
    return {"readings": read, "environment": environment()}


def in_a_fork(names: list[str]) -> dict[str, Any]:
    """The same in a fork of a process that has imported everything, as the probe runs a job."""
    from explorer.measure.worker import preload

    preload()
    before, (source, sink) = reading(), os.pipe()
    if not os.fork():
        os.write(sink, json.dumps(steps(names)).encode())
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as pipe:
        return {"parent": before, **json.loads(pipe.read())}


def pinned_statistics() -> dict[str, int]:
    """PyTorch's counters of page-locked blocks, in bytes; none without CUDA."""
    import torch

    return {k: v for k, v in torch.cuda.host_memory_stats().items() if "bytes" in k} if torch.cuda.is_available() else {}


def pinned(sizes: list[int]) -> dict[str, Any]:
    """Tensors of these bytes pinned: what PyTorch counts for each, what becomes resident, and what stays when they are gone."""
    import torch

    context(None)
    rows = []
    for n in sizes:
        before = reading()
        tensor = torch.zeros(n, dtype=torch.uint8).pin_memory()
        rows.append((n, pinned_statistics(), reading()["rss"] - before["rss"]))
        del tensor
    return {"rows": rows, "after": reading(), "environment": environment()}


# --- the Trainer's loader


class _Images:
    """Images in fp32 as an image processor makes them, with a label."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        return {"pixel_values": torch.rand(3, self.size, self.size), "labels": index % 10}


def loader(argument: dict[str, Any]) -> dict[str, Any]:
    """A Trainer on a small ViT takes six steps; what is pinned, what it and its workers hold."""
    import psutil
    from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, image_size=argument["size"], num_labels=10))
    read: list[Any] = []
    page = os.sysconf("SC_PAGE_SIZE")

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            time.sleep(1.0)  # the workers fill their queues
            children = [reading(c.pid) for c in psutil.Process().children(recursive=True)]
            shared = os.statvfs("/dev/shm")
            read.append({"self": reading(), "children": children, "pinned": pinned_statistics(), "shm": (shared.f_blocks - shared.f_bfree) * shared.f_frsize, "page": page})

    arguments = TrainingArguments(output_dir="/tmp/host-loader", max_steps=6, per_device_train_batch_size=argument["batch"], report_to="none", save_strategy="no", **argument["arguments"])
    before = reading()
    Trainer(model=model, args=arguments, train_dataset=_Images(argument["size"]), callbacks=[Look()]).train()
    return {"argument": argument, "before": before, "steps": read, "environment": environment()}


def environment() -> dict[str, str]:
    """What it ran on."""
    import torch

    return {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0)} if torch.cuda.is_available() else {"torch": torch.__version__}


_IMPORTS = ["import:numpy", "import:torch", "import:transformers", "import:transformers.models.auto.modeling_auto", "import:accelerate", "import:transformers.trainer", "import:peft", "import:deepspeed", "import:deepspeed.runtime.engine"]
_TORCH = ["import:torch", "import:deepspeed"]
_ORDERS = {
    "imports": [*_IMPORTS, "context"],
    "imports-deepspeed-first": ["import:torch", "import:deepspeed", "import:transformers", "import:transformers.trainer", "context"],
    "bf16": [*_TORCH, "context", "mm16", "sdpa16", "ops16", "norms", "fused-adam", "nccl", "nccl2", "embed16", "masked16", "hand16", "conv16", "conv1d16", "routing"],
    "fp16": [*_TORCH, "context", "mmh", "sdpah", "opsh", "norms", "fused-adam", "nccl", "nccl2", "embedh", "maskedh", "handh", "convh"],
    "fp32": [*_TORCH, "context", "mm32", "sdpa32", "ops32", "norms", "foreach", "nccl", "nccl2", "embed32", "masked32", "hand32", "conv32", "conv1d32"],
    "nccl-first": [*_TORCH, "context", "nccl", "nccl2", "mm16", "sdpa16", "ops16", "conv16", "foreach"],
    "masked-first": [*_TORCH, "context", "mm16", "masked16", "sdpa16", "embed16", "ops16"],
    "conv-first": [*_TORCH, "context", "conv16", "mm16", "sdpa16", "ops16", "nccl"],
    "conv1d-first": [*_TORCH, "context", "conv1d16", "mm16", "sdpa16", "ops16", "fused-adam"],
    "optimizer-first": [*_TORCH, "context", "fused-adam", "mm16", "sdpa16", "ops16"],
    "cpu_adam": [*_TORCH, "context", "mm16", "sdpa16", "ops16", "cpu_adam", "nccl"],
}
PARTS["fused-adam"] = (fused, "float32")
_LOADERS = {
    "loader-0": {}, "loader-unpinned": {"dataloader_pin_memory": False}, "loader-2": {"dataloader_num_workers": 2}, "loader-4-prefetch-4": {"dataloader_num_workers": 4, "dataloader_prefetch_factor": 4},
    "loader-2-unpinned": {"dataloader_num_workers": 2, "dataloader_pin_memory": False},
}
CASES: dict[str, Any] = {
    **{f"parts-{name}": {"what": "steps", "names": names} for name, names in _ORDERS.items()},
    **{f"fork-{name}": {"what": "fork", "names": [n for n in names if not n.startswith("import:")]} for name, names in _ORDERS.items() if name not in ("imports", "imports-deepspeed-first", "optimizer-first")},
    "pinned-sizes": {"what": "pinned", "sizes": [5, 4096, 100_000, 1 << 20, 3 * MiB, 5 * MiB + 1, 33 * MiB, 65 * MiB, 129 * MiB, 600 * MiB]},
    **{name: {"what": "loader", "size": 384, "batch": 40, "arguments": arguments} for name, arguments in _LOADERS.items()},
}


def run(argument: dict[str, Any]) -> dict[str, Any]:
    """One case, in this process."""
    what = argument["what"]
    if what == "loader":
        return loader(argument)
    return pinned(argument["sizes"]) if what == "pinned" else {"steps": steps, "fork": in_a_fork}[what](argument["names"])


if __name__ == "__main__":
    print(json.dumps(steps(sys.argv[1].split(","))))
