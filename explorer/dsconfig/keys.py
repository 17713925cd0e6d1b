"""Every `zero_optimization` key of DeepSpeed 0.19, as data: its kind, default and least value (runtime/zero/config.py, offload_config.py).

DeepSpeed refuses a key that is not here, and takes numbers in any form pydantic does: 2e8 and "200000000" are integers, "2e8" is not.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from explorer.errors import BadInput, nearest, shown


class Key(NamedTuple):
    """How DeepSpeed reads one key. null stands for a default of None, and for no other."""

    kind: Literal["int", "bool", "float", "text", "device", "object", "list", "any"]
    default: Any
    least: float | None = None
    most: float = sys.maxsize


_MOST_ELEMENTS = 1 << 40
"""Of a buffer that DeepSpeed allocates: beyond it a typo is likelier than a computer."""

ZERO: dict[str, Key] = {
    "stage": Key("int", 0, 0),
    "contiguous_gradients": Key("bool", True),
    "reduce_scatter": Key("bool", True),
    "reduce_bucket_size": Key("int", 500_000_000, 1, _MOST_ELEMENTS),
    "use_multi_rank_bucket_allreduce": Key("bool", True),
    "allgather_partitions": Key("bool", True),
    "allgather_bucket_size": Key("int", 500_000_000, 0),
    "overlap_comm": Key("bool", None),
    "compute_grad_norm": Key("bool", True),
    "load_from_fp32_weights": Key("bool", True),
    "elastic_checkpoint": Key("bool", False),
    "offload_param": Key("object", None),
    "offload_optimizer": Key("object", None),
    "zenflow": Key("object", None),
    "sub_group_size": Key("int", 1_000_000_000, 0),
    "cpu_offload_param": Key("bool", None),
    "cpu_offload_use_pin_memory": Key("bool", None),
    "cpu_offload": Key("bool", None),
    "stage3_prefetch_bucket_size": Key("int", 50_000_000, 0, _MOST_ELEMENTS),
    "stage3_param_persistence_threshold": Key("int", 100_000, 0),
    "stage3_model_persistence_threshold": Key("int", sys.maxsize, 0),
    "stage3_max_live_parameters": Key("int", 1_000_000_000, 0),
    "stage3_max_reuse_distance": Key("int", 1_000_000_000, 0),
    "stage3_gather_16bit_weights_on_model_save": Key("bool", False),
    "stage3_module_granularity_threshold": Key("int", 0),
    "stage3_use_all_reduce_for_fetch_params": Key("bool", False),
    "stage3_allgather_sequential": Key("bool", False),
    "stage3_gather_fp16_weights_on_model_save": Key("bool", False),
    "ignore_unused_parameters": Key("bool", True),
    "legacy_stage1": Key("bool", False),
    "round_robin_gradients": Key("bool", False),
    "parameter_alignment": Key("bool", False),
    "zero_hpz_partition_size": Key("int", 1, 0),
    "zero_quantized_weights": Key("bool", False),
    "zero_quantized_nontrainable_weights": Key("bool", False),
    "zero_quantized_gradients": Key("bool", False),
    "memory_efficient_linear": Key("bool", True),
    "pipeline_loading_checkpoint": Key("bool", False),
    "override_module_apply": Key("bool", True),
    "log_trace_cache_warnings": Key("bool", False),
    "enable_sanity_checks": Key("bool", False),
    "save_muon_momentum_buffer_in_memory": Key("bool", False),
    "leaf_module": Key("object", None),
}
"""`zero_optimization`'s own keys, by the name people write."""

ALIASES = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "module_granularity_threshold": "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential": "stage3_allgather_sequential",
}
"""Field names that DeepSpeed takes in place of the written ones (`populate_by_name`)."""

OFFLOAD_OPTIMIZER: dict[str, Key] = {
    "device": Key("device", "none"),
    "nvme_path": Key("text", None),
    "buffer_count": Key("int", 4, 0),
    "pin_memory": Key("bool", True),
    "pipeline_read": Key("bool", False),
    "pipeline_write": Key("bool", False),
    "fast_init": Key("bool", False),
    "ratio": Key("float", 1.0, 0, 1),
    "super_offload": Key("bool", False),
    "cpuadam_cores_perc": Key("float", 0.8, 0, 1),
}

OFFLOAD_PARAM: dict[str, Key] = {
    "device": Key("device", "none"),
    "nvme_path": Key("text", None),
    "buffer_count": Key("int", 5, 0),
    "buffer_size": Key("int", 100_000_000, 0, _MOST_ELEMENTS),
    "max_in_cpu": Key("int", 1_000_000_000, 0),
    "pin_memory": Key("bool", True),
}

