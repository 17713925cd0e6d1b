"""The page's controls as data, and the way between their values and a Setup.

A page is a base Setup and edits: a control whose value is what the base already says changes nothing, so a job file keeps every key
that no control stands for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from explorer.errors import BadInput
from explorer.jsonfile import parse_json
from explorer.setup import ATTENTIONS, Setup

CUSTOM = "custom"
"""The `model` choice that means: what the text box holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One control: what it may hold, and its default."""

    name: str
    kind: Literal["choice", "count", "switch", "text"]
    default: Any
    options: tuple[str, ...] = ()
    least: int = 1
    optional: bool = False
    """An empty value is the default of the model or of DeepSpeed."""


_FIELDS = (
    Field(name="model", kind="choice", default="openai/clip-vit-large-patch14"),
    Field(name="config_text", kind="text", default=""),
    Field(name="micro_batch", kind="count", default=64),
    Field(name="sequence", kind="count", default=None, optional=True),
    Field(name="target_sequence", kind="count", default=None, optional=True),
    Field(name="image_size", kind="count", default=None, optional=True),
    Field(name="precision", kind="choice", default="fp16", options=("fp32", "fp16", "bf16")),
    Field(name="stage", kind="choice", default="2", options=("0", "1", "2", "3")),
    Field(name="offload_optimizer", kind="choice", default="cpu", options=("none", "cpu", "nvme")),
    Field(name="offload_param", kind="choice", default="none", options=("none", "cpu", "nvme")),
    Field(name="gradient_accumulation_steps", kind="count", default=1),
    Field(name="gradient_checkpointing", kind="switch", default=False),
    Field(name="attention", kind="choice", default="sdpa", options=ATTENTIONS),
    Field(name="optimizer", kind="choice", default="AdamW", options=("AdamW", "AdamW (torch)", "SGD", "SGD with momentum", "Lion", "Adagrad")),
    Field(name="world_size", kind="count", default=1),
    Field(name="gpu", kind="choice", default="A100-80GB"),
    Field(name="reduce_bucket_size", kind="count", default=None, optional=True),
    Field(name="overlap_comm", kind="choice", default="default", options=("default", "on", "off")),
    Field(name="stage3_prefetch_bucket_size", kind="count", default=None, least=0, optional=True),
    Field(name="stage3_param_persistence_threshold", kind="count", default=None, least=0, optional=True),
    Field(name="stage3_max_live_parameters", kind="count", default=None, least=0, optional=True),
    Field(name="stage3_max_reuse_distance", kind="count", default=None, least=0, optional=True),
    Field(name="sub_group_size", kind="count", default=None, least=0, optional=True),
    Field(name="nvme_path", kind="text", default=""),
    Field(name="gpus_per_node", kind="count", default=8),
)
FIELDS: dict[str, Field] = {f.name: f for f in _FIELDS}
NO_CARD = "none"
"""The `gpu` choice without a card: an estimate without a verdict."""

_ZERO = "zero_optimization"
_SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size")
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {}),
    "AdamW (torch)": ("AdamW", {"torch_adam": True}),
    "SGD": ("SGD", {}),
    "SGD with momentum": ("SGD", {"momentum": 0.9}),
    "Lion": ("Lion", {}),
    "Adagrad": ("Adagrad", {}),
}


def default_setup() -> Setup:
    """What the page opens with: the case it was made for, CLIP under ZeRO-2 with the optimizer on the CPU."""
    return Setup(
        model="openai/clip-vit-large-patch14",
        micro_batch=64,
        deepspeed={
            "fp16": {"enabled": True},
            _ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        },
        gpu="A100-80GB",
    )


def count(value: Any, name: str, least: int = 1) -> int:
    """A whole number as people write it: 64, "1,024", "5e8", "500M". Raises BadInput naming the control."""
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    else:
        number = _written_count(str(value), name)
    if number < least:
        raise BadInput(name, f"is {number}; give a whole number of at least {least}")
    return number


def _written_count(text: str, name: str) -> int:
    word = text.strip().replace(",", "").replace("_", "").replace(" ", "")
    scale = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}.get(word[-1:].lower(), 1)
    try:
        number = float(word[:-1] if scale > 1 else word) * scale
        if number != int(number) or abs(number) > 1 << 53:
            raise ValueError
        return int(number)
    except (ValueError, OverflowError):
        shown = text.strip()[:40]
        raise BadInput(name, f"is {shown!r}; give a whole number" if shown else "is empty; give a whole number") from None


def written(number: int | None) -> str:
    """A count as the page shows it: 64, 1024, 500,000,000."""
    return "" if number is None else f"{number:,}" if number >= 100_000 else str(number)


def read(setup: Setup) -> dict[str, Any]:
    """The value of every control for this Setup. Raises BadInput where DeepSpeed would refuse it."""
    from explorer.dsconfig import resolve

    settings = resolve(setup)
    model, config_text = _read_model(setup.model)
    zero = _zero_section(setup.deepspeed)
    values = {name: getattr(setup, name) for name in ("micro_batch", "sequence", "target_sequence", "image_size", "attention", "world_size", "gpus_per_node")}
    values |= {name: _integer(zero.get(name)) for name in _SIZES}
    overlap = zero.get("overlap_comm", "auto")
    optimizer_nvme = settings.offload_optimizer.nvme_path if settings.offload_optimizer else None
    param_nvme = settings.offload_param.nvme_path if settings.offload_param else None
    return values | {
        "model": model,
        "config_text": config_text,
        "precision": settings.precision,
        "stage": str(settings.stage),
        "offload_optimizer": settings.offload_optimizer.device if settings.offload_optimizer else "none",
        "offload_param": settings.offload_param.device if settings.offload_param else "none",
        "nvme_path": optimizer_nvme or param_nvme or "",
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "gradient_checkpointing": setup.gradient_checkpointing is not False,
        "optimizer": _read_optimizer(settings.optimizer),
        "gpu": setup.gpu or NO_CARD,
        "overlap_comm": "default" if overlap in ("auto", None) else "on" if settings.overlap_comm else "off",
    }


def _zero_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the section; the old form, true or false, is stage 1 or 0."""
    section = config.get(_ZERO) or {}
    return {"stage": int(section)} if isinstance(section, bool) else dict(section)


