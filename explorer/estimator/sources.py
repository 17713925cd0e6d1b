"""Where each number of an estimate comes from: a rule with DeepSpeed's file and function, the model's trace, or a stated constant.

Buffers bear DeepSpeed's own names in the stream; the tables here say where DeepSpeed makes each of them (0.19.8).
"""

from __future__ import annotations

import re

import numpy as np

from explorer.estimator.rules.base import Rules
from explorer.estimator.stream import PROVENANCES, Stream
from explorer.estimator.tape import Tape
from explorer.estimator.usage import Usage
from explorer.profile import CATEGORIES, Source

ENGINE, BASE = "runtime/engine.py", "runtime/base_optimizer.py"
PARTITION, COORDINATOR = "runtime/zero/partition_parameters.py", "runtime/zero/partitioned_param_coordinator.py"
STAGE12, STAGE3 = "runtime/zero/stage_1_and_2.py", "runtime/zero/stage3.py"
UTILS = "runtime/utils.py"
FUSED, UNFUSED, BF16 = "runtime/fp16/fused_optimizer.py", "runtime/fp16/unfused_optimizer.py", "runtime/bf16_optimizer.py"

PLACES: dict[str, dict[str, str]] = {
    ENGINE: {"flat gradients for all-reduce": "allreduce_bucket", "optimizer states": "_take_model_step", "optimizer temporaries": "_take_model_step", "gradient norm in fp64": "clip_fp32_gradients", "states of the first instance": "_configure_optimizer"},
    FUSED: {
        "parameter clones": "__init__", "fp16_groups_flat": "__init__", "fp16_groups_flat clone": "__init__", "fp32_groups_flat": "__init__", "initialize_optimizer_states": "initialize_optimizer_states",
        "optimizer states": "initialize_optimizer_states", "fp32 gradients": "step", "fp32_groups_flat.grad": "step", "optimizer temporaries": "step",
    },
    UNFUSED: {
        "fp32_groups": "__init__", "initialize_optimizer_states": "initialize_optimizer_states", "optimizer states": "initialize_optimizer_states", "fp32 gradients": "step", "optimizer temporaries": "step",
    },
    BF16: {
        "bf16_groups_flat": "_setup_for_real_optimizer", "partition clone": "_setup_for_real_optimizer", "fp32_groups_flat_partition": "_setup_for_real_optimizer", "fp32_groups_gradients_flat": "_setup_for_real_optimizer",
        "fp32 gradient copy": "_update_hp_grad", "bf16 gradients for all-reduce": "get_grads_for_reduction", "optimizer states": "step", "optimizer temporaries": "step", "initialize_optimizer_states": "_setup_for_real_optimizer",
        "gradient norm in fp64": "get_grads_for_norm",
    },
    STAGE12: {
        "bit16_groups_flat": "__init__", "empty parameter": "__init__", "partition clone": "__init__", "single_partition_of_fp32_groups": "__init__", "temp_grad_buffer_for_gpu_offload": "__init__",
        "initialize_optimizer_states": "initialize_optimizer_states", "ipg_bucket": "setup_buckets", "gradient clone": "reduce_independent_p_g_buckets_and_remove_grads", "reduce copy": "average_tensor",
        "16-bit copy for the reduction": "average_tensor", "fp32 gradient copy": "_add_full_reduction_to_compact_grad_partition", "grads_in_partition": "copy_grads_in_partition", "averaged_gradients": "_get_compact_grad_partition_buffer",
        "grad_accum": "fill_grad_accum_attribute", "flat_grad_partition": "get_flat_partition", "single_partition_of_fp32_groups.grad": "step", "fp32 partition on its way to 16 bit": "step",
        "gradient norm in fp64": "get_grad_norm_direct", "optimizer states": "_optimizer_step", "optimizer temporaries": "_optimizer_step",
    },
    UTILS: {"all-gather copy": "all_gather_dp_groups"},
    STAGE3: {
        "lp_param_buffer": "_create_fp16_partitions_with_defragmentation", "fp32 conversion": "_create_fp32_partitions", "fp32_partitioned_groups_flat": "_create_fp32_partitions", "initialize_optimizer_states": "initialize_optimizer_states",
        "ipg_bucket": "_setup_for_real_optimizer", "grad_partitions_flat_buffer": "_setup_for_real_optimizer", "reduce-scatter input": "__avg_scatter_grads", "share in the accumulation dtype": "partition_grads", "gradient share": "partition_grads",
        "fp32 gradient copy": "partition_grads", "gradient norm in fp64": "get_grad_norm_direct", "overflow check": "has_overflow", "flat gradients": "_prepare_fp32_grad_for_sub_group", "fp32 gradients": "_prepare_fp32_grad_for_sub_group",
        "optimizer states": "_optimizer_step", "optimizer temporaries": "_optimizer_step",
    },
    COORDINATOR: {"all-gather buffer": "fetch_sub_module", "partition on its way to the GPU": "fetch_sub_module"},
}
"""File of DeepSpeed → buffer → the function that makes it."""

ASSUMED = "PyTorch's default, by the card's compute capability (ATen/cuda/CUDABlas.cpp)"
TRACED = "one forward and backward of the model, traced"
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def place(rules: Rules, category: str, owner: str) -> str:
    """DeepSpeed's file and function that make a buffer of this name; the file alone for a parameter's own block."""
    for file in (rules.source, ENGINE, COORDINATOR, UTILS):
        function = PLACES[file].get(owner)
        if function is not None:
            return f"{file}, {function}"
    if category == "gathered":
        return f"{COORDINATOR}, fetch_sub_module"
    return f"{PARTITION}, _partition_param" if rules.source == STAGE3 else f"{ENGINE}, _configure_distributed_model"


def at_peak(stream: Stream, usage: Usage, rules: Rules, tape: Tape) -> tuple[Source, ...]:
    """What is alive at the allocated peak, by category and maker, largest first; they sum to allocated. Layers that repeat are one, "layers.*"."""
    events = stream.order[: int(usage.allocated.argmax())]
    alive = np.flatnonzero(np.bincount(np.abs(events), weights=np.sign(events), minlength=len(stream.bytes) + 1)[1:])
    own = {p.name for p in tape.model_parameters()}
    sums: dict[tuple[int, int, str], int] = {}
    for block in alive.tolist():
        owner = stream.owners[block]
        name = "the model's parameters" if owner in own else _NUMBER.sub(".*", owner)
        key = (int(stream.categories[block]), int(stream.provenance[block]), name)
        sums[key] = sums.get(key, 0) + int(usage.sizes[block])
    found = [_source(CATEGORIES[category], PROVENANCES[provenance], name, n, rules) for (category, provenance, name), n in sums.items()]
    return tuple(sorted(found, key=lambda s: -s.n_bytes))


def _source(category: str, provenance: str, name: str, n_bytes: int, rules: Rules) -> Source:
    origin = {"traced": TRACED, "assumed": ASSUMED}.get(provenance) or place(rules, category, name)
    return Source(category=category, name=name or "the model itself", n_bytes=n_bytes, provenance=provenance, origin=origin)
