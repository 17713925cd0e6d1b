"""An evaluation pass is no part of the step, and told of beside it."""

from explorer import Setup, estimate
from explorer.units import human


def test_an_evaluation_is_told_of_with_the_most_it_takes():
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    trainer = {"bf16": True, "per_device_train_batch_size": 2, "eval_strategy": "epoch", "per_device_eval_batch_size": 16}
    job = {"model": "gpt2", "micro_batch": 2, "deepspeed": config, "trainer": trainer}
    [note] = [n for n in estimate(Setup.from_job(job), largest=False).notes if "evaluation of 16 samples" in n]
    larger = {**job, "micro_batch": 16, "trainer": {**trainer, "per_device_train_batch_size": 16}}
    assert human(estimate(Setup.from_job(larger), largest=False).phase("steady", "forward").peak_allocated_bytes) in note
    silent = {**job, "trainer": {**trainer, "eval_strategy": "no"}}
    assert not [n for n in estimate(Setup.from_job(silent), largest=False).notes if "evaluation" in n]
