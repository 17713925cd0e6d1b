"""LoRA as the arguments of training tools ask for it: TRL, LLaMA-Factory, ms-swift, axolotl, open-instruct. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SWITCHES = ("use_peft", "use_lora", "lora", "use_qlora")
"""True turns LoRA on: TRL's ModelConfig, open-instruct."""
_METHODS = ("finetuning_type", "train_type", "tuner_type", "sft_type", "adapter", "peft_type")
"""Its value names LoRA: LLaMA-Factory, ms-swift (three releases), axolotl."""
_ON = {"lora", "qlora", "dora", "lora_pro"}
_RANKS = ("lora_r", "lora_rank")
_TARGETS = ("lora_target_modules", "lora_target", "target_modules")
_ALL = {"all", "all-linear", "all_linear"}
_DEFAULT_RANKS = {"use_peft": 16, "use_lora": 64, "use_qlora": 64}
"""Of TRL and open-instruct; LLaMA-Factory and ms-swift take 8."""
_SILENT = {
    "lora_alpha", "lora_dropout", "lora_bias", "lora_task_type", "lora_dtype", "lora_fan_in_fan_out", "lora_modules",
    "lora_target_linear", "lorap_lr_ratio", "loraplus_lr_ratio", "lora_ga_batch_size", "lora_model_dir",
}
"""What moves no memory, or is read with the rest."""


def take(given: Mapping[str, Any]) -> tuple[dict[str, Any] | None, set[str]]:
    """(the job's `lora`, None where it is not asked for; the arguments that were read for it)."""
    switch = next((name for name in _SWITCHES if given.get(name) is True), None)
    method = next((name for name in _METHODS if str(given.get(name, "")).lower() in _ON), None)
    read = {name for name in (*_SWITCHES, *_METHODS) if name in given and (given[name] in (None, True, False) or name == method)}
    read |= {name for name in (*_RANKS, *_TARGETS, *_SILENT, "use_rslora", "use_dora", "modules_to_save", "lora_modules_to_save") if name in given}
    if switch is None and method is None:
        return None, read if _is_off(given) else set()
    rank = next((given[name] for name in _RANKS if _is_rank(given.get(name))), _DEFAULT_RANKS.get(switch or "", 8))
    found: dict[str, Any] = {"r": int(rank)}
    targets = next((given[name] for name in _TARGETS if given.get(name)), None)
    if given.get("lora_target_linear") is True or targets is None and method not in (None, "adapter", "peft_type"):
        targets = "all-linear"  # the two tools' own default
    if targets is not None:
        found["target_modules"] = _targets(targets)
    kept = given.get("lora_modules_to_save") or given.get("modules_to_save")
    if kept:
        found["modules_to_save"] = _names(kept)
    return found, read


def is_default(given: Mapping[str, Any]) -> bool:
    """Whether the arguments leave it to the tool, whether LoRA is used."""
    return not any(given.get(name) is not None for name in (*_SWITCHES, *_METHODS))


def _is_off(given: Mapping[str, Any]) -> bool:
    """Whether the arguments say that LoRA is not used."""
    return any(given.get(name) is False for name in _SWITCHES) or any(name in given for name in _METHODS)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and float(value).is_integer()


def _targets(value: Any) -> Any:
    names = _names(value)
    return "all-linear" if any(name.lower() in _ALL for name in names) else names


def _names(value: Any) -> list[str]:
    parts = value if isinstance(value, list | tuple) else str(value).replace(",", " ").split()
    return [str(part).strip("\"'") for part in parts]
