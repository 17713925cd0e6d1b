"""Weights in 4 bit as recipes ask for them: bitsandbytes' own keys, and those of TRL, LLaMA-Factory, ms-swift, axolotl, open-instruct, unsloth. No torch.

It is a property of the model here: a model's config with a `quantization_config` in it (docs/contract.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.catalog import catalog_name, find_model
from explorer.catalog.names import BITSANDBYTES_4_BIT
from explorer.dsconfig.findings import Finding

_SWITCHES = ("load_in_4bit", "use_qlora")
_BITS = ("quantization_bit", "quant_bits")
_OURS = {
    "bnb_4bit_quant_type": ("bnb_4bit_quant_type", "quantization_type"),
    "bnb_4bit_use_double_quant": ("bnb_4bit_use_double_quant", "double_quantization", "use_bnb_nested_quant", "bnb_4bit_comp_double_quant"),
    "bnb_4bit_compute_dtype": ("bnb_4bit_compute_dtype", "bnb_4bit_comp_dtype"),
}
"""Key of a quantization_config → the arguments that give it."""
_BESIDE = {
    "quant_method", "quantization_method", "bnb_4bit_quant_storage", "quantization_device_map", "llm_int8_threshold",
    "llm_int8_has_fp16_weight", "llm_int8_enable_fp32_cpu_offload",
}
"""What moves no memory that is followed here."""
_DOUBLE = ("use_qlora", *_BITS)
"""Arguments of tools that quantize the scales too, where nothing says otherwise."""
DTYPES = {"float32": "float32", "fp32": "float32", "float16": "float16", "fp16": "float16", "half": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16"}


def take(given: Mapping[str, Any]) -> tuple[dict[str, Any] | None, set[str]]:
    """(a quantization_config of bitsandbytes' 4 bit, None where it is not asked for; the arguments that were read for it)."""
    section = given.get("quantization_config")
    if isinstance(section, Mapping):
        found, _ = take(section)
        return found, {"quantization_config"} if found is not None else set()
    switch = next((name for name in _SWITCHES if given.get(name) is True), None)
    bits = next((name for name in _BITS if _is_four(given.get(name))), None)
    qlora = str(given.get("adapter", "")).lower() == "qlora"
    named = {name for names in _OURS.values() for name in names} | _BESIDE
    read = {name for name in (*named, *_SWITCHES, *_BITS) if name in given and (name in named or given[name] in (None, False, 0, 4))}
    if switch is None and bits is None and not qlora or str(given.get("quant_method", "bnb")).lower() not in ("bnb", "bitsandbytes"):
        return None, read
    asked = switch or bits or ""
    found = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4" if asked in _DOUBLE else "fp4"}
    found["bnb_4bit_use_double_quant"] = asked in _DOUBLE or qlora
    if qlora or asked == "load_in_4bit" and "base_model" in given:
        found |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}  # axolotl's
    for key, names in _OURS.items():
        value = next((given[name] for name in names if given.get(name) is not None), None)
        if value is not None:
            found[key] = DTYPES.get(str(value).rpartition(".")[2], "float32") if key.endswith("dtype") else value
    return found, read | ({switch} if switch else set())


def _is_four(value: Any) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool) and str(value) in ("4", "4.0")


def onto(changes: dict[str, Any], section: Mapping[str, Any], dtype: str) -> Finding | None:
    """Put it into a job's model, and tell where that cannot be followed. `dtype`: what the tool computes in where it does not say."""
    key, model = "load_in_4bit", changes.get("model")
    if changes.get("lora") is None:
        return Finding(id="not-modelled", key=key, text="asks for weights in 4 bit, which train only under adapters, and no LoRA is given: whole weights are taken; give the LoRA too")
    if isinstance(model, Mapping):
        changes["model"] = {**model, "quantization_config": _whole(section, dtype)} if "quantization_config" not in model else model
        return None
    known = catalog_name(model) if isinstance(model, str) else None
    if known is None:
        unless = isinstance(model, str) and "4bit" in model.lower()
        return None if unless or model is None else Finding(id="not-modelled", key=key, text="asks for weights in 4 bit, which are followed for a model of the catalog, or where the model's own config.json is pasted; whole weights are taken here")
    full = _whole(section, dtype)
    if full == BITSANDBYTES_4_BIT:
        changes["model"] = f"{known}-bnb-4bit"
    else:
        changes["model"] = {**find_model(known).config, "_name_or_path": known, "quantization_config": full}
    return None


def _whole(section: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """With every key that moves memory, and of two kinds of 4 bit the one that the catalog names: they take the same."""
    whole = {**section, "bnb_4bit_quant_type": "nf4"}
    whole.setdefault("bnb_4bit_compute_dtype", dtype)
    return {key: whole.get(key, value) for key, value in BITSANDBYTES_4_BIT.items()}
