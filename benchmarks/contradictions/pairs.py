"""Random jobs and random messages, the same for the same number: what a person may bring to the doctor."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from explorer.advice.message import Message
from explorer.advice.oom import read as read_message
from explorer.catalog import find_card
from explorer.estimator.estimate import estimate
from explorer.setup import Setup
from explorer.units import MiB, pytorch_size

MODELS = {"gpt2-large": (1024, 64), "google-bert/bert-base-uncased": (512, 512), "meta-llama/Llama-3.2-1B": (4096, 32), "meta-llama/Llama-2-7b-hf": (4096, 8), "Qwen/Qwen2.5-7B": (4096, 8)}
"""Models whose tapes ship, with the longest sequence and the largest micro-batch that are drawn."""
CARDS = ("A100-80GB", "A100-40GB", "RTX 4090", "V100-32GB", "L40S", "H100-80GB")
JOBS = 150
"""Different jobs: pair n has job n % JOBS."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A job and what is pasted beside it."""

    number: int
    setup: Setup
    text: str
    message: Message


def pair(number: int) -> Pair:
    """The pair of a number."""
    rng = random.Random(f"contradictions {number}")
    setup = job(number % JOBS)
    text = rng.choice(_FORMS)(rng, setup)
    return Pair(number, setup, text, read_message(text))


def job(number: int) -> Setup:
    """The job of a number."""
    rng = random.Random(f"job {number}")
    model, (longest, most) = rng.choice([*MODELS.items()])
    card = rng.choice(CARDS)
    zero: dict = {"stage": rng.choice((0, 1, 2, 2, 3, 3))}
    if zero["stage"] and rng.random() < 0.35:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": rng.random() < 0.5}
    if zero["stage"] == 3 and rng.random() < 0.3:
        zero["offload_param"] = {"device": "cpu"}
    if rng.random() < 0.3:
        zero["reduce_bucket_size"] = rng.choice((50_000_000, 200_000_000, 1_000_000_000))
    allocator = rng.choice(({}, {}, {}, {"expandable_segments": True}, {"max_split_size_mb": 128}))
    return Setup(
        model=model, micro_batch=min(most, 1 << rng.randrange(7)), sequence=min(longest, 128 << rng.randrange(6)), gpu=card,
        world_size=rng.choice((1, 2, 8, 8, 16)), host_ram_gib=rng.choice((None, 60, 120, 250, 1000)), allocator=allocator,
        gradient_checkpointing=rng.random() < 0.4, deepspeed={"fp16" if card.startswith("V100") else "bf16": {"enabled": True}, "zero_optimization": zero},
    )


# --- messages

Form = Callable[[random.Random, Setup], str]


def _gib(n_bytes: float) -> str:
    return pytorch_size(max(0, int(n_bytes)))


def _state(rng: random.Random, setup: Setup) -> tuple[int, int, int, int, int]:
    """(capacity, reserved, allocated, free, requested) in bytes, which go together; on the job's card mostly."""
    name = setup.gpu if rng.random() < 0.8 else rng.choice(CARDS)
    capacity = find_card(name).total_bytes
    free = int(capacity * rng.choice((0.0005, 0.002, 0.01, 0.05, 0.2, 0.6)))
    reserved = capacity - free - rng.choice((300, 600, 1500)) * MiB
    cached = int(reserved * rng.choice((0.002, 0.01, 0.04, 0.1, 0.3)))
    requested = 2 * MiB * rng.choice((1, 10, 16, 64, 200, 500, 1200, 4000, 16000, 50000))
    return capacity, reserved, reserved - cached, free, requested


