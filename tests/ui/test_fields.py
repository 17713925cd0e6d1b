"""Controls to Setup and back."""

from __future__ import annotations

import pytest

from explorer.errors import BadInput
from explorer.setup import Setup
from explorer.ui import fields

OPENING = fields.default_setup()


def written(base: Setup = OPENING, **changes) -> Setup:
    return fields.write(base, {**fields.read(base), **changes})


@pytest.mark.parametrize(("typed", "number"), [(64, 64), ("64", 64), (" 1,024 ", 1024), ("5e8", 500_000_000), ("500M", 500_000_000), ("2k", 2000), ("1_000", 1000), ("1.5b", 1_500_000_000)])
def test_counts_as_people_write_them(typed, number):
    assert fields.count(typed, "micro_batch") == number


@pytest.mark.parametrize("typed", ["", "abc", "1.5", "-3", "0", "nan", "inf", "1e400", "--", "6 4 x", "1e30"])
def test_what_is_no_count_names_the_control(typed):
    with pytest.raises(BadInput) as caught:
        fields.count(typed, "micro_batch")
    assert caught.value.field == "micro_batch"


def test_reading_and_writing_back_changes_nothing():
    assert written() == OPENING


@pytest.mark.parametrize(
    "setup",
    [
        Setup(model="gpt2", micro_batch=2),
        Setup(model="gpt2", micro_batch=2, deepspeed={"train_batch_size": 16, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}}}, world_size=8),
        Setup(model={"model_type": "llama", "hidden_size": 64}, micro_batch=1, deepspeed={"bf16": {"enabled": True}, "wall_clock_breakdown": True}, rank=3, world_size=4, lora={"r": 8}),
        Setup(model="gpt2", micro_batch=2, gradient_checkpointing={"use_reentrant": True}, deepspeed={"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}),
    ],
)
def test_a_job_keeps_every_key_no_control_stands_for(setup):
    assert written(setup) == setup


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"stage": "0"}, "zero_optimization.stage", 0),
        ({"precision": "bf16"}, "bf16.enabled", True),
        ({"gradient_accumulation_steps": "4"}, "gradient_accumulation_steps", 4),
        ({"reduce_bucket_size": "2e8"}, "zero_optimization.reduce_bucket_size", 200_000_000),
        ({"overlap_comm": "off"}, "zero_optimization.overlap_comm", False),
        ({"optimizer": "AdamW (torch)"}, "optimizer.params.torch_adam", True),
        ({"offload_optimizer": "none"}, "zero_optimization.offload_optimizer", None),
        ({"stage": "3", "offload_param": "cpu"}, "zero_optimization.offload_param.device", "cpu"),
        ({"stage": "2", "offload_param": "cpu"}, "zero_optimization.offload_param", None),
        ({"stage": "3", "offload_optimizer": "nvme", "nvme_path": "/fast"}, "zero_optimization.offload_optimizer.nvme_path", "/fast"),
    ],
)
def test_a_control_writes_its_key(changes, key, value):
    at = written(**changes).deepspeed
    for part in key.split("."):
        at = at.get(part) if at is not None else None
    assert at == value


def test_fp32_leaves_no_half_precision_section():
    assert {"fp16", "bf16"}.isdisjoint(written(precision="fp32").deepspeed)


def test_a_new_micro_batch_drops_batch_keys_that_would_contradict_it():
    base = Setup(model="gpt2", micro_batch=2, deepspeed={"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2})
    assert written(base, micro_batch="8").micro_batch == 8


def test_fewer_gpus_than_the_rank_go_back_to_rank_zero():
    base = Setup(model="gpt2", micro_batch=2, world_size=8, rank=5)
    assert written(base, world_size="2").rank == 0


@pytest.mark.parametrize("text", ["", "   ", '{"model_type": ', "[1, 2]", "two\nlines"])
def test_a_paste_that_is_no_config_is_refused(text):
    with pytest.raises(BadInput) as caught:
        written(model=fields.CUSTOM, config_text=text)
    assert caught.value.field == "model"


def test_a_paste_is_a_config_or_a_path():
    assert written(model=fields.CUSTOM, config_text='{"model_type": "llama"}').model == {"model_type": "llama"}
    assert written(model=fields.CUSTOM, config_text=" /models/mine ").model == "/models/mine"
