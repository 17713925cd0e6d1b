"""What a DeepSpeed JSON may ask that moves memory and that the estimate does not follow, each with the bound that is known. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.dsconfig.findings import Finding
from explorer.dsconfig.keys import FALSE
from explorer.dsconfig.sections import LEAF_MODULE
from explorer.setup import Setup
from explorer.units import human

_MOST, _LEAST, _UNKNOWN = "memory is at most what is said", "memory is at least what is said", "no bound is known"
STAGE3_ONLY = (
    "sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear", "leaf_module",
    "pipeline_loading_checkpoint", "override_module_apply", "enable_sanity_checks", "log_trace_cache_warnings", "save_muon_momentum_buffer_in_memory",
)
"""Keys of `zero_optimization` that act at stage 3 alone and do not say so in their name."""


def not_followed(config: Mapping[str, Any], zero: Mapping[str, Any], setup: Setup, *, precision: str, accumulation: str, offload: str | None) -> list[Finding]:
    """A finding for every key that is set to something the estimate does not follow. `offload`: the device that optimizer states go to."""
    cases = [*_anywhere(config, precision), *_reduction(config, zero, precision, accumulation), *_masters(config)]
    cases.append((setup.data_ranks < setup.world_size, "data_parallel_size", f"is {setup.data_ranks} of {setup.world_size} GPUs: ZeRO divides over {setup.data_ranks}, and the estimate is of the whole model on each; where {setup.world_size // setup.data_ranks} GPUs split it by tensor or pipeline, {_MOST}"))
    if zero["stage"] == 3:
        cases += _stage3(config, zero, setup)
    if offload is not None:
        cases += _offloaded(zero)
    return [Finding(id="key-not-modelled", key=key, text=text) for there, key, text in cases if there]


_Case = tuple[bool, str, str]


def _on(config: Mapping[str, Any], *path: str) -> bool:
    """Whether a switch is on, however deep it lies."""
    value: Any = config
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value not in (None, "auto") and bool(value) and str(value).lower() not in FALSE


def _number(config: Mapping[str, Any], section: str, key: str) -> int:
    value = (config.get(section) or {}).get(key, 0)
    return 0 if value == "auto" else int(value)


def _anywhere(config: Mapping[str, Any], precision: str) -> list[_Case]:
    split, ranks = _number(config, "tensor_parallel", "autotp_size"), config.get("sequence_parallel_size", 1)
    both = precision != "fp32" and _on(config, "torch_autocast", "enabled")
    return [
        (split > 1, "tensor_parallel.autotp_size", f"splits the linear layers over {split} GPUs, and the estimate is of whole ones: weights and activations are at most what is said, states of what stays whole up to {split} times that"),
        (ranks > 1, "sequence_parallel_size", f"splits every sequence over {ranks} GPUs, and the estimate is of whole ones: {_MOST}"),
        (_on(config, "expert_parallel", "enabled"), "expert_parallel.enabled", f"spreads experts over GPUs and sends tokens between them: {_UNKNOWN}"),
        (_on(config, "hybrid_engine", "enabled"), "hybrid_engine.enabled", f"keeps inference kernels and their caches beside the model: {_LEAST}"),
        (_on(config, "compile", "deepcompile"), "compile.deepcompile", f"takes effect with engine.compile(), and compiled code keeps other tensors: {_UNKNOWN}"),
        *((_on(config, "data_efficiency", "enabled") and _on(config, *path), ".".join(path), text) for path, text in _SAMPLES.items()),
        (both, "torch_autocast.enabled", f"is true over {precision} weights, and then computes norms and losses in fp32: {_LEAST}"),
        (_on(config, "torch_autocast", "enabled") and "lower_precision_safe_modules" in config["torch_autocast"], "torch_autocast.lower_precision_safe_modules", f"changes which gradients are sent in 16 bit: {_UNKNOWN}"),
        ((config.get("data_types") or {}).get("buffer_dtype") is not None, "data_types.buffer_dtype", "casts the model's buffers, which are counted as the model makes them"),
        (_on(config, "optimizer", "legacy_fusion"), "optimizer.legacy_fusion", f"takes another way through the step at stage 0: {_UNKNOWN}"),
    ]


_SAMPLES = {
    ("data_efficiency", "data_sampling", "curriculum_learning", "enabled"): f"begins with shorter or easier samples: {_MOST}",
    ("data_efficiency", "data_sampling", "dynamic_batching", "enabled"): f"changes the batch from step to step: {_UNKNOWN}",
    ("data_efficiency", "data_routing", "random_ltd", "enabled"): f"leaves tokens out of some layers: {_MOST}",
}
"""What changes samples while training goes on."""
_PLAIN_BUCKET = 500_000_000
"""Elements sent at once at stage 0 (runtime/engine.py, `MEMORY_OPT_ALLREDUCE_SIZE`)."""


def _reduction(config: Mapping[str, Any], zero: Mapping[str, Any], precision: str, accumulation: str) -> list[_Case]:
    sent = config.get("communication_data_type")
    bucket = (zero["reduce_bucket_size"] if zero["stage"] else _PLAIN_BUCKET) * (4 if sent in ("fp32", "FP32") else 2)
    return [
        (sent is not None and sent.lower() != precision, "communication_data_type", f"is {sent} with {precision} gradients, which are copied before they are sent: {_LEAST}, and at most one bucket ({human(bucket)}) or the largest gradient more"),
        (not config.get("managed_gradient_accumulation", True), "managed_gradient_accumulation", f"is false, and your own code says when gradients are reduced: {_UNKNOWN}"),
        (zero["stage"] in (1, 2) and not zero["use_multi_rank_bucket_allreduce"], "zero_optimization.use_multi_rank_bucket_allreduce", f"is false, and a bucket is sent rank by rank: {_UNKNOWN}"),
        (zero["stage"] in (1, 2) and not zero["compute_grad_norm"], "zero_optimization.compute_grad_norm", f"is false, which spares the norm's temporaries: {_MOST}"),
        (_on(config, "bf16", "immediate_grad_update") and (zero["stage"], precision, accumulation) == (1, "bf16", "fp32"), "bf16.immediate_grad_update", f"frees each bf16 gradient as soon as it is added up: {_MOST}"),
    ]


def _masters(config: Mapping[str, Any]) -> list[_Case]:
    """Half the bytes of masters and gradients, of the states too where they follow."""
    sections = {name: config.get(name) or {} for name in ("fp16", "bf16")}
    return [(_on(sections, name, key), f"{name}.{key}", f"keeps in 16 bit what is counted in fp32: {_MOST}") for name, key in (("fp16", "fp16_master_weights_and_grads"), ("bf16", "bf16_master_weights_and_grads"), ("bf16", "bf16_optimizer_states"))]


def _stage3(config: Mapping[str, Any], zero: Mapping[str, Any], setup: Setup) -> list[_Case]:
    parts, base = zero["zero_hpz_partition_size"], "zero_optimization."
    quantized = setup.zero_init and _on(config, "weight_quantization", "quantized_initialization")
    leaves = {key: value for key, value in (zero["leaf_module"] or {}).items() if key in LEAF_MODULE}
    return [
        (parts > 1, base + "zero_hpz_partition_size", f"keeps a second copy of the weights, parted over {parts} GPUs: {_LEAST}, and at most 1/{parts} of the model's weights more"),
        (zero["zero_quantized_weights"], base + "zero_quantized_weights", f"gathers weights as int8 and unpacks them beside it: {_UNKNOWN}"),
        (zero["zero_quantized_nontrainable_weights"], base + "zero_quantized_nontrainable_weights", f"keeps frozen weights as int8, and unpacks what is gathered: {_MOST} for what is kept"),
        (zero["zero_quantized_gradients"] and setup.world_size > setup.gpus_per_node, base + "zero_quantized_gradients", f"sends gradients as int8 between nodes, in buffers of its own: {_UNKNOWN}"),
        (zero["stage3_module_granularity_threshold"] > 0, base + "stage3_module_granularity_threshold", f"gathers small modules whole: {_UNKNOWN}"),
        (bool(leaves), base + "leaf_module", f"gathers these modules whole: {_UNKNOWN}"),
        (zero["stage3_use_all_reduce_for_fetch_params"], base + "stage3_use_all_reduce_for_fetch_params", f"gathers without a second copy: {_MOST}"),
        (zero["stage3_allgather_sequential"], base + "stage3_allgather_sequential", f"gathers one parameter at a time and looks no further ahead: {_MOST}"),
        (quantized, "weight_quantization.quantized_initialization", f"builds the model in fewer bits: {_MOST}"),
    ]


def _offloaded(zero: Mapping[str, Any]) -> list[_Case]:
    section, base = zero["offload_optimizer"] or {}, "zero_optimization."
    ratio = section.get("ratio", 1.0)
    stays = 0.0 if ratio == "auto" else 1 - float(ratio)
    return [
        (stays > 0, base + "offload_optimizer.ratio", f"leaves {stays:.0%} of the masters and states on the GPU: there, {_LEAST}, and at most that part of them more"),
        (_on(section, "super_offload") and zero["stage"] == 3, base + "offload_optimizer.super_offload", f"steps on the host while the backward runs: {_UNKNOWN}"),
        (zero["zenflow"] is not None, base + "zenflow", f"keeps the most important gradients and their states on the GPU: there, {_LEAST}"),
    ]
