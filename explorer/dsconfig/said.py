"""A job in one line, for people. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from explorer.errors import one_line
from explorer.setup import Setup

_NAMES = {"deepspeed": "ZeRO stage", "fsdp": "FSDP, as ZeRO stage", "ddp": "DDP, as ZeRO stage"}


def described(setup: Setup) -> str:
    """Model, GPUs, batch, precision, stage, and what else moves most memory."""
    section = setup.deepspeed.get("zero_optimization")
    zero = section if isinstance(section, Mapping) else {}
    model = setup.model if isinstance(setup.model, str) else str(setup.model.get("model_type", "a model of its own config"))
    card = f" ({setup.gpu})" if setup.gpu else ""
    said = [one_line(model, 100), f"{setup.world_size} GPU{'s' if setup.world_size > 1 else ''}{card}", f"{_NAMES[setup.method]} {zero.get('stage', 0)}"]
    said.append(f"micro-batch {setup.micro_batch}" + (f" × {setup.sequence:,} tokens" if setup.sequence else ""))
    said += [name for name in ("bf16", "fp16") if _on(setup.deepspeed.get(name), (setup.trainer or {}).get(name))] or ["fp32"]
    if setup.lora is not None:
        said.append(f"LoRA r {setup.lora.get('r', 8)}")
    if setup.gradient_checkpointing is not False:
        said.append("checkpointing")
    for key, words in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        device = zero[key].get("device") if isinstance(zero.get(key), Mapping) else None
        if device not in (None, "none"):
            said.append(f"{words} on {device}")
    return " · ".join(said)


def _on(section: object, argument: object) -> bool:
    enabled = section.get("enabled") if isinstance(section, Mapping) else None
    return enabled is True or enabled in (None, "auto") and argument is True
