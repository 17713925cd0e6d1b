"""An evaluation is a phase of its own: a forward without gradients, and the predictions that are kept of it."""

from __future__ import annotations

import pytest

from explorer import Setup, estimate
from explorer.errors import BadInput
from explorer.units import GiB, MiB

LLAMA = {"model": "meta-llama/Llama-3.2-1B", "sequence": 1024, "world_size": 8, "gpu": "A100-80GB"}
VOCABULARY = 128_256


def job(stage: int = 2, model: dict | None = None, micro_batch: int = 2, **trainer) -> Setup:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    trainer = {"bf16": True, "per_device_train_batch_size": micro_batch, **trainer}
    return Setup.from_job({**(model or LLAMA), "micro_batch": micro_batch, "deepspeed": config, "trainer": trainer})


def estimated(*args, **kw):
    return estimate(job(*args, **kw), largest=False)


def evaluated(profile):
    return profile.phase("steady", "eval")


def note(profile) -> str:
    [found] = [n for n in profile.notes if n.startswith("an evaluation of")]
    return found


def test_no_evaluation_no_phase():
    profile = estimated(eval_strategy="no", per_device_eval_batch_size=64)
    assert evaluated(profile) is None and not [n for n in profile.notes if n.startswith("an evaluation of")]
    assert [p.phase for p in profile.steps["steady"]] == ["forward", "backward", "step"]


@pytest.mark.parametrize("asked", [{"eval_strategy": "steps"}, {"eval_strategy": "epoch"}, {"do_eval": True}, {"eval_on_start": True}])
def test_each_way_to_ask_for_one(asked):
    """8 samples by default; at the loss: logits in bf16, in fp32, and their log-softmax."""
    profile = estimated(**asked)
    idle = profile.phase("steady", "step").end_allocated_bytes
    assert evaluated(profile).peak_allocated_bytes - idle == pytest.approx(8 * 1024 * VOCABULARY * (2 + 4 + 4), rel=0.03)
    assert evaluated(profile).end_allocated_bytes == idle
    assert profile.peak.allocated_phase == "eval" and profile.peak.allocated_step == "steady"
    assert "8 samples" in note(profile)


def test_a_forward_without_gradients_takes_less_than_one_with():
    """Of the same two samples: layers keep nothing."""
    profile = estimated(eval_strategy="steps", per_device_eval_batch_size=2)
    assert evaluated(profile).peak_allocated_bytes < profile.phase("steady", "forward").peak_allocated_bytes - 2 * GiB
    assert profile.peak.allocated_phase == "backward"


def test_layers_add_nothing_to_it():
    """BERT-like and deep: what is kept is one layer's, so twice the samples double the little there is."""
    gpt2 = {"model": "gpt2", "world_size": 1, "sequence": 64}
    few, many = (evaluated(estimated(model=gpt2, eval_strategy="steps", per_device_eval_batch_size=n)) for n in (16, 32))
    assert many.peak_allocated_bytes - few.peak_allocated_bytes == pytest.approx(16 * 64 * 50257 * (2 + 4 + 4), rel=0.05)


def test_predictions_are_kept_of_all_gpus_until_they_are_moved():
    """With metrics: every GPU keeps the logits of all, and copies what it has with each batch."""
    each = 8 * 1 * 1024 * VOCABULARY * 2  # of 8 GPUs, one sample a GPU
    for batches in (1, 2, 4):
        profile = estimated(eval_strategy="steps", per_device_eval_batch_size=1, eval_accumulation_steps=batches)
        most = evaluated(profile).peak_allocated_bytes - profile.phase("steady", "step").end_allocated_bytes
        expected = {1: each + each // 8, 2: 2 * each + 2 * each, 4: 2 * 4 * each}[batches]
        assert most == pytest.approx(expected, rel=0.02), batches
        assert f"the predictions of {batches} batches" in note(profile)


def test_how_many_are_kept_by_the_size_of_the_evaluation():
    few, many = (estimated(eval_strategy="steps", per_device_eval_batch_size=1, compute_metrics=True, eval_samples=n) for n in (64, 640))
    assert "of 8 batches" in note(few) and "of 80 batches" in note(many)
    assert few.verdict.answer == "fits" and many.verdict.answer == "does not fit" and many.verdict.failure.phase == "eval"


@pytest.mark.parametrize(
    "asked",
    [{}, {"prediction_loss_only": True, "eval_accumulation_steps": 4}, {"compute_metrics": False, "eval_accumulation_steps": 4}, {"metric_for_best_model": "eval_loss"}],
)
def test_the_loss_alone(asked):
    profile = estimated(eval_strategy="steps", per_device_eval_batch_size=1, **asked)
    assert "the loss alone is kept" in note(profile)
    assert evaluated(profile).peak_allocated_bytes - profile.phase("steady", "step").end_allocated_bytes < 1.4 * GiB


@pytest.mark.parametrize("asked", [{"compute_metrics": True}, {"metric_for_best_model": "f1"}, {"include_for_metrics": ["loss"]}, {"prediction_loss_only": False}])
def test_predictions_of_a_number_of_batches_that_nobody_knows(asked):
    assert "give trainer.eval_samples" in note(estimated(eval_strategy="steps", per_device_eval_batch_size=1, **asked))


def test_stage_3_gathers_for_it_and_lets_go():
    profile = estimated(stage=3, eval_strategy="steps", per_device_eval_batch_size=1)
    assert evaluated(profile).at_peak["gathered"] > 100 * MiB
    assert evaluated(profile).end_allocated_bytes == profile.phase("steady", "step").end_allocated_bytes


def test_an_encoder_decoder():
    """Its logits have the target's length."""
    t5 = {"model": "t5-small", "sequence": 512, "target_sequence": 64, "world_size": 4}
    profile = estimated(model=t5, eval_strategy="epoch", per_device_eval_batch_size=4, eval_accumulation_steps=10)
    most = evaluated(profile).peak_allocated_bytes - profile.phase("steady", "step").end_allocated_bytes
    assert most == pytest.approx(20 * 4 * 4 * 64 * 32128 * 2, rel=0.05)


@pytest.mark.parametrize(("name", "value"), [("per_device_eval_batch_size", 0), ("per_device_eval_batch_size", "many"), ("eval_samples", -1), ("compute_metrics", "f1")])
def test_bad_input(name, value):
    asked = {"compute_metrics": True, "eval_strategy": "steps", name: value}
    with pytest.raises(BadInput, match=f"trainer.{name}"):
        estimated(**asked)


def test_a_whole_float_is_a_number():
    assert "4 samples" in note(estimated(eval_strategy="steps", per_device_eval_batch_size=4.0))
