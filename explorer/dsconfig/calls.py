"""Calls of Python that say how a model is adapted, quantized, wrapped and trained: peft, bitsandbytes, unsloth, torch's FSDP and DDP, the trainers. No torch.

They are read off the syntax tree and never run (peft/tuners/lora/config.py, `LoraConfig`; unsloth/models/loader.py and llama.py;
torch/distributed/fsdp, `FullyShardedDataParallel`; trl/trainer, whose trainers take a model's name for a model).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from explorer.dsconfig import methods
from explorer.dsconfig.findings import Finding
from explorer.dsconfig.literals import Names, keywords, literal, written
from explorer.dsconfig.parts import Part, take_arguments
from explorer.dsconfig.trl import CONFIGS, defaults

LORA_FIELDS = ("r", "target_modules", "modules_to_save", "lora_dropout", "bias", "use_rslora", "use_dora", "layers_to_transform", "layers_pattern", "exclude_modules")
"""Of LoraConfig, what moves memory."""
WRAPPERS = {"DistributedDataParallel": "ddp", "DDP": "ddp", "FullyShardedDataParallel": "fsdp", "FSDP": "fsdp", "fully_shard": "fsdp"}
_NAMESPACES = ("torch", "ShardingStrategy")
"""What holds names that stand for values."""
_UNSLOTH_R = 16
_UNSLOTH_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def plain(call: ast.Call, names: Names) -> Iterator[tuple[str, Any]]:
    """(name, value) of keyword arguments: values, and names such as torch.bfloat16 by their last word; anything else is left out."""
    for key, node in keywords(call, names):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _NAMESPACES:
            yield key, node.attr
            continue
        try:
            yield key, literal(node, names)
        except ValueError:
            continue


def values(call: ast.Call, names: Names) -> list[Any]:
    """The arguments without a name; None for what is no value."""
    found = []
    for node in call.args:
        try:
            found.append(literal(node, names))
        except ValueError:
            found.append(None)
    return found


def is_trainer(name: str) -> bool:
    """Whether a call makes a trainer of transformers or TRL."""
    return name.endswith("Trainer")


def take_lora(part: Part, call: ast.Call, names: Names) -> None:
    """`LoraConfig(r=16, target_modules="all-linear")`, `LoraConfig(16, ["q_proj"])`."""
    found = {key: value for key, value in plain(call, names) if key in LORA_FIELDS and value is not None}
    for value in values(call, names):
        if isinstance(value, int) and not isinstance(value, bool):
            found.setdefault("r", value)
        elif isinstance(value, list) or value == "all-linear":
            found.setdefault("target_modules", value)
    part.job["lora"] = found
    for key, node in keywords(call, names):
        if key in LORA_FIELDS[:3] and key not in found and not isinstance(node, ast.Constant):
            taken = "8" if key == "r" else "peft's own choice for the model" if key == "target_modules" else "none"
            part.unread.append(Finding(id="unread", key=f"lora.{key}", text=f"is {written(node)}, which is no value but code, and code is not run: {taken} is taken, the default"))


def take_bits(part: Part, call: ast.Call, names: Names) -> None:
    """`BitsAndBytesConfig(load_in_4bit=True, …)`."""
    take_arguments(part, {"quantization_config": dict(plain(call, names))} if _asks(call, names) else {})


def _asks(call: ast.Call, names: Names) -> bool:
    return any(key in ("load_in_4bit", "load_in_8bit") and value is True for key, value in plain(call, names))


def bits_of(node: ast.expr | None, names: Names) -> dict[str, Any]:
    """The arguments of `quantization_config=BitsAndBytesConfig(…)`; empty where it is none, or is made elsewhere."""
    if not isinstance(node, ast.Call) or not written(node.func).endswith("BitsAndBytesConfig") or not _asks(node, names):
        return {}
    return {"quantization_config": dict(plain(node, names))}


def take_unsloth(part: Part, name: str, call: ast.Call, names: Names) -> None:
    """`FastLanguageModel.from_pretrained(…)` and `.get_peft_model(…)`, with unsloth's own defaults."""
    given = dict(plain(call, names))
    if name == "from_pretrained":
        part.makes = "model"
        first = next(iter(values(call, names)), None)
        model = given.get("model_name", first)
        found = {"model": model} if isinstance(model, str) else {}
        found |= {"max_seq_length": given["max_seq_length"]} if isinstance(given.get("max_seq_length"), int) else {}
        if given.get("load_in_4bit", True) and given.get("full_finetuning") is not True and given.get("load_in_8bit") is not True:
            found["quantization_bit"] = 4  # nf4, scales quantized too
        take_arguments(part, found)
        part.tool, part.defaults = "", {}
        part.unread.append(Finding(id="not-modelled", key="unsloth", text="replaces the model's kernels by its own, which keep fewer activations and is not modelled: memory is at most what is said"))
        return
    part.job["lora"] = {"r": given.get("r", _UNSLOTH_R), "target_modules": given.get("target_modules") or _UNSLOTH_TARGETS}
    if given.get("modules_to_save"):
        part.job["lora"]["modules_to_save"] = given["modules_to_save"]
    if given.get("use_gradient_checkpointing", "unsloth"):
        part.job["gradient_checkpointing"] = True


def take_trainer(part: Part, name: str, call: ast.Call, names: Names) -> None:
    """`SFTTrainer(model="Qwen/Qwen2.5-7B", args=SFTConfig(…))`: the model by its name, and a trainer without arguments."""
    given = {key: node for key, node in keywords(call, names) if key != "**"}
    model = given.get("model", call.args[0] if call.args else None)
    try:
        named = literal(model, names) if model is not None else None
    except ValueError:
        named = None
    take_arguments(part, {"model": named} if isinstance(named, str) else {})
    own = {key: value for key, value in plain(call, names) if key in ("max_seq_length", "packing")}
    take_arguments(part, own)
    if "args" not in given and len(call.args) < 2:
        part.form, part.trainer = "TrainingArguments", {}
        config = name.removesuffix("Trainer") + "Config"
        if config in CONFIGS:
            part.arguments_class, part.defaults = config, defaults(config, own)
    if given.get("compute_metrics") is not None and not _is_none(given["compute_metrics"]):
        part.trainer = {**(part.trainer or {}), "compute_metrics": True}


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def take_wrapper(part: Part, name: str, call: ast.Call, names: Names) -> None:
    """torch's own DDP and FSDP around a model."""
    method, given = WRAPPERS[name], dict(plain(call, names))
    part.wraps, part.job["method"] = True, method
    if method == "ddp":
        part.deepspeed = methods.as_zero("NO_SHARD", False, None, filled=False)
        return
    nodes = dict(keywords(call, names))
    offload = any(word in written(nodes[key]) for key, word in (("cpu_offload", "True"), ("offload_policy", "CPUOffload")) if key in nodes)
    precision = next((p for p, word in (("bf16", "bfloat16"), ("fp16", "float16")) for key in ("mixed_precision", "mp_policy") if key in nodes and word in ast.unparse(nodes[key])), None)
    part.deepspeed = methods.as_zero(methods.strategy(_options(given)), offload, precision, filled=False)


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: given[key] for key in ("sharding_strategy", "reshard_after_forward") if key in given}
