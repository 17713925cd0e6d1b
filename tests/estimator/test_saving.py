"""A save is a phase of its own: what is gathered on the GPU, what is copied to the host, and only where the job asks for it."""

from __future__ import annotations

import pytest

from explorer import estimate

KEY = "stage3_gather_16bit_weights_on_model_save"
WEIGHTS = 2 * 124_439_808
TABLE = 2 * 50257 * 768


def estimated(stage=3, asked=None, trainer=None, **job):
    zero = {"stage": stage} if asked is None else {"stage": stage, KEY: asked}
    config = {"bf16": {"enabled": True}, "zero_optimization": zero}
    return estimate({"model": "gpt2", "micro_batch": 1, "deepspeed": config, "world_size": 4, "trainer": trainer, **job}, largest=False)


def notes(profile):
    return [n for n in profile.notes if "a save " in n]


@pytest.mark.parametrize("asked", [True, "true"])
def test_gpt2_whole_on_the_host_and_its_embedding_on_the_gpu(asked):
    """124,439,808 weights; the largest module is the table of 50,257 tokens by 768."""
    profile = estimated(asked=asked)
    save, idle = profile.phase("steady", "save"), profile.phase("steady", "step").end_allocated_bytes
    persistent = sum(p for p in (2 * 121_344,))  # biases and norms, partitioned for the time of the save
    assert idle + TABLE - 2 * persistent <= save.peak_allocated_bytes <= idle + TABLE + 2**20
    assert save.end_allocated_bytes == idle
    assert profile.host.peak_bytes == profile.host.resident_bytes + WEIGHTS
    (note,) = notes(profile)
    assert "73.6 MiB" in note and "transformer.wte" in note


@pytest.mark.parametrize(("stage", "asked"), [(3, False), (3, "auto"), (2, True)])
def test_no_gather_no_phase(stage, asked):
    profile = estimated(stage, asked)
    assert notes(profile) == [] and profile.phase("steady", "save") is None


@pytest.mark.parametrize("trainer", [{"save_steps": 100}, {"save_strategy": "epoch"}, {"save_strategy": "steps", "save_steps": 500.0}])
def test_below_stage_3_every_rank_copies_the_weights(trainer):
    profile, plain = estimated(2, trainer={"bf16": True, **trainer}), estimated(2, trainer={"bf16": True})
    assert profile.host.per_node_bytes - plain.host.per_node_bytes == 4 * WEIGHTS
    assert profile.phase("steady", "save").peak_allocated_bytes == profile.phase("steady", "step").end_allocated_bytes
    assert "on every rank" in notes(profile)[0]


@pytest.mark.parametrize("trainer", [{}, {"save_strategy": "no", "save_steps": 100}])
def test_a_trainer_that_is_not_told_to_save(trainer):
    assert estimated(3, True if trainer else None, trainer={"bf16": True, **trainer}).phase("steady", "save") is None


def test_a_stage_3_save_without_whole_weights_gathers_nothing():
    """DeepSpeed then writes its shards."""
    profile, plain = estimated(3, False, trainer={"bf16": True, "save_steps": 5}), estimated(3, False, trainer={"bf16": True})
    assert profile.phase("steady", "save").peak_allocated_bytes == plain.phase("steady", "step").end_allocated_bytes
    assert profile.host == plain.host


def test_adapters_alone_are_copied_at_stage_3():
    lora = {"lora": {"r": 8, "target_modules": ["c_attn"]}}
    profile = estimated(3, True, trainer={"bf16": True, "save_steps": 5}, **lora)
    assert profile.host.peak_bytes == profile.host.resident_bytes + 2 * profile.trainable_parameters


def test_another_rank_of_the_node():
    """Rank 0 has the copy; the node has it once."""
    first, second = (estimated(asked=True, rank=rank).host for rank in (0, 1))
    assert first.peak_bytes == first.resident_bytes + WEIGHTS > second.peak_bytes
    assert first.per_node_bytes == second.per_node_bytes == first.peak_bytes + 3 * second.peak_bytes