def _integer(value: Any) -> int | None:
    """A size as the section writes it: DeepSpeed reads "500.0" too."""
    return None if value is None or value == "auto" else int(value.partition(".")[0] if isinstance(value, str) else value)


def read_model_name(model: str) -> str | None:
    """The catalog's name for a name or a short alias; None where the catalog has neither."""
    from explorer.catalog import catalog_name

    return catalog_name(model)


def _read_model(model: str | Mapping[str, Any]) -> tuple[str, str]:
    if isinstance(model, Mapping):
        return CUSTOM, json.dumps(model, indent=2, default=dict)
    name = read_model_name(model)
    return (name, "") if name else (CUSTOM, model)


def _read_optimizer(optimizer: Any) -> str:
    if optimizer.name == "sgd":
        return "SGD with momentum" if optimizer.moments else "SGD"
    if optimizer.implementation.startswith("torch.optim.Adam"):
        return "AdamW (torch)"
    return {"lion": "Lion", "adagrad": "Adagrad"}.get(optimizer.name, "AdamW")


def parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with every count as a number. Raises BadInput naming the first control that holds something else."""
    out = dict(values)
    for name, field in FIELDS.items():
        value = values[name]
        if field.kind == "count":
            empty = field.optional and (value is None or str(value).strip() == "")
            out[name] = None if empty else count(value, name, field.least)
        elif field.options and value not in field.options:
            raise BadInput(name, f"is {value!r}; choose one of {', '.join(field.options)}")
    return out


def write(base: Setup, given: Mapping[str, Any]) -> Setup:
    """The Setup that the controls' values make of the base. Raises BadInput naming the control or the key."""
    values = parse(given)
    old = read(base)
    changed = {name for name in FIELDS if values[name] != old[name]}
    plain = {name: values[name] for name in ("micro_batch", "sequence", "target_sequence", "image_size", "attention", "world_size", "gpus_per_node", "gradient_checkpointing") if name in changed}
    if changed & {"model", "config_text"}:
        plain["model"] = written_model(values)
    if "gpu" in changed:
        plain["gpu"] = None if values["gpu"] == NO_CARD else values["gpu"]
    if base.rank >= values["world_size"]:
        plain["rank"] = 0
    config = json.loads(json.dumps(base.deepspeed, default=dict))
    _write_config(config, values, changed)
    return base.replace(**plain, deepspeed=config)


