"""DeepSpeed configs that a text only names: those that training tools ship, and what a file's name says. No file is opened. No torch.

Read from ms-swift 3.8 (swift/llm/ds_config, swift/config), LLaMA-Factory 0.9 (examples/deepspeed), axolotl
(deepspeed_configs), open-instruct (configs/ds_configs) and TRL (examples/accelerate_configs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_FILLED = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
}
_FP16 = {"fp16": {"enabled": "auto"}}
_BUCKETS_3 = {
    "contiguous_gradients": True, "sub_group_size": 10**9, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_CPU = {"device": "cpu", "pin_memory": True}
_OFFLOAD = {"offload_optimizer": _CPU, "offload_param": _CPU}


class Shipped(NamedTuple):
    """A config that comes with a tool."""

    config: Mapping[str, Any]
    whose: str
    """The tool."""


def _zero(extra: Mapping[str, Any], **zero: Any) -> dict[str, Any]:
    return {**_FILLED, **extra, "zero_optimization": zero}


def _two(bucket: int) -> dict[str, Any]:
    """What two tools have at stages 0 to 2. `bucket`: elements."""
    return {
        "allgather_bucket_size": bucket, "overlap_comm": False, "reduce_scatter": True, "reduce_bucket_size": bucket,
        "contiguous_gradients": True,
    }


def _swift() -> dict[str, dict[str, Any]]:
    two = _two(2 * 10**8)
    three = {**_BUCKETS_3, "overlap_comm": False}
    return {
        "zero0": _zero(_FP16, stage=0, **two), "zero1": _zero(_FP16, stage=1, **two), "zero2": _zero(_FP16, stage=2, **two),
        "zero2_offload": _zero(_FP16, stage=2, offload_optimizer=_CPU, **two),
        "zero3": _zero(_FP16, stage=3, **three), "zero3_offload": _zero(_FP16, stage=3, **_OFFLOAD, **three),
    }


def _llama_factory() -> dict[str, dict[str, Any]]:
    two = {**_two(5 * 10**8), "round_robin_gradients": True}
    three, more = {**_BUCKETS_3, "overlap_comm": False}, {**_FP16, "zero_allow_untested_optimizer": True}
    return {
        "ds_z0_config.json": _zero(more, stage=0, **two), "ds_z2_config.json": _zero(more, stage=2, **two),
        "ds_z2_offload_config.json": _zero(more, stage=2, offload_optimizer=_CPU, **two),
        "ds_z3_config.json": _zero(more, stage=3, **three), "ds_z3_offload_config.json": _zero(more, stage=3, **_OFFLOAD, **three),
    }


def _axolotl() -> dict[str, dict[str, Any]]:
    three = {**_BUCKETS_3, "overlap_comm": True, "sub_group_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    bf16 = {"bf16": {"enabled": True}}
    untested = {**bf16, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {
        "deepspeed_configs/zero1.json": _zero(_FP16, stage=1, overlap_comm=True),
        "deepspeed_configs/zero2.json": _zero(_FP16, stage=2, offload_optimizer={"device": "cpu"}, contiguous_gradients=True, overlap_comm=True),
        "deepspeed_configs/zero3.json": _zero(_FP16, stage=3, **three),
        "deepspeed_configs/zero3_bf16.json": _zero(bf16, stage=3, **three),
        "deepspeed_configs/zero3_bf16_cpuoffload_params.json": _zero(untested, stage=3, offload_param=_CPU, **three),
        "deepspeed_configs/zero3_bf16_cpuoffload_all.json": _zero(untested, stage=3, **_OFFLOAD, **three),
    }


def _open_instruct() -> dict[str, dict[str, Any]]:
    three = {**_BUCKETS_3, "overlap_comm": True}
    return {
        "stage2_accelerate.conf": _zero({}, stage=2, overlap_comm=True, contiguous_gradients=True, reduce_bucket_size="auto"),
        "stage3_no_offloading_accelerate.conf": _zero({}, stage=3, **three), "stage3_no_offloading.conf": _zero({}, stage=3, **three),
        "stage3_offloading_accelerate.conf": _zero({}, stage=3, **_OFFLOAD, **three), "stage3_offloading.conf": _zero({}, stage=3, **_OFFLOAD, **three),
    }


_TOOLS = {"ms-swift": _swift(), "LLaMA-Factory": _llama_factory(), "axolotl": _axolotl(), "open-instruct": _open_instruct()}
_SHIPPED = {name: Shipped(config, tool) for tool, configs in _TOOLS.items() for name, config in configs.items()}
_LONGEST = 400


def shipped(name: str) -> Shipped | None:
    """The config of a name that a tool gives to one of its own: "zero2", "examples/deepspeed/ds_z3_config.json"."""
    parts = name[:_LONGEST].strip().replace("\\", "/").split("/")
    alone = parts[0].lower().replace("-", "_").removeprefix("default_") if len(parts) == 1 else ""  # ms-swift 2 wrote default-zero2, zero3-offload
    return _SHIPPED.get(alone if "." not in alone else "") or _SHIPPED.get(parts[-1]) or _SHIPPED.get("/".join(parts[-2:]))


_STAGE = re.compile(r"(?:zero|stage|(?<![a-z])[zs])[-_]?([0-3])(?![0-9])", re.IGNORECASE)
_KEPT = re.compile(r"no[-_]?(?:cpu)?[-_]?off[-_]?load|without[-_]?off", re.IGNORECASE)
_MOVED = re.compile(r"off[-_]?load|cpu", re.IGNORECASE)
_PARAMETERS = re.compile(r"param|all", re.IGNORECASE)
_OPTIMIZER = re.compile(r"opt(?:im)?(?:izer)?(?![a-z])", re.IGNORECASE)


def by_name(name: str) -> dict[str, Any] | None:
    """A config of what a file's name says: "ds_z2.json", "zero3_offload.json", "stage3-cpu.yaml"; None where it says no stage."""
    base = name[:_LONGEST].replace("\\", "/").rpartition("/")[2]
    found = _STAGE.findall(base)
    if not found:
        return None
    stage = int(found[-1])
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {key: "auto" for key in ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")}
    if stage and _MOVED.search(base) and not _KEPT.search(base):
        only_optimizer, only_parameters = bool(_OPTIMIZER.search(base)), bool(_PARAMETERS.search(base))
        if stage < 3 or only_optimizer or not only_parameters or "all" in base.lower():
            zero["offload_optimizer"] = dict(_CPU)
        if stage == 3 and (only_parameters or not only_optimizer):
            zero["offload_param"] = dict(_CPU)
    return _zero(_FP16, **zero)


def usual() -> dict[str, Any]:
    """A config of stage 2, in the place of one of which nothing is known."""
    return _zero(_FP16, stage=2, reduce_bucket_size="auto")


def in_words(config: Mapping[str, Any]) -> str:
    """What a config divides, in a few words: "ZeRO stage 3 with the optimizer and the parameters on the CPU"."""
    zero = config["zero_optimization"]
    moved = [words for key, words in (("offload_optimizer", "the optimizer"), ("offload_param", "the parameters")) if (zero.get(key) or {}).get("device") == "cpu"]
    return f"ZeRO stage {zero['stage']}" + (f" with {' and '.join(moved)} on the CPU" if moved else "")