MOVED: dict[str, dict[str, str]] = {"zero_optimization": {
    "cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param", "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}}
"""Old keys that DeepSpeed still takes, but not beside the one that took their place."""

TRUE = {"true", "1", "on", "yes", "t", "y"}
FALSE = {"false", "0", "off", "no", "f", "n"}
"""The texts that pydantic takes for true and for false, in any case."""
_WHOLE = re.compile(r"\s*[+-]?\d+(_\d+)*(\.0+)?\s*", re.ASCII)


def read_section(section: Any, keys: Mapping[str, Key], path: str) -> dict[str, Any]:
    """All of `keys` with the values DeepSpeed would take from `section`; "auto" is the default, as there.

    Raises BadInput naming the key where DeepSpeed would refuse it.
    """
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise BadInput(path, f"is {shown(section)}; give an object")
    values = {name: key.default for name, key in keys.items()}
    written: dict[str, str] = {}
    for key, value in section.items():
        name = ALIASES.get(key, key) if keys is ZERO else key
        if name not in keys:
            raise BadInput(f"{path}.{key}", f"is not a key that DeepSpeed knows there, and it refuses unknown ones{nearest(key, [*keys, *(ALIASES if keys is ZERO else ())])}")
        if name in written:
            raise BadInput(f"{path}.{key}", f"is given together with {written[name]}, which is the same; keep one of them")
        written[name] = key
        if value != "auto":
            values[name] = read_value(value, keys[name], f"{path}.{key}")
    for old, new in MOVED.get(path.rpartition(".")[2], {}).items():
        if old in written and new in written:
            raise BadInput(f"{path}.{old}", f"is given together with {written[new]}, which DeepSpeed refuses; keep {written[new]}")
    return values


def read_value(value: Any, key: Key, path: str) -> Any:
    """One value as pydantic's lax mode reads it, but for a truth value in a number's place, which it takes for 1 or 0."""
    if value is None and key.default is None:
        return None
    match key.kind:
        case "int":
            return _within(_integer(value, path), key, path, "a whole number")
        case "float":
            return _within(_float(value, path), key, path, "a number")
        case "bool":
            return read_bool(value, path)
        case "device":
            if value not in ("none", "cpu", "nvme"):
                raise BadInput(path, f"is {shown(value)}; choose none, cpu or nvme")
        case "text":
            if not isinstance(value, str):
                raise BadInput(path, f"is {shown(value)}; give a text")
        case "object":
            if not isinstance(value, Mapping):
                raise BadInput(path, f"is {shown(value)}; give an object")
        case "list":
            if not isinstance(value, list):
                raise BadInput(path, f"is {shown(value)}; give a list")
    return value


def read_count(value: Any, path: str) -> int:
    """A batch-like count, which DeepSpeed reckons with as it is written: a text is none."""
    if isinstance(value, str):
        raise BadInput(path, f"is the text {shown(value)}, which DeepSpeed cannot reckon with{_unquoted(value) or '; give a whole number'}")
    return read_value(value, Key("int", 1, 1, 1 << 32), path)


def read_bool(value: Any, path: str) -> bool:
    """True or False in any of the forms pydantic takes."""
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in TRUE | FALSE:
        return value.lower() in TRUE
    raise BadInput(path, f"is {shown(value)}; give true or false")


def _within(number: float, key: Key, path: str, kind: str) -> Any:
    if key.least is not None and number < key.least:
        raise BadInput(path, f"is {shown(number)}; give {kind} {f'from {key.least} to {key.most}' if key.most <= 1 else f'of at least {key.least}'}")
    if number > key.most:
        raise BadInput(path, f"is {shown(number)}; give {kind} from {key.least} to {key.most}" if key.most <= 1 else f"is {shown(number)}, which no machine can hold; give at most {key.most}")
    return number


def _integer(value: Any, path: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _WHOLE.fullmatch(value) and len(value) < 100:
        return int(value.partition(".")[0])
    if isinstance(value, str):
        raise BadInput(path, f"is the text {shown(value)}, which DeepSpeed refuses{_unquoted(value) or '; give a whole number'}")
    raise BadInput(path, f"is {shown(value)}; give a whole number")


def _float(value: Any, path: str) -> float:
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    except (ValueError, OverflowError):
        pass
    raise BadInput(path, f"is {shown(value)}; give a number")


def _unquoted(text: str) -> str:
    """The way out for a number in quotes."""
    try:
        return f"; write {int(float(text))} without quotes" if float(text).is_integer() else ""
    except (ValueError, OverflowError):
        return ""
