"""accelerate's YAML, and the flat YAML of training tools: what they make of it (accelerate/utils/dataclasses.py, `DeepSpeedPlugin`). No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from explorer.dsconfig import methods
from explorer.dsconfig.arguments import NAMES
from explorer.dsconfig.findings import Finding
from explorer.dsconfig.parts import Part, take_arguments, take_unknown

_LINE = re.compile(r"#.*|---|- .*|[A-Za-z_][\w.-]{0,80}:(?:[ \t].*)?")
_LONGEST_LINE, _LONGEST = 600, 1 << 16
_ACCELERATES = {"compute_environment", "distributed_type", "deepspeed_config", "num_processes", "mixed_precision", "num_machines", "machine_rank"}
_TOOLS = {"model_name_or_path", "base_model", "cutoff_len", "sequence_len", "max_seq_length"}


def read_yaml(text: str) -> Iterator[Part]:
    """A part for every run of YAML lines that is a configuration."""
    for start, end in _runs(text):
        keys = set(re.findall(r"^([A-Za-z_]\w*):", text[start:end], re.MULTILINE))
        if not keys & (_ACCELERATES | _TOOLS | NAMES | {"zero_optimization"}):
            continue
        part = Part(form="accelerate config" if keys & _ACCELERATES else "YAML", start=start, end=end)
        content = _loaded(text[start:end])
        if not isinstance(content, dict):
            part.unread.append(Finding(id="unread", key="yaml", text="looks like YAML and is not; check its indentation"))
        else:
            _take(part, {str(key): value for key, value in content.items()})
        yield part


def _runs(text: str) -> Iterator[tuple[int, int]]:
    """Stretches of lines that could be YAML."""
    begun, at = None, 0
    for line in text.splitlines(keepends=True):
        end = at + len(line)
        content = line.strip(" \t\n\r")
        if not content or len(content) < _LONGEST_LINE and _LINE.fullmatch(content):
            begun = at if begun is None else begun
        elif begun is not None:
            yield begun, at
            begun = None
        at = end
    if begun is not None:
        yield begun, at


def _loaded(block: str) -> Any:
    """The YAML's value; None where it is none, is long, or has anchors, which could be made to grow without end."""
    import yaml

    if len(block) > _LONGEST or re.search(r"(?:^|[\s,:\[-])[&*]\w", block):
        return None
    try:
        return next(iter(yaml.load_all(block, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))), None)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError):
        return None


def _without_deepspeed(part: Part, content: Mapping[str, Any]) -> None:
    """accelerate's FSDP and DDP: the method, and the nearest ZeRO in DeepSpeed's place."""
    kind = str(content.get("distributed_type", "")).rpartition(".")[2].upper()
    precision = str(content.get("mixed_precision", "")).lower()
    options = content.get("fsdp_config")
    if kind == "FSDP":
        options = options if isinstance(options, Mapping) else {}
        _take_fsdp(part, options, precision)
    elif kind in ("MULTI_GPU", "NO"):
        part.job["method"] = "ddp"
        part.deepspeed = methods.as_zero("NO_SHARD", False, precision, filled=False)


def _take_fsdp(part: Part, options: Mapping[str, Any], precision: str | None) -> None:
    part.job["method"] = "fsdp"
    part.deepspeed = methods.as_zero(methods.strategy(options), methods.offloads(options), precision, filled=False)
    if methods.checkpoints(options):
        part.job["gradient_checkpointing"] = True


def take_launch(part: Part, own: Mapping[str, Any]) -> None:
    """What `accelerate launch` is told of DeepSpeed, FSDP or DDP by its own options."""
    precision = str(own.get("mixed_precision", "")).lower()
    if own.get("deepspeed_config_file"):
        part.names_config = "deepspeed_config_file", str(own["deepspeed_config_file"])[:400]
    elif own.get("use_deepspeed") is True or "zero_stage" in own:
        part.deepspeed = as_config(own, precision)
    elif own.get("use_fsdp") is True:
        _take_fsdp(part, own, precision)
    elif own.get("multi_gpu") is True:
        part.job["method"] = "ddp"
        part.deepspeed = methods.as_zero("NO_SHARD", False, precision, filled=False)
    elif own.get("config_file"):
        part.names_config = "config_file", str(own["config_file"])[:400]


def _take(part: Part, content: dict[str, Any]) -> None:
    plugin = content.pop("deepspeed_config", None)
    if isinstance(plugin, Mapping):
        part.deepspeed = as_config(plugin, content.get("mixed_precision"))
        if plugin.get("deepspeed_config_file"):
            part.deepspeed = None
            part.names_config = "deepspeed_config_file", str(plugin["deepspeed_config_file"])[:400]
        if plugin.get("zero3_init_flag") is not None:
            part.job["zero_init"] = bool(plugin["zero3_init_flag"])
    elif "zero_optimization" in content:
        part.deepspeed, content = content, {}
    else:
        _without_deepspeed(part, content)
    processes, machines = content.pop("num_processes", None), content.pop("num_machines", 1)
    if isinstance(processes, int) and processes > 0:
        part.job.update(world_size=processes, gpus_per_node=max(1, processes // (machines if isinstance(machines, int) and machines > 0 else 1)))
    if part.form == "YAML":
        arguments = {key: _number(value) for key, value in content.items()}
        if arguments.get("bf16") == "auto":  # axolotl: wherever the card has bf16
            arguments["bf16"] = True
        take_arguments(part, arguments)
        take_unknown(part, whole=False)
        part.starts_alone = bool(part.tool)


def _number(value: Any) -> Any:
    """YAML 1.1 takes 1e-5 for a text; the tools make a number of it."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+\.?\d*[eE][+-]?\d{1,3}", value):
        return float(value)
    return value


def as_config(plugin: Mapping[str, Any], mixed_precision: Any) -> dict[str, Any]:
    """The DeepSpeed config that accelerate makes of its own questions."""
    zero: dict[str, Any] = {"stage": plugin.get("zero_stage", 2)}
    for name in ("offload_optimizer", "offload_param"):
        device = plugin.get(f"{name}_device")
        if device is not None:
            path = plugin.get(f"{name}_nvme_path")
            zero[name] = {"device": device, **({"nvme_path": path} if isinstance(path, str) and path not in ("none", "") else {})}
    if plugin.get("zero3_save_16bit_model") is not None:
        zero["stage3_gather_16bit_weights_on_model_save"] = plugin["zero3_save_16bit_model"]
    config: dict[str, Any] = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": plugin.get("gradient_accumulation_steps", 1), "zero_optimization": zero}
    if plugin.get("gradient_clipping") not in (None, "none"):
        config["gradient_clipping"] = plugin["gradient_clipping"]
    if mixed_precision in ("bf16", "fp16"):
        config[mixed_precision] = {"enabled": True}
    return config
