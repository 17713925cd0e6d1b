"""The Trainer's arguments beside the optimizer's and the "auto" values: known or not, agreed with the job, refused, or not modelled. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from explorer.dsconfig.findings import Finding
from explorer.dsconfig.keys import Key, read_count, read_value
from explorer.errors import BadInput, nearest, shown
from explorer.setup import Setup

NAMES = frozenset("""
accelerator_config adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval data_seed dataloader_drop_last dataloader_in_order
dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed disable_tqdm do_eval do_predict do_train enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches
eval_on_start eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config full_determinism gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor
learning_rate length_column_name liger_kernel_config load_best_model_at_end local_rank log_level log_level_replica log_on_each_node logging_first_step logging_nan_inf_filter logging_steps
logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps metric_for_best_model neftune_noise_alpha num_train_epochs optim optim_args optim_target_modules output_dir
parallelism_config per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project push_to_hub remove_unused_columns report_to restore_callback_states_from_checkpoint
resume_from_checkpoint run_name save_on_each_node save_only_model save_steps save_strategy save_total_limit seed skip_memory_metrics tf32 torch_compile torch_compile_backend torch_compile_mode
torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy use_cache use_cpu use_liger_kernel warmup_steps weight_decay
""".split())
"""Every field of TrainingArguments, transformers 5.17.0."""

OWN_ARGUMENTS = frozenset(("compute_metrics", "eval_samples"))
"""Keys of a job's `trainer` part that are no TrainingArguments: whether the Trainer is given `compute_metrics`, and how many
samples it evaluates, of all GPUs together."""

_SWITCH = Key("bool", None)
_READ = {
    **dict.fromkeys(("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "gradient_checkpointing", "use_cache", "torch_compile", "use_liger_kernel", "full_determinism", "use_cpu"), _SWITCH),
    **dict.fromkeys(("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "label_smoothing_factor"), Key("float", 0.0, 0)),
    "neftune_noise_alpha": Key("float", None, 0), "torch_empty_cache_steps": Key("int", None, 1), "optim": Key("text", "adamw_torch_fused"), "optim_args": Key("any", None), "gradient_checkpointing_kwargs": Key("object", None),
}
"""What is read of them here, and how."""

_NOT_MODELLED = {
    "torch_compile": "compiled code keeps and frees other tensors than the model's own",
    "use_liger_kernel": "Liger's kernels keep other activations, and no logits",
    "neftune_noise_alpha": "the noise added to the embeddings is not counted",
    "label_smoothing_factor": "the Trainer then computes the loss from the logits itself, with tensors of their size that are not counted",
    "torch_empty_cache_steps": "the cache is emptied between forward and backward, so that less stays reserved than is said",
    "parallelism_config": "splits the model or its batch over further groups of GPUs",
    "full_determinism": "deterministic kernels need other workspaces",
    "use_cpu": "the estimate is of a GPU all the same",
    "deepspeed": "is not read: the job's own deepspeed is the config",
}


def check_arguments(setup: Setup) -> None:
    """Raises BadInput for an argument that the Trainer does not have, that it would refuse, or that the job contradicts."""
    trainer = setup.trainer
    if trainer is None:
        return
    for name, value in trainer.items():
        if name not in NAMES and name not in OWN_ARGUMENTS:
            raise BadInput(f"trainer.{name}", f"is not an argument of transformers 5.17.0's TrainingArguments{nearest(name, NAMES) or '; leave it out'}")
        if name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            read_count(value, f"trainer.{name}")
        if name in _READ:
            _check_value(value, _READ[name], f"trainer.{name}")
    if trainer.get("fsdp"):
        raise BadInput("trainer.fsdp", "cannot be combined with DeepSpeed, says the Trainer; leave it out")
    if trainer.get("bf16") and trainer.get("fp16"):
        raise BadInput("trainer.bf16", "is true while trainer.fp16 is true too, which the Trainer refuses; turn one of them off")
    _check_checkpointing(setup, trainer)
    _check_switch("use_cache", setup.use_cache, trainer.get("use_cache"))


def _check_value(value: Any, key: Key, path: str) -> None:
    if key.kind in ("bool", "float") and isinstance(value, str):  # TrainingArguments keeps a text as it is
        raise BadInput(path, f"is the text {shown(value)}; write it without quotes")
    read_value(value, key, path)


def _check_switch(name: str, job: bool, trainer: Any) -> None:
    if trainer is not None and bool(trainer) != job:
        raise BadInput(name, f"is {shown(job)} but trainer.{name} is {shown(trainer)}; make them agree")


def _check_checkpointing(setup: Setup, trainer: Mapping[str, Any]) -> None:
    job = setup.gradient_checkpointing
    _check_switch("gradient_checkpointing", job is not False, trainer.get("gradient_checkpointing"))
    keywords = trainer.get("gradient_checkpointing_kwargs")
    if trainer.get("gradient_checkpointing") and keywords is not None:
        ours = {"use_reentrant": False} if job is True else job
        if {"use_reentrant": True, **keywords} != ours:
            raise BadInput("gradient_checkpointing", f"is {shown(job)} but trainer.gradient_checkpointing_kwargs is {shown(keywords)}; make them agree")


def disagreements(config: Mapping[str, Any], setup: Setup) -> list[Finding]:
    """Where the JSON and the arguments differ in what moves no memory: the Trainer refuses it when it begins (transformers/integrations/deepspeed.py, `trainer_config_finalize`)."""
    trainer = setup.trainer
    if trainer is None:
        return []
    found = []
    optimizer = config.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    params = params if isinstance(params, Mapping) else {}
    given = {f"optimizer.params.{key}": params.get(key) for key in _AGREED} | {"gradient_clipping": config.get("gradient_clipping")} | _scheduled(_schedule(setup), trainer)
    for key, value in given.items():
        name, asked = _asked(key.rpartition(".")[2], trainer)
        if value is not None and value != asked:
            theirs = f"- ds {key}={value} vs hf {name.replace(' and ', '+')}={asked}"
            found.append(Finding(id="trainer-disagrees", key=key, text=f"is {shown(value)} but trainer.{name} is {shown(asked)}, which the Trainer refuses (\"{theirs[:200]}\"); make them agree, or set the former to \"auto\""))
    found += _not_filled(setup.deepspeed, trainer)
    found += _fp32(setup.deepspeed, config, trainer)
    if warms_up_for_nothing(setup):
        found.append(Finding(id="no-warmup", key="scheduler.params.warmup_num_steps", text="is \"auto\", which the Trainer fills from trainer.warmup_steps, 0 here, and DeepSpeed 0.19 refuses that (\"warmup_num_steps must be a positive integer, got 0\"); set warmup_steps to 1 or more"))
    if "zero_optimization" not in setup.deepspeed:
        found.append(Finding(id="trainer-wants-zero", key="zero_optimization", text="is missing, which accelerate refuses; add {\"stage\": 0}, which is answered here"))
    return found


def _fp32(given: Mapping[str, Any], config: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[Finding]:
    """An "auto" that arguments without a word of precision turn off."""
    sections = [name for name in ("fp16", "bf16") if isinstance(given.get(name), Mapping) and given[name].get("enabled") == "auto"]
    on = any(isinstance(config.get(name), Mapping) and config[name].get("enabled") for name in ("fp16", "bf16"))
    if sections and not on and not any(name in trainer for name in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval")):
        yield Finding(id="auto-is-fp32", key=f"{sections[0]}.enabled", text="is \"auto\", which is off, since the arguments set neither fp16 nor bf16: the run is in fp32; set one of them to true")


def _not_filled(given: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[Finding]:
    """Keys that the JSON leaves out: only an "auto" is filled from the arguments (accelerate/utils/dataclasses.py, `DeepSpeedPlugin.fill_match`)."""
    steps, clipping, written = trainer.get("gradient_accumulation_steps"), trainer.get("max_grad_norm", 1.0), given.get("gradient_accumulation_steps", 1)
    if "gradient_accumulation_steps" not in given and steps not in (None, 1):
        total = ", and refuses train_batch_size for it" if "train_batch_size" in given else ""
        yield Finding(id="trainer-not-filled", key="gradient_accumulation_steps", text=f"is missing, which accelerate takes for 1 whatever trainer.gradient_accumulation_steps says ({steps}): DeepSpeed then steps after every micro-batch{total}; set it to \"auto\", which is answered here")
    if trainer and steps is None and written not in (None, "auto", 1):
        yield Finding(id="trainer-disagrees", key="gradient_accumulation_steps", text=f"is {shown(written)} but trainer.gradient_accumulation_steps is left at 1, which the Trainer refuses; make them agree, or set the former to \"auto\"")
    if "gradient_clipping" not in given and clipping != 1.0:
        yield Finding(id="trainer-not-filled", key="gradient_clipping", text=f"is missing, and DeepSpeed then clips at its own default, not at trainer.max_grad_norm, {shown(clipping)}; set it to \"auto\"")


def warms_up_for_nothing(setup: Setup) -> bool:
    """Whether "auto" gives DeepSpeed's schedule no step to warm up in, which it refuses (runtime/lr_schedules.py, `WarmupLR`, `WarmupCosineLR`)."""
    return _schedule(setup).get("warmup_num_steps") == "auto" and not (setup.trainer or {}).get("warmup_steps")


