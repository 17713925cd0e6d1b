"""What one piece of a pasted text says of a job, whatever form it had. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from explorer.catalog import catalog_name
from explorer.dsconfig import lora
from explorer.dsconfig.arguments import NAMES
from explorer.dsconfig.findings import Finding


@dataclass(slots=True)
class Part:
    """A piece of the text, read. `start` and `end` are where it stood."""

    form: str
    """"DeepSpeed config", "TrainingArguments", "command line", "accelerate config", "job file", "model config", "Python"."""
    start: int = 0
    end: int = 0
    deepspeed: dict[str, Any] | None = None
    trainer: dict[str, Any] | None = None
    job: dict[str, Any] = field(default_factory=dict)
    """Fields of a Setup."""
    told: list[Finding] = field(default_factory=list)
    unread: list[Finding] = field(default_factory=list)
    launcher: str | None = None
    """"deepspeed", "accelerate", "torchrun" or "python"."""
    makes: Literal["", "model", "arguments"] = ""
    """What a script makes there."""
    arguments_class: str = ""
    """The class of its arguments, where that has defaults of its own."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """What that class takes where no piece of the text says otherwise."""


_MODEL = ("model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_id", "base_model", "model")
_SEQUENCE = ("sequence_len", "seq_length", "seq_len", "max_seq_length", "max_seq_len", "model_max_length", "cutoff_len", "block_size", "max_source_length", "max_length")
_TARGET = ("max_target_length",)
_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flash_attention_2": "flash_attention_2", "fa2": "flash_attention_2", "flash_attention_3": "flash_attention_2"}
_RENAMED = {"evaluation_strategy": "eval_strategy", "per_gpu_train_batch_size": "per_device_train_batch_size"}
_GONE = {
    "overwrite_output_dir", "warmup_ratio", "logging_dir", "save_safetensors", "fp16_opt_level", "fp16_backend", "half_precision_backend", "no_cuda", "group_by_length", "past_index", "sharded_ddp",
    "include_inputs_for_metrics", "push_to_hub_token", "push_to_hub_model_id", "push_to_hub_organization", "mp_parameters", "jit_mode_eval", "use_mps_device", "torchdynamo", "ray_scope", "use_legacy_prediction_loop", "tpu_num_cores",
}
"""Arguments of earlier transformers, none of which moves memory."""
_IN_4_BIT = "weights in 4 bit, which are followed where the model's own config.json with its quantization_config is pasted; whole weights are taken here"
_NOT_MODELLED = {
    "load_in_4bit": _IN_4_BIT, "load_in_8bit": "weights in 8 bit, which is not modelled", "quantization_bit": _IN_4_BIT, "quantization_config": _IN_4_BIT, "packing": "packed samples, which is not modelled: memory is that of the longest batch, and at most what is said of it",
}


def take_arguments(part: Part, given: Mapping[str, Any]) -> None:
    """Arguments by the names that training scripts give them: the Trainer's to `trainer`, the model's and the batch's to the job, the rest told as unread."""
    trainer: dict[str, Any] = {}
    adapter, read = lora.take(given)
    if adapter is not None:
        part.job["lora"] = adapter
    for written, value in given.items():
        name = _RENAMED.get(written, written)
        if name in read:
            continue
        if name == "deepspeed":
            _take_config(part, value)
        elif name in NAMES:
            trainer[name] = value
        elif name in _NOT_MODELLED and value not in (None, False, 0):
            part.unread.append(Finding(id="not-modelled", key=written, text=f"asks for {_NOT_MODELLED[name]}"))
        elif name not in _GONE and not _take_field(part, name, value):
            part.unread.append(Finding(id="unread", key=written, text="is read by the script itself, and not here"))
    if trainer:
        part.trainer = {**(part.trainer or {}), **trainer}


def _take_config(part: Part, value: Any) -> None:
    if isinstance(value, Mapping):
        part.deepspeed = dict(value)
    elif value not in (None, False, "", True):
        part.told.append(Finding(id="config-file", key="deepspeed", text=f"names the file {str(value)[:80]}; paste what is in it too"))
    if value not in (None, False, ""):
        part.trainer = part.trainer or {}


def _take_field(part: Part, name: str, value: Any) -> bool:
    """Whether the argument says something of the model or its batch."""
    if name in _MODEL and isinstance(value, str) and value:
        _take_model(part, value)
    elif name in _SEQUENCE and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        part.job.setdefault("sequence", value)
    elif name in _TARGET and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        part.job.setdefault("target_sequence", value)
    elif name in ("attn_implementation", "_attn_implementation", "flash_attn") and isinstance(value, str) and value in _ATTENTION:
        part.job["attention"] = _ATTENTION[value]
    elif name in ("use_flash_attention_2", "use_flash_attn") and value is True:
        part.job["attention"] = "flash_attention_2"
    else:
        return False
    return True


def _take_model(part: Part, name: str) -> None:
    """The catalog's model of that name, wherever it is kept; a hub id; never a place on this machine."""
    known = catalog_name(name.replace("\\", "/").rstrip("/").rpartition("/")[2])
    if known is not None:
        part.job.setdefault("model", known)
    elif name.startswith(("/", ".", "~")) or ":" in name or name.count("/") > 1:
        part.unread.append(Finding(id="model-folder", key="model", text=f"is the folder {name[:80]}, which is not looked into; paste its config.json"))
    else:
        part.job.setdefault("model", name)
