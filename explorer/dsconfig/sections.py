"""The DeepSpeed JSON beyond `zero_optimization`, as data: what DeepSpeed 0.19.8 knows, what it has removed, and what it refuses (runtime/config.py).

Sections that it reads with pydantic refuse unknown keys; of the others it picks what it knows. Unknown keys at the top are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.dsconfig.findings import Finding
from explorer.dsconfig.keys import ALIASES, ZERO, Key, read_bool, read_section
from explorer.errors import BadInput, nearest, one_line, shown

_OFF, _ON = Key("bool", False), Key("bool", True)
_ANY, _TEXT, _PART = Key("any", None), Key("text", None), Key("object", {})

SECTIONS: dict[str, dict[str, Key]] = {
    "fp16": {
        "enabled": _OFF, "auto_cast": _OFF, "loss_scale": Key("float", 0.0, 0), "initial_scale_power": Key("int", 16), "loss_scale_window": Key("int", 1000),
        "hysteresis": Key("int", 2), "consecutive_hysteresis": _OFF, "min_loss_scale": Key("int", 1), "fp16_master_weights_and_grads": _OFF,
    },
    "bf16": {"enabled": _OFF, "immediate_grad_update": _OFF, "check_grad_overflow": _ON, "bf16_master_weights_and_grads": _OFF, "bf16_optimizer_states": _OFF},
    "tensor_parallel": {
        "dtype": _ANY, "autotp_size": Key("int", 0, 0), "tp_overlap_comm": _OFF, "vocab_parallel_lm_head": Key("bool", None), "vocab_parallel_ce_backend": Key("text", "torch"), "tp": _PART, "tensor_parallel": _PART,
        "injection_policy_tuple": _ANY, "partition_config": Key("object", None), "preset_model": _TEXT, "keep_module_on_host": _OFF, "kernel_inject": _OFF, "replace_with_kernel_inject": _OFF,
    },
    "hybrid_engine": {
        "enabled": _OFF, "max_out_tokens": Key("int", 512, 1), "inference_tp_size": Key("int", 1), "release_inference_cache": _OFF, "pin_parameters": _ON, "tp_gather_partition_size": Key("int", 8), "enable_cuda_graph": _OFF,
    },
    "compile": {
        **dict.fromkeys((
            "deepcompile", "autoep_non_moe", "free_activation", "offload_activation", "offload_opt_states", "symmetric_memory", "debug_log", "offload_parameters",
            "sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather", "keep_all_input_tensors",
        ), _OFF),
        **dict.fromkeys(("offload_activation_pin_memory", "double_buffer", "keep_int_input_tensors"), _ON),
        "free_activation_threshold": Key("int", 10 << 20), "passes": Key("list", None),
    },
    "weight_quantization": {"enabled": _ON, "num_bits": Key("int", 8), "q_type": Key("text", "symmetric"), "q_groups": Key("int", 1), "quantized_initialization": _PART, "post_init_quant": _PART},
    "comms_logger": {"enabled": _OFF, "prof_all": _ON, "prof_ops": Key("list", []), "verbose": _OFF, "debug": _OFF},
    "tensorboard": {"enabled": _OFF, "output_path": Key("text", ""), "job_name": Key("text", "DeepSpeedJobName")},
    "csv_monitor": {"enabled": _OFF, "output_path": Key("text", ""), "job_name": Key("text", "DeepSpeedJobName")},
    "wandb": {"enabled": _OFF, "group": _TEXT, "team": _TEXT, "project": Key("text", "deepspeed")},
    "comet": {"enabled": _OFF, "samples_log_interval": Key("int", 100), **dict.fromkeys(("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"), _TEXT), "online": Key("bool", None)},
}
"""Sections that refuse unknown keys, by the names that people write."""

ZENFLOW: dict[str, Key] = {
    "topk_ratio": Key("float", 0.1, 0, 1), "select_strategy": Key("text", "auto"), "select_interval": Key("any", "auto"), "update_interval": Key("any", "auto"), "overlap_step": _OFF, "offload": _OFF,
    "auto_ratio": Key("float", 0.99, 0, 1), "full_warm_up_rounds": Key("int", 0), "pt_reserved_cores_perc": Key("float", 0.5, 0, 1), "steps_per_epoch": Key("int", None),
}
LEAF_MODULE: dict[str, Key] = dict.fromkeys(("classes", "names", "name_suffixes"), Key("any", []))
THROUGHPUT: dict[str, Key] = {"enabled": _ON, "synchronized": _ON}

_READ_FREELY = ("torch_autocast", "optimizer", "scheduler", "pipeline", "activation_checkpointing", "flops_profiler", "checkpoint", "data_types", "data_efficiency", "autotuning", "timers", "aio", "expert_parallel")
"""Sections of which DeepSpeed picks the keys it knows."""
_MAY_BE_NULL = ("bf16", "aio", "expert_parallel")
_SCALARS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "managed_gradient_accumulation", "steps_per_print", "dump_state", "disable_python_gc", "disable_allgather",
    "communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "gradient_clipping", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "wall_clock_breakdown", "memory_breakdown", "use_data_before_expert_parallelism", "dataloader_drop_last", "log_level", "datastates_ckpt", "vocabulary_size", "sequence_parallel_size", "data_parallel_size", "allgather_size",
)
KNOWN = frozenset((*SECTIONS, *_READ_FREELY, *_SCALARS, "zero_optimization", "bfloat16"))
"""Every key at the top that DeepSpeed reads."""

SCHEDULES = (
    "LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR",
    "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "SequentialLR", "PolynomialLR", "CosineAnnealingLR", "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR",
    "CosineAnnealingWarmRestarts", "OneCycleLR",
)
"""DeepSpeed's own (runtime/lr_schedules.py), then torch's."""

REMOVED = {
    "amp": "take fp16, bf16 or torch_autocast instead", "sparse_gradients": "take it out; an embedding made with sparse=True needs no key", "elasticity": "set the batch keys instead",
    "curriculum_learning": "it moved to data_efficiency.data_sampling.curriculum_learning",
    **dict.fromkeys(("nebula", "compression_training", "quantize_training", "eigenvalue", "sparse_attention", "graph_harvesting", "progressive_layer_drop"), "take it out"),
}
"""Keys at the top that DeepSpeed 0.19.8 refuses because it once acted on them (`_REMOVED_TOP_LEVEL_CONFIG_KEYS`)."""
REMOVED_ZERO = {"mics_shard_size": "take it out, or see zero_hpz_partition_size", "mics_hierarchical_params_gather": "take it out", "zeropp_loco_param": "take it out; zero_quantized_gradients goes without it"}


def check(config: Mapping[str, Any], findings: list[Finding]) -> None:
    """Raises BadInput naming the key where DeepSpeed would refuse the JSON; appends what it would ignore."""
    for key in config:
        if key in REMOVED:
            raise BadInput(f"deepspeed.{key}", f"was removed from DeepSpeed, and 0.19.8 refuses it; {REMOVED[key]}")
    findings.extend(_unknown([key for key in config if key not in KNOWN and not key.startswith(("_", "//", "#"))]))  # those are people's comments
    for name in (*SECTIONS, *_READ_FREELY):
        if name in config and not isinstance(config[name], Mapping) and not (config[name] is None and name in _MAY_BE_NULL):
            raise BadInput(f"deepspeed.{name}", f"is {shown(config[name])}; give an object{_EXAMPLES.get(name, '')}, or leave it out")
    for name, keys in SECTIONS.items():
        if name in config:
            read_section(config[name], keys, f"deepspeed.{name}")
    _check_loss_scale(config.get("fp16", {}))
    _check_scalars(config)
    _check_free(config)


_MOST_TOLD = 20


def _unknown(keys: list[str]) -> list[Finding]:
    """What is said of keys that DeepSpeed ignores, few enough to be read."""
    inside = {*ZERO, *ALIASES}
    told = [
        Finding(id="unknown-key", key=one_line(key, 80), text="does nothing at the top of the config; it belongs in zero_optimization" if key in inside else f"is not a key that DeepSpeed knows, and it is ignored{nearest(key, KNOWN)}")
        for key in keys[:_MOST_TOLD]
    ]
    more = len(keys) - len(told)
    return told + ([Finding(id="unknown-key", key="deepspeed", text=f"has {more} more keys that DeepSpeed does not know")] if more else [])


_EXAMPLES = {name: f" such as {example}" for name, example in {
    "fp16": '{"enabled": true}', "bf16": '{"enabled": true}', "torch_autocast": '{"enabled": true, "dtype": "bfloat16"}',
    "optimizer": '{"type": "AdamW", "params": {"lr": 1e-5}}', "data_types": '{"grad_accum_dtype": "fp32"}',
}.items()}


def _check_loss_scale(fp16: Mapping[str, Any]) -> None:
    """With a dynamic scale both must be above 0 (precision_config.py, `_validate_dynamic_loss_scale_params`)."""
    values = read_section(fp16, SECTIONS["fp16"], "deepspeed.fp16")
    for name in ("loss_scale_window", "min_loss_scale"):
        if values["enabled"] and values["loss_scale"] == 0 and values[name] <= 0:
            raise BadInput(f"deepspeed.fp16.{name}", f"is {values[name]}; give a whole number above 0")


def _choice(config: Mapping[str, Any], key: str, choices: tuple[str, ...], optional: bool = False) -> None:
    value = config.get(key, choices[0])
    if not (optional and value is None) and (not isinstance(value, str) or value.lower() not in choices):
        raise BadInput(f"deepspeed.{key}", f"is {shown(value)}; choose {' or '.join(choices)}, or leave it out")


def _check_scalars(config: Mapping[str, Any]) -> None:
    for name in ("communication_data_type", "seq_parallel_communication_data_type"):
        _choice(config, name, ("fp32", "fp16", "bf16"), optional=True)
    _choice(config, "gradient_allreduce_op", ("mean", "sum"))
    for name, value in (("wall_clock_breakdown", config.get("wall_clock_breakdown", False)), ("flops_profiler.enabled", config.get("flops_profiler", {}).get("enabled", False))):
        if isinstance(value, str):  # the two are joined with | (runtime/config.py, `_initialize_params`)
            raise BadInput(f"deepspeed.{name}", f"is the text {shown(value)}, which DeepSpeed cannot reckon with; write true or false, without quotes")
        read_bool(value, f"deepspeed.{name}")
    vocabulary, ranks = config.get("vocabulary_size"), config.get("sequence_parallel_size", 1)
    if vocabulary is not None and not isinstance(vocabulary, int | float):
        raise BadInput("deepspeed.vocabulary_size", f"is {shown(vocabulary)}; give a whole number, or leave it out")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise BadInput("deepspeed.sequence_parallel_size", f"is {shown(ranks)}; give a whole number of at least 1, or leave it out")


def _check_free(config: Mapping[str, Any]) -> None:
    """What DeepSpeed asserts of the sections it otherwise reads freely."""
    throughput = config.get("timers", {}).get("throughput", {})
    if not isinstance(throughput, Mapping):
        raise BadInput("deepspeed.timers.throughput", f"is {shown(throughput)}; give an object, or leave it out")
    read_section(throughput, THROUGHPUT, "deepspeed.timers.throughput")
    validation = config.get("checkpoint", {}).get("tag_validation", "Warn")
    if not isinstance(validation, str) or validation.upper() not in ("WARN", "IGNORE", "FAIL"):
        raise BadInput("deepspeed.checkpoint.tag_validation", f"is {shown(validation)}; choose Warn, Ignore or Fail")
    kept = config.get("data_types", {}).get("keep_in_fp32_modules", "auto")
    if kept != "auto" and not (isinstance(kept, list) and all(isinstance(name, str) for name in kept)):
        raise BadInput("deepspeed.data_types.keep_in_fp32_modules", f"is {shown(kept)}; give \"auto\" or a list of name patterns")
    schedule = config.get("scheduler", {}).get("type")
    if schedule is not None and schedule not in SCHEDULES:
        raise BadInput("deepspeed.scheduler.type", f"is {shown(schedule)}, which neither DeepSpeed nor torch has{nearest(schedule, SCHEDULES) or '; choose WarmupLR, say'}")
    parameters = config.get("scheduler", {}).get("params")
    if schedule is not None and not isinstance(parameters, Mapping):
        raise BadInput("deepspeed.scheduler.params", f"is {shown(parameters)}; give an object, {{}} for the schedule's defaults")
    write = config.get("checkpoint", {}).get("parallel_write", {})
    if not isinstance(write, Mapping) or write.get("pipeline_stage", False) not in (True, False):
        raise BadInput("deepspeed.checkpoint.parallel_write", f"is {shown(write)}; give {{\"pipeline_stage\": true}} or false there, or leave it out")
    for name in ("results_dir", "exps_dir"):
        if not config.get("autotuning", {}).get(name, True):
            raise BadInput(f"deepspeed.autotuning.{name}", "is empty; give a folder, or leave it out")
    for name in (config.get("compile") or {}).get("passes") or ():
        if name not in ("z1", "z3", "autosp", "autotp"):
            raise BadInput("deepspeed.compile.passes", f"holds {shown(name)}; choose of z1, z3, autosp and autotp")
    _check_data_efficiency(config.get("data_efficiency", {}))
    if (config.get("expert_parallel") or {}).get("load_balance_coeff") is not None:
        raise BadInput("deepspeed.expert_parallel.load_balance_coeff", "is not supported by DeepSpeed 0.19.8; leave it out")


def _check_data_efficiency(section: Mapping[str, Any]) -> None:
    part, path = section, "deepspeed.data_efficiency"
    for name in ("data_sampling", "curriculum_learning"):
        part, path = part.get(name, {}), f"{path}.{name}"
        if not isinstance(part, Mapping):
            raise BadInput(path, f"is {shown(part)}; give an object, or leave it out")
    if part.get("enabled") and "curriculum_metrics" not in part:
        raise BadInput(f"{path}.enabled", "is true without curriculum_metrics, which DeepSpeed refuses; add them, or turn it off")
