"""What a class or a tool takes where the text is silent, put into a job's fields and told. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from explorer.catalog import catalog_name, find_model
from explorer.dsconfig.findings import Finding


def fill(name: str, whose: str, missing: Mapping[str, Any], changes: dict[str, Any]) -> Finding | None:
    """The defaults of `name` put into a job's fields, and told. `whose`: the tool, and its release where that is known.

    `missing`: `sequence`, `lora`, `total` (samples of a step, which the accumulation makes up) or arguments of the Trainer.
    A config that enables fp16 is taken at its word: with bf16 beside it nothing would run.
    """
    trainer, fp16 = changes.setdefault("trainer", {}), changes.get("deepspeed", {}).get("fp16")
    said: list[str] = []
    for key, value in missing.items():
        if key == "sequence":
            if "sequence" not in changes:
                changes["sequence"] = _within(changes.get("model"), value)
                said.append(f"cuts samples at {changes['sequence']:,} tokens")
        elif key == "lora":
            if "lora" not in changes:
                changes["lora"] = dict(value)
                said.append(f"trains LoRA of rank {value['r']} on every linear layer")
        elif key == "total":
            _accumulate(value, changes, said)
        elif key in trainer:
            continue
        elif key == "bf16":
            if not trainer.get("fp16") and not (isinstance(fp16, Mapping) and fp16.get("enabled") is True):
                trainer["bf16"] = True
                said.append("computes in bf16")
        else:
            said.append(_take(key, value, trainer))
    listed = f"{', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else "".join(said)
    return Finding(id="trl-defaults" if whose.startswith("TRL") else "tool-defaults", key=name, text=f"{listed} where nothing else is said, as {whose} has it: taken so") if said else None


def _take(key: str, value: Any, trainer: dict[str, Any]) -> str:
    if key == "gradient_checkpointing":
        trainer[key] = True
        if isinstance(value, Mapping):
            trainer.setdefault("gradient_checkpointing_kwargs", dict(value))
        return "turns gradient checkpointing on"
    trainer[key] = value
    if key == "per_device_train_batch_size":
        return f"takes {value} sample{'s' if value > 1 else ''} per GPU"
    return f"takes {value:g} for {key}"


def _accumulate(total: int, changes: dict[str, Any], said: list[str]) -> None:
    trainer = changes["trainer"]
    batch, gpus = trainer.get("per_device_train_batch_size"), changes.get("world_size", 1)
    if "gradient_accumulation_steps" not in trainer and all(isinstance(n, int) and n > 0 for n in (batch, gpus)):
        trainer["gradient_accumulation_steps"] = max(1, math.ceil(total / batch / gpus))
        said.append(f"accumulates {trainer['gradient_accumulation_steps']} micro-batches")


def _within(model: Any, tokens: int) -> int:
    """No more than the catalog's model has positions for."""
    known = catalog_name(model) if isinstance(model, str) else None
    limit = None if known is None else find_model(known).sequence_limit
    return tokens if limit is None else min(tokens, limit)
