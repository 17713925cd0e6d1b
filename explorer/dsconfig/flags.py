"""What people type as flags, `--stage 3 --gpus 8`, as fields of a job; they fill in what files do not say. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from explorer.catalog import find_card
from explorer.dsconfig.optimizers import in_deepspeed, in_trainer
from explorer.errors import BadInput, shown

COUNTS = ("micro_batch", "sequence", "gpus", "nodes", "lora", "stage")
NAMES = (
    "model", *COUNTS[:2], "stage", "gpu", "gpus", "nodes", "host_ram", "lora", "offload_optimizer", "offload_parameters",
    "checkpointing", "optimizer", "precision",
)
PRECISIONS = ("bf16", "fp16", "fp32")
DEVICES = ("cpu", "nvme", "none")


@dataclass(frozen=True, slots=True)
class Filled:
    """A job with what the flags add to it."""

    job: dict[str, Any]
    notes: tuple[str, ...] = ()
    """What was assumed, and flags that a file overrules."""


def read(options: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given, as numbers and texts. Raises BadInput naming the flag."""
    given = {name: options[name] for name in NAMES if options.get(name) not in (None, False)}
    for name in COUNTS:
        if name in given:
            given[name] = _count(name, given[name], 0 if name == "stage" else 1)
    if given.get("stage", 0) > 3:
        raise BadInput("--stage", f"is {given['stage']}; choose 0, 1, 2 or 3")
    if "host_ram" in given:
        given["host_ram"] = _gib("--host-ram", given["host_ram"])
    for name, choices in (("precision", PRECISIONS), ("offload_optimizer", DEVICES), ("offload_parameters", DEVICES)):
        if name in given and given[name] not in choices:
            raise BadInput(_flag(name), f"is {shown(given[name])}; choose one of {', '.join(choices)}")
    nodes, gpus = given.get("nodes", 1), given.get("gpus")
    if nodes > 1 and gpus is None:
        raise BadInput("--nodes", f"is {nodes}, and --gpus is missing; add --gpus, the GPUs of all nodes together")
    if gpus is not None and gpus % nodes:
        raise BadInput("--gpus", f"is {gpus}, the GPUs of all nodes together, which {nodes} nodes do not divide; give a multiple of --nodes")
    return given


def fill(job: Mapping[str, Any], given: Mapping[str, Any], alone: bool) -> Filled:
    """A job as a file or a text gives it, with what it leaves out taken from the flags. `alone`: there is no file, and
    what the flags leave out is assumed: bf16 (fp16 on a card without it), and 1 sample. Raises BadInput naming the flag."""
    found, notes = dict(job), []
    for key, value in _fields(given).items():
        if found.get(key) is None:
            found[key] = value
        elif found[key] != value:
            notes.append(_overruled(_BY_FIELD[key], value, found[key]))
    config = json.loads(json.dumps(found["deepspeed"])) if isinstance(found.get("deepspeed"), Mapping) else {}
    _fill_config(config, found, given, notes)
    if alone:
        _assume(config, found, given, notes)
    if config or "deepspeed" in found:
        found["deepspeed"] = config
    return Filled(found, tuple(notes))


