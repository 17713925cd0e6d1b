"""A DeepSpeed config as people bring it, made into one that DeepSpeed 0.19.8 takes; every change that DeepSpeed would have stopped at is told. No torch.

Order is kept, and so is every key that DeepSpeed takes, known here or not.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from explorer.dsconfig.findings import Finding
from explorer.dsconfig.keys import ALIASES, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, ZERO, Key, read_count, read_value
from explorer.dsconfig.sections import LEAF_MODULE, REMOVED, REMOVED_ZERO, SECTIONS
from explorer.errors import BadInput, shown

MOST_TOLD = 100
"""Of one text; after so many it is no configuration, and slips of the pen are no longer looked for."""
_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SWITCHES = frozenset((
    "managed_gradient_accumulation", "dump_state", "disable_python_gc", "disable_allgather", "prescale_gradients", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "wall_clock_breakdown", "memory_breakdown",
    "use_data_before_expert_parallelism", "dataloader_drop_last",
))
_SWITCHED = ("torch_autocast", "flops_profiler")
"""Keys at the top, and sections whose "enabled" is such, that DeepSpeed takes as they are: any text is true there, and of two it reckons with, it is an error."""
_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_optimizer": "offload_optimizer", "cpu_offload_param": "offload_param", "cpu_offload_params": "offload_param"}
"""Old switches of `zero_optimization`, two of which DeepSpeed still takes, and the sections that took their place."""
_RENAMED = {"stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save", "zero_stage": "stage"}


def coerced(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """(the config as DeepSpeed takes it, what was changed)."""
    told: list[Finding] = []
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in REMOVED:
            told.append(Finding(id="key-removed", key=key, text=f"was removed from DeepSpeed, which refuses it now; left out: {REMOVED[key]}"))
        elif key == "bfloat16" and "bf16" not in config:
            told.append(Finding(id="key-renamed", key=key, text="is an old name, which accelerate passes over; read as bf16"))
            found["bf16"] = _section(value, SECTIONS["bf16"], "bf16", told)
        elif key == "zero_optimization":
            found[key] = _zero(value, told)
        elif key in SECTIONS:
            found[key] = _section(value, SECTIONS[key], key, told)
        elif key in _COUNTS:
            found[key] = _count(value, key, told)
        elif key == "optimizer" and isinstance(value, Mapping):
            found[key] = _optimizer(value, told)
        elif key == "gradient_clipping":
            found[key] = _unquoted(value, key, told)
        elif key in _SWITCHES and isinstance(value, str):
            found[key] = _value(value, Key("bool", False), key, told, always=True)
        elif key in _SWITCHED and isinstance(value, Mapping) and isinstance(value.get("enabled"), str):
            found[key] = {**value, "enabled": _value(value["enabled"], Key("bool", False), f"{key}.enabled", told, always=True)}
        else:
            found[key] = value
    return found, told


def _zero(section: Any, told: list[Finding]) -> Any:
    path = "zero_optimization"
    if isinstance(section, bool | int | float):
        told.append(Finding(id="section-made", key=path, text=f"is {shown(section)}, and must be an object; read as stage {int(section)}"))
        return {"stage": int(section)}
    if not isinstance(section, Mapping):
        return section
    found: dict[str, Any] = {}
    for key, value in section.items():
        name = _RENAMED.get(key, key)
        if name != key and name not in section:
            told.append(Finding(id="key-renamed", key=f"{path}.{key}", text=f"is an old name; read as {name}"))
            found[name] = _value(value, ZERO[name], f"{path}.{key}", told)
        elif key in _OFFLOADS:
            _old_offload(key, value, section, found, told)
        elif key in REMOVED_ZERO:
            told.append(Finding(id="key-removed", key=f"{path}.{key}", text=f"was removed from DeepSpeed, which refuses it now; left out: {REMOVED_ZERO[key]}"))
        elif key in ("offload_optimizer", "offload_param"):
            found[key] = _offload(value, OFFLOAD_OPTIMIZER if key == "offload_optimizer" else OFFLOAD_PARAM, f"{path}.{key}", told)
        elif key == "leaf_module":
            found[key] = _section(value, LEAF_MODULE, f"{path}.{key}", told)
        elif (known := _known(key, ZERO, section, path, told)) is not None:
            found[known] = _value(value, ZERO[ALIASES.get(known, known)], f"{path}.{key}", told)
    return found


def _old_offload(key: str, value: Any, section: Mapping[str, Any], found: dict[str, Any], told: list[Finding]) -> None:
    """`cpu_offload: true` of 2021."""
    new, path = _OFFLOADS[key], f"zero_optimization.{key}"
    on = _meant(value, Key("bool", False)) is True
    said = f"is an old switch; read as {new}" if on else "is an old switch that is off; left out"
    if new in section:
        said = f"is given together with {new}, which DeepSpeed refuses; left out"
    elif on:
        found[new] = {"device": "cpu", **({"pin_memory": section["cpu_offload_use_pin_memory"]} if isinstance(section.get("cpu_offload_use_pin_memory"), bool) else {})}
    told.append(Finding(id="key-renamed", key=path, text=said))


def _offload(value: Any, keys: Mapping[str, Key], path: str, told: list[Finding]) -> Any:
    if isinstance(value, str):
        told.append(Finding(id="section-made", key=path, text=f"is {shown(value)}, and must be an object; read as its device"))
        value = {"device": value}
    if isinstance(value, bool):
        told.append(Finding(id="section-made", key=path, text=f"is {shown(value)}, and must be an object; read as device {'cpu' if value else 'none'}"))
        value = {"device": "cpu" if value else "none"}
    return _section(value, keys, path, told)


def _section(section: Any, keys: Mapping[str, Key], path: str, told: list[Finding]) -> Any:
    """A section that refuses unknown keys."""
    if (isinstance(section, bool) or section == "auto") and "enabled" in keys:
        told.append(Finding(id="section-made", key=path, text=f"is {shown(section)}, and must be an object; read as \"enabled\""))
        return {"enabled": section}
    if not isinstance(section, Mapping):
        return section
    found = {}
    for key, value in section.items():
        if (known := _known(key, keys, section, path, told)) is not None:
            found[known] = _value(value, keys[known], f"{path}.{key}", told)
    return found


def _known(key: str, keys: Mapping[str, Key], section: Mapping[str, Any], path: str, told: list[Finding]) -> str | None:
    """The key that was meant; None for one that nothing is near to."""
    if key in keys or keys is ZERO and key in ALIASES:
        return key
    names = [*keys, *(ALIASES if keys is ZERO else ())] if len(told) < MOST_TOLD else []
    near = [name for name in difflib.get_close_matches(key[:100], names, 3, 0.85) if name not in section]
    told.append(Finding(id="key-unknown", key=f"{path}.{key}", text=f"is no key that DeepSpeed knows there, and it refuses unknown ones; {f'read as {near[0]}' if near else 'left out'}"))
    return near[0] if near else None


def _value(value: Any, key: Key, path: str, told: list[Finding], always: bool = False) -> Any:
    """The value as it is where DeepSpeed takes it, else what was meant; left alone where that is unclear, for `resolve` to name."""
    if value == "auto":
        return value
    try:
        read_value(value, key, path)
        if not always:
            return value
    except BadInput:
        pass
    meant = _meant(value, key)
    if meant is None:
        return value
    told.append(Finding(id="value-coerced", key=path, text=f"is {_kind(value)}, which DeepSpeed {'misreads' if always else 'refuses'}; read as {shown(meant)}"))
    return meant


def _meant(value: Any, key: Key) -> Any:
    match key.kind:
        case "int" | "float":
            number = _number(value)
            return number if number is None or key.kind == "float" else int(number) if float(number).is_integer() else None
        case "bool":
            word = str(value).strip().lower()
            return word in ("true", "yes", "on", "1", "1.0") if word in ("true", "false", "yes", "no", "on", "off", "1", "0", "1.0", "0.0", "none", "null", "") else None
        case "device":
            word = "none" if value in (None, False) else str(value).strip().lower()
            return {"gpu": "none", "cuda": "none", "null": "none", "disk": "nvme", "": "none"}.get(word, word if word in ("none", "cpu", "nvme") else None)
    return None


_NUMERAL = re.compile(r"\s*([+-]?[\d_,]*\.?\d+(?:e[+-]?\d+)?)\s*([kmgb]?)\s*", re.IGNORECASE)
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def _number(value: Any) -> int | float | None:
    """A number out of a text such as "5e8", "500_000_000" or "200M"."""
    match = _NUMERAL.fullmatch(value) if isinstance(value, str) and len(value) < 60 else None
    if match is None:
        return None
    try:
        number = float(match[1].replace("_", "").replace(",", "")) * _SCALE[match[2].lower()]
    except (ValueError, OverflowError):
        return None
    return int(number) if abs(number) < 1e18 and number.is_integer() else number if abs(number) < 1e18 else None


def _kind(value: Any) -> str:
    return f"the text {shown(value)}" if isinstance(value, str) else shown(value)


def _count(value: Any, path: str, told: list[Finding]) -> Any:
    """A batch key, with which DeepSpeed reckons as it is written."""
    if value in (None, "auto"):
        return value
    try:
        read_count(value, path)
        return value
    except BadInput:
        return _value(value, Key("int", 1, 1), path, told, always=True) if isinstance(value, str) else value


def _unquoted(value: Any, path: str, told: list[Finding]) -> Any:
    number = _number(value) if value != "auto" else None
    if number is None:
        return value
    told.append(Finding(id="value-coerced", key=path, text=f"is the text {shown(value)}, which DeepSpeed cannot reckon with; read as {shown(number)}"))
    return number


def _optimizer(section: Mapping[str, Any], told: list[Finding]) -> dict[str, Any]:
    """Numbers in quotes, which the optimizer itself would stop at."""
    params = section.get("params")
    if not isinstance(params, Mapping):
        return dict(section)
    found = {}
    for key, value in params.items():
        path = f"optimizer.params.{key}"
        found[key] = [_unquoted(v, path, told) for v in value] if isinstance(value, list) else _unquoted(value, path, told)
    return {**section, "params": found}