def _schedule(setup: Setup) -> Mapping[str, Any]:
    """Parameters of the JSON's scheduler; none where it has none."""
    section = setup.deepspeed.get("scheduler")
    params = section.get("params") if isinstance(section, Mapping) else None
    return params if isinstance(params, Mapping) else {}


def _scheduled(params: Mapping[str, Any], trainer: Mapping[str, Any]) -> dict[str, Any]:
    """What the Trainer compares of the JSON's scheduler; warm-up given as a part of all steps, and total_num_steps, need the data set's length."""
    steps = trainer.get("warmup_steps", 0)
    compared = ("warmup_max_lr", "warmup_num_steps") if steps == 0 or isinstance(steps, int | float) and steps >= 1 else ("warmup_max_lr",)
    return {f"scheduler.params.{key}": params[key] for key in compared if params.get(key) != "auto" and key in params}


_AGREED: dict[str, tuple[str, Callable[[Mapping[str, Any]], Any]]] = {
    "lr": ("learning_rate", lambda t: t.get("learning_rate", 5e-5)),
    "betas": ("adam_beta1 and adam_beta2", lambda t: [t.get("adam_beta1", 0.9), t.get("adam_beta2", 0.999)]),
    "eps": ("adam_epsilon", lambda t: t.get("adam_epsilon", 1e-8)),
    "weight_decay": ("weight_decay", lambda t: t.get("weight_decay", 0.0)),
}
"""Parameter of the JSON's optimizer → the argument it must equal, and its value."""


