"""Fill the batch keys and the "auto" values of a DeepSpeed config, as the Trainer's arguments give them.

The full resolution, key by key as transformers and accelerate do it, grows here with the doctor; this covers what moves memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from explorer.catalog import find_model
from explorer.dsconfig.keys import read_count
from explorer.errors import BadInput
from explorer.setup import Setup


def fill_auto(setup: Setup) -> tuple[dict[str, Any], list[str]]:
    """The config `deepspeed.initialize` would be given, and what was assumed on the way."""
    config = json.loads(json.dumps(setup.deepspeed, default=dict))
    trainer = setup.trainer or {}
    notes: list[str] = []
    _fill_batch(config, setup, trainer)
    _fill_precision(config, trainer, notes)
    _fill_optimizer(config, trainer)
    if config.get("gradient_clipping") == "auto":
        config["gradient_clipping"] = trainer.get("max_grad_norm", 1.0)
    zero = config.setdefault("zero_optimization", {})
    if isinstance(zero, Mapping):
        _fill_buckets(zero, setup, notes)
    scheduler = config.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, Mapping) else None
    if isinstance(params, Mapping) and "auto" in params.values():
        del config["scheduler"]
    return config, notes


def _fill_batch(config: dict[str, Any], setup: Setup, trainer: Mapping[str, Any]) -> None:
    micro, steps, total = (_written(config, key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"))
    if micro == "auto":
        config["train_micro_batch_size_per_gpu"] = setup.micro_batch
    elif read_count(micro, "deepspeed.train_micro_batch_size_per_gpu") != setup.micro_batch:
        raise BadInput("micro_batch", f"is {setup.micro_batch} but deepspeed.train_micro_batch_size_per_gpu is {micro}; make them equal or leave one out")
    asked = trainer.get("per_device_train_batch_size", setup.micro_batch)
    if asked != setup.micro_batch:
        raise BadInput("micro_batch", f"is {setup.micro_batch} but trainer.per_device_train_batch_size is {asked}; make them equal or leave the latter out")
    per_step = setup.micro_batch * setup.world_size
    if steps == "auto":
        steps = trainer.get("gradient_accumulation_steps", 1)
        if total != "auto" and "gradient_accumulation_steps" not in trainer:
            total_count = read_count(total, "deepspeed.train_batch_size")
            if total_count % per_step:
                raise BadInput("deepspeed.train_batch_size", f"is {total}, which micro_batch × world_size = {per_step} does not divide")
            steps = total_count // per_step
    config["gradient_accumulation_steps"] = steps = read_count(steps, "deepspeed.gradient_accumulation_steps")
    if total != "auto" and read_count(total, "deepspeed.train_batch_size") != per_step * steps:
        raise BadInput("deepspeed.train_batch_size", f"is {total} but micro_batch × gradient_accumulation_steps × world_size is {setup.micro_batch} × {steps} × {setup.world_size} = {per_step * steps}; make them agree or set it to \"auto\"")
    config["train_batch_size"] = per_step * steps


def _written(config: Mapping[str, Any], key: str) -> Any:
    """A batch key; null is as good as absent, as in DeepSpeed (runtime/config.py, `get_scalar_param`)."""
    value = config.get(key)
    return "auto" if value is None else value


def _fill_precision(config: dict[str, Any], trainer: Mapping[str, Any], notes: list[str]) -> None:
    for name in ("fp16", "bf16"):
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled") == "auto":
            section["enabled"] = bool(trainer.get(name, False))
            if name not in trainer:
                notes.append(f"{name}.enabled is \"auto\" and no trainer part sets {name}: taken as off")
        elif section is None and trainer.get(name):
            config[name] = {"enabled": True}


def _fill_optimizer(config: dict[str, Any], trainer: Mapping[str, Any]) -> None:
    section = config.get("optimizer")
    params = section.get("params") if isinstance(section, Mapping) else None
    if not isinstance(params, dict):
        return
    values = {
        "lr": trainer.get("learning_rate", 5e-5),
        "betas": [trainer.get("adam_beta1", 0.9), trainer.get("adam_beta2", 0.999)],
        "eps": trainer.get("adam_epsilon", 1e-8),
        "weight_decay": trainer.get("weight_decay", 0.0),
    }
    for key, value in params.items():
        if value == "auto":
            if key not in values:
                raise BadInput(f"deepspeed.optimizer.params.{key}", "is \"auto\", which nothing fills; give a value")
            params[key] = values[key]


def _fill_buckets(zero: dict[str, Any], setup: Setup, notes: list[str]) -> None:
    """The three sizes the Trainer derives from the hidden size h: h², 0.9 h² and 10 h (transformers/integrations/deepspeed.py)."""
    sizes = {"reduce_bucket_size": lambda h: h * h, "stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h), "stage3_param_persistence_threshold": lambda h: 10 * h}
    wanted = [key for key in sizes if zero.get(key) == "auto"]
    if not wanted:
        return
    if setup.trainer is None:
        notes.append(f"{', '.join(wanted)}: \"auto\" without the Trainer is DeepSpeed's default")
        return
    hidden = find_model(setup.model).hidden_size
    if hidden is None:
        raise BadInput(f"deepspeed.zero_optimization.{wanted[0]}", "is \"auto\", but the model's config has neither hidden_size nor hidden_sizes for the Trainer to fill it from; give a number")
    for key in wanted:
        zero[key] = sizes[key](hidden)