def _in_use(rng: random.Random, setup: Setup, name: str = "CUDA") -> str:
    """PyTorch 2.1 and later."""
    capacity, reserved, allocated, free, requested = _state(rng, setup)
    others = ""
    if rng.random() < 0.2:
        other = int(reserved * rng.choice((0.05, 0.4)))
        reserved, allocated, others = reserved - other, max(0, allocated - other), f"Process {rng.randrange(1, 99999)} has {_gib(other)} memory in use. "
    limit = f"{_gib(reserved * 1.01)} allowed; " if rng.random() < 0.1 else ""
    process = f"{others}Including non-PyTorch memory, this process has {_gib(capacity - free - (other if others else 0))} memory in use. "
    return (
        f"torch.OutOfMemoryError: {name} out of memory. Tried to allocate {_gib(requested)}. GPU {rng.choice((0, 0, 3, 7))} has a total capacity of {_gib(capacity)} of which {_gib(free)} is free. "
        f"{process}{limit}Of the allocated memory {_gib(allocated)} is allocated by PyTorch, and {_gib(reserved - allocated)} is reserved by PyTorch but unallocated. "
        f"If reserved but unallocated memory is large try setting PYTORCH_{name}_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def _hip(rng: random.Random, setup: Setup) -> str:
    return _in_use(rng, setup, "HIP")


def _reserved(rng: random.Random, setup: Setup) -> str:
    """PyTorch 1.4 to 2.0."""
    capacity, reserved, allocated, free, requested = _state(rng, setup)
    return (
        f"CUDA out of memory. Tried to allocate {_gib(requested)} (GPU {rng.choice((0, 2))}; {_gib(capacity)} total capacity; {_gib(allocated)} already allocated; {_gib(free)} free; "
        f"{_gib(reserved)} reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
    )


def _own(rng: random.Random, setup: Setup) -> str:
    """What the estimate of this job, or of one with one thing changed, says that PyTorch prints."""
    changed = rng.choice((setup, setup.replace(world_size=1), setup.replace(gradient_checkpointing=False), setup.replace(sequence=setup.sequence * 2 if setup.sequence < 1024 else setup.sequence)))
    try:
        failure = estimate(changed, largest=False).verdict.failure
    except ValueError:
        failure = None
    return failure.text if failure is not None else _in_use(rng, setup)


def _late(rng: random.Random, setup: Setup) -> str:
    """A step among thousands."""
    step = rng.randrange(100, 5000)
    return f"{{'loss': 1.8, 'epoch': 0.12}}\n {step * 100 // 16700}%|#         | {step}/16700 [1:02:11<4:20:00,  1.15s/it]\n{_in_use(rng, setup)}"


_FRAMES = (
    '  File "torch/nn/functional.py", line 3104, in cross_entropy\n    return torch._C._nn.cross_entropy_loss(input, target)\n',
    '  File "transformers/models/llama/modeling_llama.py", line 220, in eager_attention_forward\n    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32)\n',
    '  File "deepspeed/runtime/zero/partition_parameters.py", line 1143, in all_gather_coalesced\n    flat_tensor = torch.empty(partition_sz * world_size)\n',
    '  File "deepspeed/runtime/zero/stage_1_and_2.py", line 1890, in step\n    self._optimizer_step(i)\n',
    '  File "transformers/trainer.py", line 4100, in evaluation_loop\n    logits = self.accelerator.pad_across_processes(logits)\n',
    '  File "transformers/trainer.py", line 2800, in _save_checkpoint\n    self.save_model(output_dir)\n',
    '  File "torch/nn/modules/linear.py", line 125, in forward\n    return F.linear(input, self.weight, self.bias)\n',
)


def _framed(rng: random.Random, setup: Setup) -> str:
    """With the innermost frames of a traceback."""
    return f"Traceback (most recent call last):\n{rng.choice(_FRAMES)}{_in_use(rng, setup)}"


def _odd(rng: random.Random, setup: Setup) -> str:
    """Numbers that do not go together."""
    capacity, reserved, allocated, free, requested = (size * rng.choice((1, 1, 1, 0.3, 3)) for size in _state(rng, setup))
    return f"CUDA out of memory. Tried to allocate {_gib(requested)} (GPU 0; {_gib(capacity)} total capacity; {_gib(allocated)} already allocated; {_gib(free)} free; {_gib(reserved)} reserved in total by PyTorch)"


def _host(rng: random.Random, setup: Setup) -> str:
    used, percent = rng.choice(((200.5, 84.6), (112.3, 93.1), (480.0, 97.0)))
    lines = [f"[INFO] [utils.py:793:see_memory_usage] CPU Virtual Memory:  used = {used} GB, percent = {percent}%"] if rng.random() < 0.5 else []
    lines += ['Loading checkpoint shards:  50%|#####     | 1/2 [00:10<00:10, 10.2s/it]'] if rng.random() < 0.5 else []
    return "\n".join([*lines, "[INFO] [launch.py:316:sigkill_handler] Killing subprocess 4021", "[ERROR] [launch.py:322:sigkill_handler] exits with return code = -9"])


_PLAIN = (
    "RuntimeError: CUDA error: out of memory", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 13421772800 bytes.",
    "RuntimeError: Failed to CUDA calloc async 4 bytes (NCCL)", "RuntimeError: cudaHostAlloc failed: out of memory (pin_memory)", "ValueError: loss is nan", "",
    "RuntimeError: DataLoader worker (pid 4) is killed by signal: Bus error. insufficient shared memory (shm)", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x1024 and 768x768)",
    "[WARNING] 3 pytorch allocator cache flushes since last step. this happens when there is high memory pressure",
)


def _unsized(rng: random.Random, setup: Setup) -> str:
    return rng.choice(_PLAIN)


_FORMS: tuple[Form, ...] = (_in_use, _in_use, _reserved, _reserved, _own, _own, _hip, _late, _framed, _framed, _odd, _host, _unsized)
