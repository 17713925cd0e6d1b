"""Whether a real step of a setup can run on this machine, in one sentence where it cannot. No torch: the dashboard's kernel asks it."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from explorer.catalog import Model, find_model, lengths
from explorer.dsconfig import resolve
from explorer.errors import missing_extra
from explorer.measure.client import accelerator
from explorer.setup import Setup
from explorer.units import GiB, human

CPU_PARAMETERS = 250_000_000
"""Largest model the CPU accelerator is asked to train: above it a step takes minutes."""
CPU_WORK = 60e12
"""Parameters × tokens of one micro-batch, likewise: about a minute on two cores."""
CPU_STATE_BYTES = 24
"""Bytes a parameter at the step's peak: weights, gradients, fp32 master and moments, and the step's copies (ZeRO-2, fp32)."""
CPU_TOKEN_BYTES = 1 << 14
"""Bytes a token keeps for the backward of a model that small: an order of magnitude, to refuse what could fill the machine."""


def why_not(setup: Setup) -> str | None:
    """One sentence why a real step of this setup cannot run here; None where it can."""
    here = accelerator()
    if here is None:
        return "a real step needs torch, transformers and deepspeed: pip install 'deepspeed-memory-explorer[probe]'"
    return _why_not_anywhere(setup) or (None if here == "cuda" else _why_not_on_cpu(setup))


def about_parameters(model: Model) -> int:
    """The model's parameters as its tape counted them, else their order of magnitude."""
    return model.parameters or _rough_parameters(model.config)


def _why_not_anywhere(setup: Setup) -> str | None:
    if setup.lora is not None and importlib.util.find_spec("peft") is None:
        return str(missing_extra("lora", "peft"))
    if setup.attention == "flash_attention_2" and not any(importlib.util.find_spec(name) for name in ("flash_attn", "kernels")):
        return "flash_attention_2 needs the package flash-attn, which is not installed here; sdpa keeps as little in memory"
    return None


def _why_not_on_cpu(setup: Setup) -> str | None:
    model = find_model(setup.model)
    at = lengths(setup, model)
    settings = resolve(setup)
    parameters = about_parameters(model)
    if parameters > CPU_PARAMETERS:
        return f"there is no GPU here, and {parameters / 1e6:.0f} million parameters are too many for a step on the CPU (at most {CPU_PARAMETERS / 1e6:.0f} million)"
    tokens = at.micro_batch * ((at.sequence or 0) + (at.target_sequence or 0) + (at.patches or 0) or 1500)
    work = parameters * tokens * settings.gradient_accumulation_steps
    if work > CPU_WORK:
        return f"there is no GPU here, and this step would take minutes on the CPU; try a micro-batch of at most {max(1, int(setup.micro_batch * CPU_WORK / work))}"
    if settings.precision == "fp16":
        return "there is no GPU here, and DeepSpeed's CPU accelerator does not train in fp16; choose bf16 or fp32"
    needed = CPU_STATE_BYTES * parameters + CPU_TOKEN_BYTES * tokens
    free = _available_ram()
    if needed > free // 2:
        return f"there is no GPU here, and the step would need about {human(needed)} of the {human(free)} of host memory that is free"
    return None


def _rough_parameters(config: Mapping[str, Any]) -> int:
    """An order of magnitude for a model that no tape has counted yet: 12 × layers × width², and the vocabulary, of each part."""
    parts = [config, *(config[k] for k in ("text_config", "vision_config") if isinstance(config.get(k), Mapping))]
    total = 0
    for part in parts:
        width = _first(part, "hidden_size", "n_embd", "d_model")
        layers = _first(part, "num_hidden_layers", "n_layer", "num_layers", "encoder_layers")
        total += 12 * layers * width * width + _first(part, "vocab_size") * width
    return total


def _first(config: Mapping[str, Any], *names: str) -> int:
    """The first of these keys that holds a number, else 0."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def _available_ram(root: Path = Path("/")) -> int:
    """Bytes that the machine has free and that this process' control group, a container's say, may still take."""
    free = 8 * GiB
    with contextlib.suppress(OSError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError):  # no version 2 control group, or "max"
        most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]  # given up where memory is short
        free = min(free, max(0, most - used + int(files)))
    return free
