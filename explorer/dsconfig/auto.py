"""Fill the batch keys and the "auto" values of a DeepSpeed config, as the Trainer's arguments give them.

The full resolution, key by key as transformers and accelerate do it, grows here with the doctor; this covers what moves memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from explorer.catalog import find_model
from explorer.dsconfig.arguments import trainers_value
from explorer.dsconfig.keys import read_bool, read_count
from explorer.errors import BadInput, shown
from explorer.setup import Setup

FORMULAS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size", "gradient_accumulation_steps": "gradient_accumulation_steps", "train_batch_size": "samples a GPU × accumulation × GPUs",
    "gradient_clipping": "max_grad_norm", "fp16.enabled": "fp16 or fp16_full_eval", "bf16.enabled": "bf16 or bf16_full_eval",
    "optimizer.params.lr": "learning_rate", "optimizer.params.betas": "adam_beta1, adam_beta2", "optimizer.params.eps": "adam_epsilon", "optimizer.params.weight_decay": "weight_decay",
    "zero_optimization.reduce_bucket_size": "hidden_size²", "zero_optimization.stage3_prefetch_bucket_size": "0.9 × hidden_size²", "zero_optimization.stage3_param_persistence_threshold": "10 × hidden_size",
    "zero_optimization.stage": "accelerate's default", "zero_optimization.stage3_gather_16bit_weights_on_model_save": "accelerate's default",
}
"""Key → what fills its "auto" (transformers/integrations/deepspeed.py, `HfTrainerDeepSpeedConfig`; accelerate/utils/dataclasses.py, `DeepSpeedPlugin`)."""


def fill_auto(setup: Setup) -> tuple[dict[str, Any], list[str]]:
    """The config `deepspeed.initialize` would be given, and what was assumed on the way."""
    config = json.loads(json.dumps(setup.deepspeed))
    trainer = setup.trainer or {}
    notes: list[str] = []
    config["zero_optimization"] = _zero_section(config, setup, notes)
    _fill_batch(config, setup, trainer)
    _fill_precision(config, setup, notes)
    _fill_optimizer(config, trainer)
    if config.get("gradient_clipping") == "auto":
        config["gradient_clipping"] = trainer.get("max_grad_norm", 1.0)
        if setup.trainer is None:
            notes.append("gradient_clipping: \"auto\" without the Trainer is taken as DeepSpeed's default")
    _fill_zero(config["zero_optimization"], setup, notes)
    _fill_scheduler(config)
    if setup.trainer is not None:
        _refuse_auto(config, "deepspeed")
    return config, notes


def _zero_section(config: Mapping[str, Any], setup: Setup, notes: list[str]) -> dict[str, Any]:
    section = config.get("zero_optimization", {})
    if isinstance(section, bool) and setup.trainer is None:
        notes.append(f"zero_optimization: {shown(section)} is an old form, which DeepSpeed reads as stage {int(section)}")
        return {"stage": int(section)}
    if not isinstance(section, dict):
        raise BadInput("deepspeed.zero_optimization", f"is {shown(section)}; give an object such as {{\"stage\": 2}}" + ("" if setup.trainer is not None else ", or leave it out"))
    return section


def _fill_batch(config: dict[str, Any], setup: Setup, trainer: Mapping[str, Any]) -> None:
    micro, steps, total = (_written(config, key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"))
    asked = trainer.get("per_device_train_batch_size", setup.micro_batch)
    if asked != setup.micro_batch:
        raise BadInput("micro_batch", f"is {setup.micro_batch} but trainer.per_device_train_batch_size is {asked}; make them equal or leave the latter out")
    if micro == "auto":
        config["train_micro_batch_size_per_gpu"] = setup.micro_batch
    elif read_count(micro, "deepspeed.train_micro_batch_size_per_gpu") != setup.micro_batch:
        raise BadInput("micro_batch", f"is {setup.micro_batch} but deepspeed.train_micro_batch_size_per_gpu is {micro}; make them equal or leave one out")
    ranks = _data_parallel_ranks(config, setup)
    per_step = setup.micro_batch * ranks
    if steps == "auto":
        steps = trainer.get("gradient_accumulation_steps", 1)
        if total != "auto" and "gradient_accumulation_steps" not in trainer:
            total_count = read_count(total, "deepspeed.train_batch_size")
            if total_count % per_step:
                raise BadInput("deepspeed.train_batch_size", f"is {total}, which micro_batch × {ranks} data-parallel GPUs = {per_step} does not divide")
            steps = total_count // per_step
    config["gradient_accumulation_steps"] = steps = read_count(steps, "deepspeed.gradient_accumulation_steps")
    if trainer.get("gradient_accumulation_steps", steps) != steps:
        raise BadInput("deepspeed.gradient_accumulation_steps", f"is {steps} but trainer.gradient_accumulation_steps is {trainer['gradient_accumulation_steps']}; make them equal, or set the former to \"auto\"")
    if total != "auto" and read_count(total, "deepspeed.train_batch_size") != per_step * steps:
        raise BadInput("deepspeed.train_batch_size", f"is {total} but micro_batch × gradient_accumulation_steps × data-parallel GPUs is {setup.micro_batch} × {steps} × {ranks} = {per_step * steps}; make them agree or set it to \"auto\"")
    config["train_batch_size"] = per_step * steps


def _data_parallel_ranks(config: Mapping[str, Any], setup: Setup) -> int:
    """GPUs that DeepSpeed counts with samples of their own: those that share a sequence see the same ones (runtime/config.py, `DeepSpeedConfig.__init__`)."""
    together = config.get("sequence_parallel_size", 1)
    if setup.data_ranks % together:
        name = "world_size" if setup.data_parallel_size is None else "data_parallel_size"
        raise BadInput(name, f"is {setup.data_ranks}, which is no multiple of deepspeed.sequence_parallel_size, {together}; give a multiple of it")
    return setup.data_ranks // together


def _written(config: Mapping[str, Any], key: str) -> Any:
    """A batch key; null is as good as absent, as in DeepSpeed (runtime/config.py, `get_scalar_param`)."""
    value = config.get(key)
    return "auto" if value is None else value


def _fill_precision(config: dict[str, Any], setup: Setup, notes: list[str]) -> None:
    """fp16 and bf16, which the Trainer wants to find the same in its arguments (`trainer_config_process`)."""
    trainer = setup.trainer or {}
    for name in ("fp16", "bf16"):
        section, asked = config.get(name), bool(trainer.get(name) or trainer.get(f"{name}_full_eval"))
        said = name in trainer or f"{name}_full_eval" in trainer
        if section is None and asked:
            config[name] = {"enabled": True}
        elif isinstance(section, dict) and section.get("enabled") == "auto":
            section["enabled"] = asked
            if not said and not any(trainer.get(key) for key in ("fp16", "bf16")):
                notes.append(f"{name}.enabled is \"auto\" and no trainer part sets {name}: taken as off")
        elif isinstance(section, dict) and setup.trainer is not None and "enabled" in section:
            enabled = read_bool(section["enabled"], f"deepspeed.{name}.enabled")
            if said and enabled != asked:
                raise BadInput(f"deepspeed.{name}.enabled", f"is {shown(enabled)} but trainer.{name} is {shown(asked)}, which the Trainer refuses; make them agree, or set the former to \"auto\"")
            if enabled and not said:
                notes.append(f"{name}.enabled is true and no trainer part sets {name}, which the Trainer refuses: set trainer.{name} too; answered as if it were there")
    if setup.trainer is not None and "bfloat16" in config:
        raise BadInput("deepspeed.bfloat16", "is an old name, which accelerate passes over; write \"bf16\"")


def _fill_optimizer(config: dict[str, Any], trainer: Mapping[str, Any]) -> None:
    section = config.get("optimizer")
    params = section.get("params") if isinstance(section, dict) else None
    if not isinstance(params, dict):
        return
    for key, value in params.items():
        if value == "auto":
            try:
                params[key] = trainers_value(key, trainer)
            except KeyError:
                raise BadInput(f"deepspeed.optimizer.params.{key}", "is \"auto\", which nothing fills; give a value") from None


def _fill_zero(zero: dict[str, Any], setup: Setup, notes: list[str]) -> None:
    """What accelerate fills of `zero_optimization` (accelerate/utils/dataclasses.py, `DeepSpeedPlugin`); without the Trainer DeepSpeed takes "auto" for its default."""
    left = [key for key, value in zero.items() if value == "auto"]
    if setup.trainer is None:
        if left:
            notes.append(f"{', '.join(left)}: \"auto\" without the Trainer is DeepSpeed's default")
        return
    if zero.get("stage") == "auto":
        zero["stage"] = 2
        notes.append("zero_optimization.stage: \"auto\" is 2, which accelerate takes unless ACCELERATE_DEEPSPEED_ZERO_STAGE says otherwise")
    if zero.get("stage3_gather_16bit_weights_on_model_save") == "auto":
        zero["stage3_gather_16bit_weights_on_model_save"] = False
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name)
        for key in ("device", "nvme_path"):
            if isinstance(section, dict) and section.get(key) == "auto":
                section[key] = "none"
    _fill_buckets(zero, setup)


def _fill_buckets(zero: dict[str, Any], setup: Setup) -> None:
    """The three sizes the Trainer derives from the hidden size h: h², 0.9 h² and 10 h (transformers/integrations/deepspeed.py)."""
    sizes = {"reduce_bucket_size": lambda h: h * h, "stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h), "stage3_param_persistence_threshold": lambda h: 10 * h}
    wanted = [key for key in sizes if zero.get(key) == "auto"]
    if not wanted:
        return
    hidden = find_model(setup.model).hidden_size
    if hidden is None:
        raise BadInput(f"deepspeed.zero_optimization.{wanted[0]}", "is \"auto\", but the model's config has neither hidden_size nor hidden_sizes for the Trainer to fill it from; give a number")
    for key in wanted:
        zero[key] = sizes[key](hidden)


_SCHEDULED = {"warmup_min_lr", "warmup_max_lr", "total_num_steps", "warmup_num_steps"}


def _fill_scheduler(config: dict[str, Any]) -> None:
    """A scheduler with "auto" in it moves no memory, and is left out."""
    scheduler = config.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, dict) else None
    if isinstance(params, dict) and "auto" in params.values():
        if not {key for key, value in params.items() if value == "auto"} <= _SCHEDULED:
            _refuse_auto({key: value for key, value in params.items() if key not in _SCHEDULED}, "deepspeed.scheduler.params")
        del config["scheduler"]


def _refuse_auto(section: Mapping[str, Any], path: str) -> None:
    """Any other "auto" stops accelerate (`DeepSpeedPlugin.deepspeed_config_process`)."""
    for key, value in section.items():
        if value == "auto" and key != "steps_per_print":  # which accelerate sets itself
            raise BadInput(f"{path}.{key}", "is \"auto\", which neither the Trainer nor accelerate fills; give a value or leave it out")
        if isinstance(value, Mapping):
            _refuse_auto(value, f"{path}.{key}")