_BY_FIELD = {
    "model": "model", "micro_batch": "micro_batch", "sequence": "sequence", "gpu": "gpu", "world_size": "gpus",
    "gpus_per_node": "nodes", "host_ram_gib": "host_ram", "lora": "lora", "gradient_checkpointing": "checkpointing",
}


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that are fields of a job."""
    found = {key: given[name] for key, name in _BY_FIELD.items() if name in given and key not in ("gpus_per_node", "lora")}
    if "gpus" in given:
        found["gpus_per_node"] = given["gpus"] // given.get("nodes", 1)
    if "lora" in given:
        found["lora"] = {"r": given["lora"], "target_modules": "all-linear"}
    return found


def _fill_config(config: dict[str, Any], job: dict[str, Any], given: Mapping[str, Any], notes: list[str]) -> None:
    """The flags that are keys of the DeepSpeed config."""
    sections = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}
    zero = config.get("zero_optimization", {})
    for name in ("stage", *sections):
        if name not in given or not isinstance(zero, dict):
            continue
        key, value = sections.get(name, name), given[name]
        there = zero.get(key)
        there = there.get("device") if isinstance(there, Mapping) else there
        if there is None:
            zero[key] = value if name == "stage" else {"device": value}
            config["zero_optimization"] = zero
        elif there != value:
            notes.append(_overruled(name, value, there))
    if "optimizer" in given:
        _fill_optimizer(config, job, given["optimizer"], notes)
    if "precision" in given:
        _fill_precision(config, job, given["precision"], notes)


def _fill_optimizer(config: dict[str, Any], job: dict[str, Any], name: str, notes: list[str]) -> None:
    trainer = job.get("trainer") if isinstance(job.get("trainer"), Mapping) else {}
    there = config.get("optimizer") or trainer.get("optim")
    if there:
        notes.append(_overruled("optimizer", name, there.get("type") if isinstance(there, Mapping) else there))
    elif (known := in_deepspeed(name)) is not None:
        config["optimizer"] = {"type": known, "params": {"lr": 1e-5}}
    elif (optim := in_trainer(name)) is not None:
        job["trainer"] = {**trainer, "optim": optim}
    else:
        raise BadInput("--optimizer", f"is {shown(name)}, which neither DeepSpeed nor the Trainer has; give AdamW, Adam, Lion, SGD, adafactor or adamw_8bit, say")


def _fill_precision(config: dict[str, Any], job: dict[str, Any], precision: str, notes: list[str]) -> None:
    trainer = job.get("trainer") if isinstance(job.get("trainer"), Mapping) else {}
    there = next((name for name in ("bf16", "fp16") if _is_on(config.get(name)) or trainer.get(name)), None)
    waits = isinstance(job.get("trainer"), Mapping) and any(isinstance(config.get(n), Mapping) and config[n].get("enabled") == "auto" for n in ("bf16", "fp16"))
    if there is not None:
        if there != precision:
            notes.append(_overruled("precision", precision, there))
    elif precision != "fp32":
        if not waits:
            config[precision] = {"enabled": True}
        if isinstance(job.get("trainer"), Mapping):
            job["trainer"] = {**trainer, precision: True}


def _is_on(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _assume(config: dict[str, Any], job: dict[str, Any], given: Mapping[str, Any], notes: list[str]) -> None:
    """What flags alone leave out."""
    if "precision" not in given:
        old = "gpu" in given and find_card(str(given["gpu"])).attention_generation == "older"
        _fill_precision(config, job, "fp16" if old else "bf16", [])
        notes.append(f"--precision is not given: {'fp16, since this card has no bf16,' if old else 'bf16'} is taken")
    if job.get("micro_batch") is None:
        job["micro_batch"] = 1
        notes.append("--micro-batch is not given: 1 sample is taken")
    if "stage" not in given and "zero_optimization" not in config:
        notes.append("--stage is not given: stage 0 is taken, without ZeRO")


def _overruled(name: str, typed: Any, there: Any) -> str:
    return f"{_flag(name)} is {shown(typed)}, but the file says {shown(there)}: the file's is taken; change it there"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _count(name: str, value: Any, least: int) -> int:
    try:
        number = float(value)
        if number.is_integer() and least <= number < 1 << 40:
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    example = {"stage": "3", "lora": "16, the rank"}.get(name, "8")
    raise BadInput(_flag(name), f"is {shown(value)}; give a whole number of at least {least}, such as {example}")


def _gib(flag: str, value: Any) -> float:
    text = str(value).strip().lower().removesuffix("gib").removesuffix("gb").removesuffix("g").strip()
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e9:
        raise BadInput(flag, f"is {shown(value)}; give the host memory of a node in GiB, such as 512")
    return number
