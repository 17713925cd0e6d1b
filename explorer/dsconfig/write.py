"""A Setup as the files and lines that run it: ds_config.json, TrainingArguments, the launch command, the environment. No torch.

All four say the same: the config keeps the person's own keys and their order, numbers that the Trainer checks are in both, and whatever
DeepSpeed would refuse is not written, since a Setup that is refused cannot be resolved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from explorer import allocator_options
from explorer.catalog import Model, find_model, lengths
from explorer.dsconfig.arguments import warms_up_for_nothing
from explorer.dsconfig.settings import Settings, resolve
from explorer.errors import BadInput
from explorer.jsonfile import plain
from explorer.setup import Setup

CONFIG = "ds_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What to save and run."""

    config: Mapping[str, Any]
    """What `deepspeed.initialize` is given: every "auto" and batch key filled."""
    trainer_config: Mapping[str, Any]
    """The same for the Trainer: what its arguments fill is "auto"."""
    arguments: Mapping[str, Any]
    """TrainingArguments, but for output_dir."""
    launch: str
    environment: Mapping[str, str]

    @property
    def config_text(self) -> str:
        """`ds_config.json` for the Trainer."""
        return json.dumps(self.trainer_config, indent=4) + "\n"

    @property
    def arguments_text(self) -> str:
        """The call, one argument a line."""
        lines = [f"    {name}={value!r}," for name, value in self.arguments.items()]
        return "\n".join(["training_args = TrainingArguments(", '    output_dir="out",', *lines, ")"]) + "\n"

    @property
    def environment_text(self) -> str:
        """Lines for a shell; empty where nothing is set."""
        return "".join(f"export {name}={value}\n" for name, value in self.environment.items())


def write(setup: Setup) -> Export:
    """The files and lines of a setup. Raises BadInput where DeepSpeed or the Trainer would refuse it."""
    settings = resolve(setup)
    config = plain(settings.config, "deepspeed")
    arguments = _arguments(setup, settings)
    return Export(config=config, trainer_config=_for_trainer(setup, settings), arguments=arguments, launch=_launch(setup), environment=_environment(setup))


_FILLED = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
"""Parameter of the config's optimizer → the argument that must equal it (transformers/integrations/deepspeed.py, `trainer_config_process`)."""


def _arguments(setup: Setup, settings: Settings) -> dict[str, Any]:
    """The person's own, and what the config says besides."""
    found: dict[str, Any] = {k: v for k, v in (setup.trainer or {}).items() if k not in ("output_dir", "deepspeed")}
    found["per_device_train_batch_size"] = setup.micro_batch
    found["gradient_accumulation_steps"] = settings.gradient_accumulation_steps
    found["bf16"], found["fp16"] = settings.precision == "bf16", settings.precision == "fp16"
    checkpointing = setup.gradient_checkpointing
    found["gradient_checkpointing"] = checkpointing is not False
    if checkpointing is not False:
        found["gradient_checkpointing_kwargs"] = {"use_reentrant": False} if checkpointing is True else dict(checkpointing)
    params = (settings.config.get("optimizer") or {}).get("params") or {}
    for key, name in _FILLED.items():
        if isinstance(params.get(key), int | float):
            found[name] = params[key]
    betas = params.get("betas")
    if isinstance(betas, list) and len(betas) == 2:
        found["adam_beta1"], found["adam_beta2"] = betas
    found["max_grad_norm"] = settings.gradient_clipping
    if warms_up_for_nothing(setup):
        found["warmup_steps"] = 1
    found["deepspeed"] = CONFIG
    return found


def _for_trainer(setup: Setup, settings: Settings) -> dict[str, Any]:
    """The person's config with the keys that the Trainer fills set to "auto", so that no two can differ."""
    config = plain(setup.deepspeed, "deepspeed")
    zero = config.get("zero_optimization")
    config["zero_optimization"] = zero if isinstance(zero, dict) else {"stage": settings.stage}
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        config[key] = "auto"
    config.pop("bfloat16", None)
    for name in ("bf16", "fp16"):
        section = config.get(name)
        if settings.precision == name or isinstance(section, dict):
            config[name] = {**(section if isinstance(section, dict) else {}), "enabled": "auto"}
    params = (config.get("optimizer") or {}).get("params")
    if isinstance(params, dict):
        for key in ("lr", "betas", "eps", "weight_decay"):
            if key in params:
                params[key] = "auto"
    return config


def _launch(setup: Setup) -> str:
    """DeepSpeed's launcher, with the processes of a node and the nodes."""
    each = min(setup.world_size, setup.gpus_per_node)
    nodes = -(-setup.world_size // each)
    hosts = f" --num_nodes {nodes} --hostfile hostfile" if nodes > 1 else ""
    return f"deepspeed --num_gpus {each}{hosts} train.py"


def _environment(setup: Setup) -> dict[str, str]:
    options = allocator_options.written(setup.allocator)
    return {"PYTORCH_CUDA_ALLOC_CONF": options} if options else {}


def model_lines(setup: Setup) -> str:
    """The lines that make the model as the setup has it; after the TrainingArguments, or stage 3 does not see it made. Raises BadInput for a person's own model, whose lines they have."""
    model = find_model(setup.model)
    if model.factory is not None:
        raise BadInput("model", f"is made by {model.factory.reference}; its lines are your own")
    lines = [_load(setup, model)]
    if setup.gradient_checkpointing is not False and setup.trainer is None:  # else the arguments say so
        kwargs = {"use_reentrant": False} if setup.gradient_checkpointing is True else dict(setup.gradient_checkpointing)
        lines.append(f"model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={kwargs!r})")
    if setup.trainable != ("*",):
        lines += ["import fnmatch", "for name, parameter in model.named_parameters():", f"    parameter.requires_grad_(any(fnmatch.fnmatchcase(name, pattern) for pattern in {setup.trainable!r}))"]
    if setup.lora is not None:
        given = ", ".join(f"{key}={value!r}" for key, value in plain(setup.lora, "lora").items())
        lines.append("from peft import LoraConfig, get_peft_model")
        lines.append(f"model = get_peft_model(model, LoraConfig({given}), autocast_adapter_dtype=False)")
    return "\n".join(lines) + "\n"


def _load(setup: Setup, model: Model) -> str:
    """From the hub or a folder, or with first numbers of its own where the job gives a config alone; and the lengths its batch is to have."""
    at = lengths(setup, model)
    said = {k: v for k, v in (("sequence length", at.sequence), ("target length", at.target_sequence), ("image size", at.image_size)) if v is not None}
    comment = "".join(f"  # {', '.join(f'{k} {v}' for k, v in said.items())}") if said else ""
    if isinstance(setup.model, str):
        return f"model = {model.model_class}.from_pretrained({setup.model!r}, attn_implementation={setup.attention!r}){comment}"
    if model.in_4_bit:
        kwargs = {key: value for key, value in plain(setup.model["quantization_config"], "model").items() if key != "quant_method"}
        return f"model = {model.model_class}.from_pretrained('the/weights', quantization_config=BitsAndBytesConfig(**{kwargs!r}), attn_implementation={setup.attention!r}){comment}"
    return f"model = {model.model_class}._from_config(AutoConfig.for_model(**{plain(setup.model, 'model')!r}), attn_implementation={setup.attention!r}){comment}"
