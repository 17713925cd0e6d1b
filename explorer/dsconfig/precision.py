"""The number types of a job: of its weights, of what autocast computes in, of the gradients that are added up. No torch.

Each reads a resolved config and raises BadInput naming the key that DeepSpeed would refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from explorer.dsconfig.keys import read_bool, read_section
from explorer.dsconfig.sections import SECTIONS
from explorer.errors import BadInput, shown

Precision = Literal["fp32", "fp16", "bf16"]

_DTYPES: dict[str, Precision] = {name: kind for kind, names in {
    "fp32": ("fp32", "float32", "float", "torch.float32"), "fp16": ("fp16", "float16", "half", "torch.float16"), "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}.items() for name in names}
"""The names that DeepSpeed has for a type (runtime/config.py, `DtypeEnum`)."""


def of_weights(config: Mapping[str, Any]) -> Precision:
    """The weights' type. "bfloat16" is an old name that counts where there is no bf16."""
    bf16 = config.get("bf16")
    written = {"fp16": config.get("fp16", {}), "bf16": config.get("bfloat16", {}) if bf16 is None else bf16}
    enabled = [name for name, section in written.items() if read_section(section, SECTIONS[name], f"deepspeed.{name}")["enabled"]]
    if len(enabled) == 2:
        raise BadInput("deepspeed.bf16.enabled", "is true while fp16.enabled is true too, which DeepSpeed refuses; turn one of them off")
    return enabled[0] if enabled else "fp32"


def of_autocast(config: Mapping[str, Any], precision: Precision) -> Literal["fp16", "bf16"] | None:
    """What torch.autocast computes in, where the weights are fp32."""
    section = config.get("torch_autocast", {})
    modules = section.get("lower_precision_safe_modules", [])
    if not isinstance(modules, list | str) or not all(isinstance(name, str) for name in modules):
        raise BadInput("deepspeed.torch_autocast.lower_precision_safe_modules", f"is {shown(modules)}; give a list of class names such as \"torch.nn.Linear\"")
    enabled = section.get("enabled", False)
    if isinstance(enabled, str):
        raise BadInput("deepspeed.torch_autocast.enabled", f"is the text {shown(enabled)}, and DeepSpeed takes every text for true; write true or false without quotes")
    if "dtype" in section and (not isinstance(section["dtype"], str) or section["dtype"] not in _DTYPES):
        raise BadInput("deepspeed.torch_autocast.dtype", f"is {shown(section['dtype'])}; choose bfloat16 or float16")
    if not read_bool(enabled, "deepspeed.torch_autocast.enabled") or precision != "fp32":
        return None
    if "dtype" not in section:
        raise BadInput("deepspeed.torch_autocast.dtype", "is missing, and DeepSpeed has no default for it; write \"bfloat16\" or \"float16\"")
    dtype = _DTYPES[section["dtype"]]
    if dtype == "fp32":
        raise BadInput("deepspeed.torch_autocast.dtype", "is fp32, for which torch turns autocast off; choose bfloat16 or float16, or leave torch_autocast out")
    return dtype


def of_accumulation(config: Mapping[str, Any], precision: Precision, default: Precision) -> Precision:
    """The type that gradients are added up in, by `data_types`, whose other types must suit the weights; `default` where it does not say."""
    types = config.get("data_types", {})
    kinds = {}
    for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        written = types.get(key)
        if written is not None and (not isinstance(written, str) or written not in _DTYPES):
            raise BadInput(f"deepspeed.data_types.{key}", f"is {shown(written)}; choose fp32, fp16 or bf16")
        unsaid = default if key == "grad_accum_dtype" else precision
        kinds[key] = unsaid if written is None else _DTYPES[written]
    if kinds["param_dtype"] != precision:
        raise BadInput("deepspeed.data_types.param_dtype", f"is {kinds['param_dtype']} while the weights are {precision}, which DeepSpeed refuses; enable {kinds['param_dtype']}, or leave it out")
    return kinds["grad_accum_dtype"]
