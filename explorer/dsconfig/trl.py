"""TRL's configs: TrainingArguments with defaults of their own, and what their trainers hold beside one model's step. No torch.

Read from TRL 1.16.0 (trl/trainer/base_config.py, `_BaseConfig`, and each config beside it; ORPO's and CPO's in trl/experimental; PPO's from 0.24.0, the last that was read with one).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

RELEASE = "1.16.0"


class Config(NamedTuple):
    """One class."""

    learning_rate: float
    max_length: int | None
    """Tokens that a sample is cut to; None where the length is the prompt's and the answer's."""
    beside: str = ""
    """What its trainer holds that the estimate of one model's step does not."""


_PAIRS = "trains on two answers to each prompt, so that a batch of n is 2 n sequences"
_REFERENCE = "a frozen reference model stands beside it (2 bytes a parameter on every GPU, and divided at stage 3 alone; none with LoRA)"
_SAMPLED = "generates its own answers between the steps, with a key-value cache"
CONFIGS = {
    "SFTConfig": Config(2e-5, 1024),
    "DPOConfig": Config(1e-6, 1024, f"{_PAIRS}, and {_REFERENCE}"),
    "KTOConfig": Config(1e-6, 1024, f"adds a batch of mismatched answers, and {_REFERENCE}"),
    "ORPOConfig": Config(1e-6, 1024, _PAIRS),
    "CPOConfig": Config(1e-6, 1024, _PAIRS),
    "RewardConfig": Config(1e-4, 1024, _PAIRS),
    "GRPOConfig": Config(1e-6, None, f"{_SAMPLED}, and where beta is above 0, {_REFERENCE}"),
    "RLOOConfig": Config(1e-6, None, f"{_SAMPLED}, and {_REFERENCE}"),
    "PPOConfig": Config(5e-5, None, f"{_SAMPLED}, and a value model, a reward model and a frozen reference stand beside it"),
}
LENGTHS = ("max_length", "max_seq_length")


def defaults(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the class takes where `given` is silent: arguments of the Trainer, and `sequence`. None of bf16: it follows what is said of fp16."""
    config = CONFIGS[name]
    found: dict[str, Any] = {"gradient_checkpointing": True, "bf16": None, "learning_rate": config.learning_rate}
    if config.max_length is not None and not any(key in given for key in LENGTHS):
        found["sequence"] = config.max_length
    return found
