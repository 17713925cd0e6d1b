"""TRL's configs: TrainingArguments whose defaults are others."""

from __future__ import annotations

import json

import pytest

from explorer.dsconfig import resolve
from explorer.dsconfig.read import read

_AUTO = json.dumps({"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}})
_MODEL = "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-7B')\n"


def told(text: str, name: str = "trl-defaults") -> list[str]:
    return [f.text for f in read(text).coercions if f.id == name]


def test_a_config_that_says_nothing_checkpoints_in_bf16_at_1024_tokens() -> None:
    text = f"args = SFTConfig('out', per_device_train_batch_size=4)\n{_MODEL}{_AUTO}"
    pasted = read(text)
    assert pasted.changes["trainer"] == {"output_dir": "out", "per_device_train_batch_size": 4, "gradient_checkpointing": True, "bf16": True, "learning_rate": 2e-5}
    setup = pasted.onto(None)
    assert (setup.gradient_checkpointing, setup.sequence, resolve(setup).precision) == (True, 1024, "bf16")
    assert told(text) == ["turns gradient checkpointing on, computes in bf16, takes 2e-05 for learning_rate and cuts samples at 1,024 tokens where nothing else is said, as TRL 1.16.0 has it: taken so"]


@pytest.mark.parametrize(("name", "rate", "tokens"), [("DPOConfig", 1e-6, 1024), ("trl.RewardConfig", 1e-4, 1024), ("GRPOConfig", 1e-6, None), ("PPOConfig", 5e-5, None)])
def test_each_class_has_its_own(name: str, rate: float, tokens: int | None) -> None:
    changes = read(f"args = {name}(output_dir='o', per_device_train_batch_size=1)\n").changes
    assert (changes["trainer"]["learning_rate"], changes.get("sequence"), changes["gradient_checkpointing"]) == (rate, tokens, True)


@pytest.mark.parametrize(("given", "key", "expected"), [
    ("gradient_checkpointing=False", "gradient_checkpointing", False), ("bf16=False", "bf16", False), ("fp16=True", "bf16", None), ("bf16=None", "bf16", True), ("learning_rate=1e-3", "learning_rate", 1e-3),
])
def test_what_is_said_wins(given: str, key: str, expected: object) -> None:
    assert read(f"SFTConfig('o', {given})").changes["trainer"].get(key) == expected


@pytest.mark.parametrize(("text", "expected"), [("SFTConfig('o', max_length=4096)", 4096), ("SFTConfig('o', max_length=None)", None), ("SFTConfig('o')\ntrain.py\n$ deepspeed train.py --max_seq_length 300", 300)])
def test_a_length_that_is_said_wins(text: str, expected: int | None) -> None:
    assert read(text).changes.get("sequence") == expected


def test_what_another_piece_says_wins() -> None:
    changes = read("SFTConfig('o')\n\n$ deepspeed train.py --gradient_checkpointing False --learning_rate 1e-3\n").changes
    assert "gradient_checkpointing" not in changes and changes["trainer"]["learning_rate"] == 1e-3


def test_a_config_in_fp16_is_not_given_bf16_beside_it() -> None:
    pasted = read(f"SFTConfig('o', per_device_train_batch_size=1)\n{_MODEL}" + json.dumps({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}))
    assert resolve(pasted.onto(None)).precision == "fp16"


def test_a_model_of_fewer_positions_is_not_run_beyond_them() -> None:
    pasted = read("RewardConfig('o', per_device_train_batch_size=1)\nmodel = AutoModelForSequenceClassification.from_pretrained('google-bert/bert-base-uncased')\n")
    assert pasted.onto(None).sequence == 512


def test_plain_training_arguments_have_none_of_it() -> None:
    text = "TrainingArguments('o', per_device_train_batch_size=1)"
    assert read(text).changes["trainer"] == {"output_dir": "o", "per_device_train_batch_size": 1} and not told(text)
