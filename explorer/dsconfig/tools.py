"""Training tools with arguments of their own: which one a recipe is for, what it takes where the recipe is silent, and its names. No torch.

ms-swift 3.8 (swift/llm/argument, swift/trainers/arguments.py), LLaMA-Factory 0.9 (src/llamafactory/hparams), axolotl
(src/axolotl/utils/schemas), open-instruct (open_instruct/finetune.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from explorer.dsconfig.trl import CONFIGS

LORA = {"r": 8, "target_modules": "all-linear"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One tool. `defaults` are what dsconfig/defaults.py fills in."""

    name: str
    keys: frozenset[str]
    """Arguments that it alone has."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    trains: tuple[str, ...] = ()
    """Arguments that say which of TRL's trainers stands behind it."""


_TOOLS = (
    Tool(
        name="ms-swift", keys=frozenset(("train_type", "tuner_type", "sft_type", "rlhf_type", "model_id_or_path")), trains=("rlhf_type",),
        renamed={"model_id_or_path": "model", "learning_rate_lora": "learning_rate"},
        defaults={"lora": LORA, "per_device_train_batch_size": 1, "gradient_checkpointing": True, "bf16": None, "learning_rate": 1e-4, "total": 16},
    ),
    Tool(
        name="LLaMA-Factory", keys=frozenset(("finetuning_type", "cutoff_len", "lora_target", "dataset_dir", "flash_attn", "quantization_bit")), trains=("stage",),
        defaults={"lora": LORA, "sequence": 2048, "gradient_checkpointing": {"use_reentrant": True}},
    ),
    Tool(
        name="axolotl", keys=frozenset(("base_model", "sequence_len", "micro_batch_size", "sample_packing", "val_set_size", "lora_target_linear", "dataset_prepared_path")), trains=("rl",),
        renamed={"micro_batch_size": "per_device_train_batch_size", "optimizer": "optim", "lr_scheduler": "lr_scheduler_type"},
        defaults={"per_device_train_batch_size": 1},
    ),
)
_BY_NAME = {tool.name: tool for tool in _TOOLS}
_TRAINERS = {
    "dpo": "DPOConfig", "kto": "KTOConfig", "orpo": "ORPOConfig", "cpo": "CPOConfig", "simpo": "CPOConfig", "rm": "RewardConfig", "reward": "RewardConfig",
    "grpo": "GRPOConfig", "ppo": "PPOConfig", "rloo": "RLOOConfig",
}
"""What a recipe trains → TRL's config of that trainer."""


def named(name: str) -> Tool | None:
    """The tool of that name."""
    return _BY_NAME.get(name)


def of_arguments(given: Mapping[str, Any]) -> Tool | None:
    """The tool that these arguments are for; None for plain transformers, and where two could be meant."""
    counts = {tool.name: len(tool.keys & given.keys()) for tool in _TOOLS}
    best = max(counts, key=lambda name: counts[name])
    if not counts[best] or list(counts.values()).count(counts[best]) > 1 or best == "LLaMA-Factory" and counts[best] == 1 and "flash_attn" in given:
        return None
    return _BY_NAME[best]


def renamed(tool: Tool | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names that transformers has."""
    found = {tool.renamed.get(key, key): value for key, value in given.items()} if tool is not None else dict(given)
    if tool is None:
        return found
    if isinstance(found.get("optim"), Mapping):
        del found["optim"]
    if tool.name == "axolotl":
        if found.pop("flash_attention", None) is True:
            found["use_flash_attention_2"] = True
        for section in ("bf16", "fp16"):  # "auto": wherever the card has it; "full": the weights too
            if found.get(section) in ("auto", "full"):
                found[section] = section == "bf16" or found[section] == "full"
    if tool.name == "LLaMA-Factory":
        if found.pop("disable_gradient_checkpointing", None) is True:
            found["gradient_checkpointing"] = False
        if found.pop("use_reentrant_gc", None) is False:
            found |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        if found.pop("pure_bf16", None) is True:
            found["bf16"] = True
    return found


def beside(tool: Tool, given: Mapping[str, Any]) -> tuple[str, str] | None:
    """(argument, what its trainer holds beside one model's step), where the recipe trains so."""
    for key in tool.trains:
        config = CONFIGS.get(_TRAINERS.get(str(given.get(key, "")).lower(), ""))
        if config is not None and config.beside:
            return key, config.beside
    return None


# --- keys that move no memory

_SILENT_STARTS = (
    "adam_", "chat_", "custom_", "data_", "dataset", "dataloader_", "ddp_", "disable_", "eval_", "eval", "export_", "hf_", "hub_", "infer_", "kto_", "logging_", "log_", "loraplus_", "loss_",
    "lr_", "max_new_", "max_steps", "mixed_precision_", "mlflow_", "model_", "push_to_", "ray_", "ref_", "report_", "resume_", "reward_", "rope_", "save_", "seed", "special_", "stop", "swanlab_", "system",
    "template", "tokenizer_", "train_on_", "train_", "use_fast_", "val_", "vllm_", "wandb_", "warmup_", "trust_", "tensorboard_", "comet_", "pref_", "ppo_", "dpo_", "simpo_", "split_", "preprocess", "pad_to_",
)
_SILENT = frozenset("""
add_bos_token agent_template alpaca beta buffer_size cache_dir check_model columns cosine_min_lr_ratio debug deterministic do_sample early_stopping_patience enable_thinking
external_plugins flash_attention flash_optimum freeze_aligner freeze_llm freeze_vit gamma_beta group_by_length include_tokens_per_second interleave_probs is_causal is_llama_derived_model
is_mistral_derived_model label_smoothing lazy_tokenize load_args load_from_cache_file load_in_8bit local_rank low_cpu_mem_usage lorap_lr_ratio mask_history max_grad_norm max_prompt_length
max_completion_length max_samples mix_strategy media_dir mixed_precision name neat_packing new_special_tokens num_epochs num_generations num_infer_workers overwrite_cache overwrite_output_dir packing
plot_loss preprocessing_num_workers print_param_status processing_num_workers profile pretrained_model_config query_template quant_method remove_unused_columns response_template revision
rl rlhf_type s2_attention sample_packing shuffle shuffle_merged_datasets skip_memory_metrics skip_prepare_dataset stage streaming strict sdp_attention temperature test_size text_column tf32 tokenize
tokenizer top_k top_p torch_dtype truncation_strategy type use_chat_template use_hf use_slow_tokenizer use_tokenizer utils weight_decay xformers_attention sequence_parallel_size neftune_alpha
eot_tokens tokens plugins include_num_input_tokens_seen metric num_train_epochs num_workers per_device_eval_batch_size project_name exp_name with_tracking checkpointing_steps try_launch_beaker_eval_jobs
keep_last_n_checkpoints reduce_loss gradient_clipping cutoff_len lora_alpha train_type finetuning_type tuner_type sft_type adapter acc_strategy add_version create_checkpoint_symlink
ddp_timeout task_type deepspeed fsdp quantization_type double_quantization padding_side output_dir job_id run_name seed dtype ref_model adapters lora_model_dir adapter_name_or_path
""".split())
"""Arguments of these tools and of TRL's scripts that move no memory, or that other modules read."""


def moves_nothing(name: str) -> bool:
    """Whether an argument that nothing here reads is known to move no memory."""
    return name in _SILENT or name.startswith(_SILENT_STARTS)