def written_model(values: Mapping[str, Any]) -> str | Mapping[str, Any]:
    """What the model controls name: a catalog name, or the text box's config object, path or hub id."""
    if values["model"] != CUSTOM:
        return values["model"]
    text = values["config_text"].strip()
    if not text:
        raise BadInput("model", "has no config yet; paste the text of a config.json, or the path of a folder that holds one")
    if text[0] not in "{[":
        if "\n" in text:
            raise BadInput("model", "is neither a JSON object nor a path; paste the whole text of a config.json")
        return text
    config = parse_json(text, "model")
    if not isinstance(config, dict):
        raise BadInput("model", "is a JSON list; paste the object of a config.json, { … }")
    return config


def _write_config(config: dict[str, Any], values: Mapping[str, Any], changed: set[str]) -> None:
    if changed & {"micro_batch", "gradient_accumulation_steps", "world_size"}:
        config.pop("train_batch_size", None)
        config.pop("train_micro_batch_size_per_gpu", None)
    if "gradient_accumulation_steps" in changed:
        config["gradient_accumulation_steps"] = values["gradient_accumulation_steps"]
    if "precision" in changed:
        _write_precision(config, values["precision"])
    if "optimizer" in changed:
        _write_optimizer(config, values["optimizer"])
    zero = config[_ZERO] = _zero_section(config)
    if "stage" in changed:
        zero["stage"] = int(values["stage"])
    for name in _SIZES:
        if name in changed:
            _put(zero, name, values[name])
    if "overlap_comm" in changed:
        _put(zero, "overlap_comm", {"default": None, "on": True, "off": False}[values["overlap_comm"]])
    for name in ("offload_optimizer", "offload_param"):
        if name in changed or (changed & {"stage", "nvme_path"} and values[name] != "none"):
            _put(zero, name, _offload(zero.get(name), values, name))
    if not zero:
        del config[_ZERO]


def _put(section: dict[str, Any], name: str, value: Any) -> None:
    section.pop(name, None)
    if value is not None:
        section[name] = value


def _offload(old: Any, values: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The offload section for a device; None where DeepSpeed would ignore it at this stage."""
    device, stage = values[name], values["stage"]
    if device == "none" or not offload_reaches(name, stage):
        return None
    kept = {k: v for k, v in old.items() if k not in ("device", "nvme_path")} if isinstance(old, dict) else {}
    path = {"nvme_path": values["nvme_path"].strip()} if device == "nvme" and values["nvme_path"].strip() else {}
    return {"device": device, **kept, **path}


def offload_reaches(name: str, stage: str) -> bool:
    """Whether DeepSpeed acts on this offload at this ZeRO stage."""
    return stage == "3" if name == "offload_param" else stage != "0"


def _write_precision(config: dict[str, Any], precision: str) -> None:
    for name in ("fp16", "bf16"):
        old = config.pop(name, None)
        if name == precision:
            config[name] = {**(old if isinstance(old, dict) else {}), "enabled": True}
        elif old is not None:
            config[name] = {**(old if isinstance(old, dict) else {}), "enabled": False}
    for name in ("fp16", "bf16"):
        if config.get(name) == {"enabled": False}:
            del config[name]


def _write_optimizer(config: dict[str, Any], choice: str) -> None:
    kind, extra = _OPTIMIZERS[choice]
    old = config.get("optimizer")
    rate = ((old if isinstance(old, dict) else {}).get("params") or {}).get("lr", 1e-5)
    config["optimizer"] = {"type": kind, "params": {"lr": rate, **extra}}
