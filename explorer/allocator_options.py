"""The options of PyTorch's CUDA caching allocator: checked as a job has them, read from PYTORCH_CUDA_ALLOC_CONF, and written as it. No torch.

PyTorch reads the variable in c10/core/AllocatorConfig.cpp: `name:value` pairs with commas between, `[256:1,512:2,>:4]` for a list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from explorer.errors import BadInput, nearest, shown

KNOWN = ("expandable_segments", "max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions")
"""Options that a job's `allocator` takes; PyTorch's own names."""
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The variable's names; the second is torch 2.10's and newer."""
LEAST_SPLIT_MB = 20
"""MiB of PyTorch's large segments: it takes no smaller size (`parseMaxSplitSize`)."""
_MOST_MB = 1 << 40
_INTERVALS = 16
"""Sizes whose divisions PyTorch keeps apart: 1 MiB, 2 MiB, 4 MiB, … 32 GiB and more (`kRoundUpPowerOfTwoIntervals`)."""
_IGNORED = {
    "backend", "pinned_use_cuda_host_register", "pinned_use_hip_host_register", "pinned_num_register_threads", "pinned_use_background_threads", "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb", "pinned_free_catch_all", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom", "max_non_split_rounding_mb", "large_segment_size_mb", "per_process_memory_fraction",
}
"""PyTorch's other options: taken, and not part of a job."""


def check(options: Mapping[str, Any]) -> None:
    """Raise BadInput for an option or a value that PyTorch would refuse."""
    for key in options:
        if key not in KNOWN:
            raise BadInput(f"allocator.{key}", f"is not an allocator option{nearest(key, set(KNOWN)) or '; the options are ' + ', '.join(KNOWN)}")
    expandable = options.get("expandable_segments", False)
    if not isinstance(expandable, bool):
        raise BadInput("allocator.expandable_segments", f"is {shown(expandable)}; give true or false")
    _check_split(options.get("max_split_size_mb"))
    _check_threshold(options.get("garbage_collection_threshold"))
    divisions(options.get("roundup_power2_divisions"))


def _check_split(split: Any) -> None:
    if split is None:
        return
    if isinstance(split, bool) or not isinstance(split, int) or split < LEAST_SPLIT_MB:
        raise BadInput("allocator.max_split_size_mb", f"is {shown(split)}; PyTorch takes a whole number of at least 20")
    if split > _MOST_MB:
        raise BadInput("allocator.max_split_size_mb", f"is {shown(split)}, which is no size of memory; leave it out to split every block")


def _check_threshold(threshold: Any) -> None:
    if threshold is None:
        return
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < 1:
        raise BadInput("allocator.garbage_collection_threshold", f"is {shown(threshold)}; PyTorch takes a number between 0 and 1, such as 0.8")


def divisions(asked: Any) -> tuple[int, ...]:
    """Divisions of each interval of sizes, () where none are asked for. `asked`: one number for all sizes, or an object of MiB → number, ">" for all larger.

    As `parseRoundUpPower2Divisions` fills them: a size's number holds up to twice that size, the first one's for every smaller size too, and ">" for
    every size beyond the last one; sizes in between that are not named are not divided.
    """
    if asked is None:
        return ()
    if not isinstance(asked, Mapping):
        return (_power(asked, "allocator.roundup_power2_divisions", 1),) * _INTERVALS
    found, last, first = [0] * _INTERVALS, 0, True
    for size, number in _in_order(asked):
        count = _power(number, f"allocator.roundup_power2_divisions.{size}")
        if size == ">":
            found[last + 1 :] = [count] * (_INTERVALS - last - 1)
            continue
        last = min(_size(size).bit_length() - 1, _INTERVALS - 1)
        if first:
            found[:last] = [count] * last
            first = False
        found[last] = count
    return tuple(found)


def _in_order(asked: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A list's pairs by size, ">" last: an object has no order, and PyTorch reads from left to right."""
    return sorted(asked.items(), key=lambda pair: (pair[0] == ">", _size(pair[0]) if pair[0] != ">" else 0))


def _power(number: Any, field: str, least: int = 0) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least or number & (number - 1) or number > 1 << 20:
        raise BadInput(field, f"is {shown(number)}; PyTorch takes a power of 2, such as 4")
    return number


def _size(text: Any) -> int:
    size = int(text) if isinstance(text, str) and re.fullmatch(r"[0-9]{1,12}", text) else 0
    if size < 1 or size & (size - 1):
        raise BadInput("allocator.roundup_power2_divisions", f"has the size {shown(text)}; sizes are powers of 2 in MiB, and \">\" for all larger ones")
    return size


# --- the variable


@dataclass(frozen=True, slots=True)
class Read:
    """What a text of PYTORCH_CUDA_ALLOC_CONF says."""

    options: Mapping[str, Any]
    """A job's `allocator`."""
    ignored: tuple[str, ...] = ()
    """Options of PyTorch that a job does not have."""
    refused: tuple[str, ...] = ()
    """Sentences on what PyTorch would stop at."""


def read(text: str) -> Read:
    """The options in a value of PYTORCH_CUDA_ALLOC_CONF. Never raises: what PyTorch would refuse is told in `refused`."""
    options: dict[str, Any] = {}
    ignored, refused = [], []
    for name, value in _pairs(text):
        if name in _IGNORED:
            ignored.append(name)
            continue
        try:
            if name not in KNOWN:
                raise BadInput(name, f"is not an option of PyTorch's allocator{nearest(name, {*KNOWN, *_IGNORED})}")
            found = _VALUES[name](value)
            check({name: found})
            options[name] = found
        except BadInput as error:
            refused.append(str(error).removeprefix("allocator."))
    return Read({k: v for k, v in options.items() if v is not False}, tuple(ignored), tuple(refused))


def _pairs(text: str) -> list[tuple[str, str]]:
    """(name, value) of each option; a list's commas do not divide."""
    bare = re.sub(r"\s", "", text.strip().strip("\"'"))[:4096]
    parts = re.findall(r"[^,\[\]]*(?:\[[^\]]*\]?)?[^,\[\]]*", bare)
    return [(name, value) for part in parts if part for name, _, value in [part.partition(":")]]


def _truth(value: str) -> Any:
    """PyTorch takes True and False; other spellings are taken as what they mean."""
    return {"true": True, "1": True, "false": False, "0": False}.get(value.lower(), value)


def _number(value: str) -> Any:
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if math.isfinite(number) and number.is_integer() and "." not in value else number


def _divided(value: str) -> Any:
    if not value.startswith("["):
        return _number(value)
    pairs = [pair.partition(":") for pair in value.strip("[]").split(",") if pair]
    return {size: _number(number) for size, _, number in pairs}


_VALUES = {"expandable_segments": _truth, "max_split_size_mb": _number, "garbage_collection_threshold": _number, "roundup_power2_divisions": _divided}


def written(options: Mapping[str, Any]) -> str:
    """A job's `allocator` as a value of PYTORCH_CUDA_ALLOC_CONF; "" where it is PyTorch's default."""
    parts = []
    for name in KNOWN:
        value = options.get(name)
        if value is None or value is False:
            continue
        if isinstance(value, Mapping):
            value = f"[{','.join(f'{size}:{number}' for size, number in _in_order(value))}]"
        parts.append(f"{name}:{value}")
    return ",".join(parts)