def trainers_value(key: str, trainer: Mapping[str, Any]) -> Any:
    """What fills an "auto" of the JSON's optimizer. KeyError for a parameter that nothing fills."""
    return _AGREED[key][1](trainer)


def _asked(key: str, trainer: Mapping[str, Any]) -> tuple[str, Any]:
    match key:
        case "gradient_clipping":
            return "max_grad_norm", trainer.get("max_grad_norm", 1.0)
        case "warmup_max_lr":
            return "learning_rate", trainer.get("learning_rate", 5e-5)
        case "warmup_num_steps":
            return "warmup_steps", trainer.get("warmup_steps", 0)
    return _AGREED[key][0], trainers_value(key, trainer)


def not_modelled(setup: Setup) -> list[Finding]:
    """What the Trainer or torch's checkpoint would do that the estimate does not follow."""
    trainer = setup.trainer or {}
    found = [Finding(id="argument-not-modelled", key=f"trainer.{name}", text=text) for name, text in _NOT_MODELLED.items() if trainer.get(name)]
    asked = setup.gradient_checkpointing
    if isinstance(asked, Mapping) and asked.get("early_stop") is False:
        found.append(Finding(id="argument-not-modelled", key="gradient_checkpointing.early_stop", text="is false, and each layer is then computed to its end once more: memory is at least what is said"))
    return found
