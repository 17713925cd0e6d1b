"""Every `zero_optimization` key of DeepSpeed 0.19, as data: its kind, default and least value (runtime/zero/config.py, offload_config.py).

DeepSpeed refuses a key that is not here, and takes numbers in any form pydantic does: 2e8 and "200000000" are integers, "2e8" is not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from explorer.errors import BadInput


class Key(NamedTuple):
    """How DeepSpeed reads one key."""

    kind: Literal["int", "bool", "float", "text", "device", "object"]
    default: Any
    least: int | None = None
    most: int = sys.maxsize


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
    "ratio": Key("float", 1.0, 0),
    "super_offload": Key("bool", False),
    "cpuadam_cores_perc": Key("float", 0.8, 0),
}

OFFLOAD_PARAM: dict[str, Key] = {
    "device": Key("device", "none"),
    "nvme_path": Key("text", None),
    "buffer_count": Key("int", 5, 0),
    "buffer_size": Key("int", 100_000_000, 0, _MOST_ELEMENTS),
    "max_in_cpu": Key("int", 1_000_000_000, 0),
    "pin_memory": Key("bool", True),
}

_TRUE = {"true", "1", "on", "yes", "t", "y"}
_FALSE = {"false", "0", "off", "no", "f", "n"}


def read_section(section: Any, keys: Mapping[str, Key], path: str) -> dict[str, Any]:
    """All of `keys` with the values DeepSpeed would take from `section`; "auto" is the default, as there.

    Raises BadInput naming the key where DeepSpeed would refuse it.
    """
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise BadInput(path, f"is {section!r}; DeepSpeed takes an object here")
    values = {name: key.default for name, key in keys.items()}
    for written, value in section.items():
        name = ALIASES.get(written, written) if keys is ZERO else written
        if name not in keys:
            import difflib

            near = difflib.get_close_matches(str(written), keys, 1, 0.5)
            raise BadInput(f"{path}.{written}", "is not a key that DeepSpeed knows there, and it refuses unknown ones" + (f"; did you mean {near[0]!r}?" if near else ""))
        if value != "auto":
            values[name] = read_value(value, keys[name], f"{path}.{written}")
    return values


def read_value(value: Any, key: Key, path: str) -> Any:
    """One value as pydantic's lax mode reads it."""
    if value is None and key.default is None:
        return None
    match key.kind:
        case "int":
            number = _integer(value, path)
            if key.least is not None and number < key.least:
                raise BadInput(path, f"is {value}; DeepSpeed takes a whole number of at least {key.least}")
            if number > key.most:
                raise BadInput(path, f"is {value}, which no machine can hold; give at most {key.most}")
            return number
        case "float":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise BadInput(path, f"is {value!r}; DeepSpeed takes a number from 0 to 1")
            return float(value)
        case "bool":
            return read_bool(value, path)
        case "device":
            if value not in ("none", "cpu", "nvme"):
                raise BadInput(path, f"is {value!r}; choose none, cpu or nvme")
            return value
        case "text":
            if not isinstance(value, str):
                raise BadInput(path, f"is {value!r}; give a path")
            return value
        case "object":
            if not isinstance(value, Mapping):
                raise BadInput(path, f"is {value!r}; DeepSpeed takes an object here")
            return value


def read_count(value: Any, path: str) -> int:
    """A batch-like count in a DeepSpeed config."""
    return read_value(value, Key("int", 1, 1, 1 << 32), path)


def read_bool(value: Any, path: str) -> bool:
    """True or False in any of the forms pydantic takes."""
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise BadInput(path, f"is {value!r}; give true or false")


def _integer(value: Any, path: str) -> int:
    if isinstance(value, bool):
        raise BadInput(path, f"is {value}; DeepSpeed takes a whole number")
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        try:
            return int(value.replace("_", ""))
        except ValueError:
            hint = ""
            try:
                hint = f"; write {int(float(value))} without quotes"
            except (ValueError, OverflowError):
                pass
            raise BadInput(path, f"is the text {value!r}, which DeepSpeed refuses{hint or '; give a whole number'}") from None
    raise BadInput(path, f"is {value!r}; DeepSpeed takes a whole number")
