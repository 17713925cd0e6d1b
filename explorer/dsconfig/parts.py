"""What one piece of a pasted text says of a job, whatever form it had. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from explorer.catalog import catalog_name
from explorer.dsconfig import lora, quantization, tools
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
    """What that class, or the tool, takes where no piece of the text says otherwise."""
    tool: str = ""
    """The training tool that the piece is for (dsconfig/tools.py)."""
    quantization: dict[str, Any] | None = None
    """A quantization_config for the model."""
    names_config: tuple[str, str] | None = None
    """(key, file or code) of a DeepSpeed config that the piece only names."""
    names_recipe: str = ""
    """A file of arguments that a command is given."""
    wraps: bool = False
    """Whether it puts torch's own DDP or FSDP around the model, which gives way to DeepSpeed elsewhere in the text."""
    starts_alone: bool = False
    """Whether it is a whole command, which would say so where it used DeepSpeed."""


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
_NOT_MODELLED = {
    "load_in_4bit": "weights in 4 bit, in a way that is not followed here: whole weights are taken",
    "load_in_8bit": "weights in 8 bit, which is not modelled: whole weights are taken",
    "quantization_config": "quantized weights, in a way that is not followed here: whole weights are taken",
    "packing": "packed samples, which is not modelled: memory is that of the longest batch, and at most what is said of it",
}
_NOT_MODELLED |= dict.fromkeys(("quantization_bit", "quant_bits", "use_qlora"), _NOT_MODELLED["load_in_4bit"])


def take_arguments(part: Part, given: Mapping[str, Any]) -> None:
    """Arguments by the names that training scripts give them: the Trainer's to `trainer`, the model's and the batch's to the job, the rest told as unread."""
    tool = tools.named(part.tool) or tools.of_arguments(given)
    given = tools.renamed(tool, given)
    trainer: dict[str, Any] = {}
    adapter, read = lora.take(given)
    if adapter is not None:
        part.job["lora"] = adapter
    section, more = quantization.take(given)
    part.quantization = section or part.quantization
    for written, value in given.items():
        name = _RENAMED.get(written, written)
        if name in read or name in more:
            continue
        if name == "deepspeed":
            take_config(part, name, value)
        elif name in NAMES:
            trainer[name] = value
        elif name in _NOT_MODELLED and value not in (None, False, 0):
            part.unread.append(Finding(id="not-modelled", key=written, text=f"asks for {_NOT_MODELLED[name]}"))
        elif name not in _GONE and not _take_field(part, name, value):
            part.unread.append(Finding(id="unread", key=written, text="is read by the script itself, and not here"))
    if tool is not None:
        _take_tool(part, tool, given, trainer)
    if trainer:
        part.trainer = {**(part.trainer or {}), **trainer}


def _take_tool(part: Part, tool: tools.Tool, given: Mapping[str, Any], trainer: dict[str, Any]) -> None:
    """What a recipe says by being this tool's."""
    part.tool, part.defaults = tool.name, dict(tool.defaults)
    if not lora.is_default(given):
        part.defaults.pop("lora", None)
    dtype = quantization.DTYPES.get(str(given.get("torch_dtype", "")).rpartition(".")[2])
    if tool.name == "ms-swift" and dtype in ("bfloat16", "float16") and not trainer.keys() & {"bf16", "fp16"}:
        trainer["bf16" if dtype == "bfloat16" else "fp16"] = True
    held = tools.beside(tool, given)
    if held is not None:
        part.unread.append(Finding(id="not-modelled", key=held[0], text=f"is {str(given[held[0]])[:20]}, which {held[1]}; that is not modelled: memory is at least what is said"))


def take_unknown(part: Part, whole: bool) -> None:
    """Of the arguments that nothing here reads, those that are known nowhere are told in one finding; the rest move no memory. `whole`: none of them is told."""
    keys = [f.key for f in part.unread if f.id == "unread" and not tools.moves_nothing(f.key)]
    part.unread = [f for f in part.unread if f.id != "unread"]
    if keys and not whole:
        several, shown = len(keys) > 1, ", ".join(key[:40] for key in keys[:20])
        part.unread.append(Finding(id="keys-unknown", key="", text=f"{shown}{' and others' if len(keys) > 20 else ''} {'are' if several else 'is'} not known here and not followed"))


def take_config(part: Part, key: str, value: Any) -> None:
    """`deepspeed` of the arguments: the config itself, or what names it."""
    if isinstance(value, Mapping):
        part.deepspeed = dict(value)
    elif value not in (None, False, "", True):
        part.names_config = key, str(value)[:400]
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
