"""ZeRO divides over the GPUs that have samples of their own, whatever their number in all."""

from __future__ import annotations

import pytest

from explorer import estimate
from explorer.dsconfig import resolve
from explorer.setup import Setup


def job(stage, **changes):
    return {"model": "gpt2", "micro_batch": 4, "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}, "gpu": "H100-80GB", **changes}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_split_model_is_divided_over_its_copies(stage):
    """Eight GPUs of which two have samples of their own: memory of two, on a host with eight processes."""
    split, two, eight = (estimate(job(stage, **changes), largest=False) for changes in ({"world_size": 8, "data_parallel_size": 2}, {"world_size": 2}, {"world_size": 8}))
    assert (split.peak, split.steps, split.at_peak) == (two.peak, two.steps, two.at_peak)
    assert split.peak.allocated_bytes > eight.peak.allocated_bytes
    assert split.host.per_node_bytes == 4 * two.host.per_node_bytes


def test_the_batch_counts_samples_not_gpus():
    settings = resolve(Setup.from_job(job(2, world_size=8, data_parallel_size=2)))
    assert settings.config["train_batch_size"] == 8
    assert settings.world_size == 2


def test_the_note_says_what_is_bounded():
    (note,) = [n for n in resolve(Setup.from_job(job(2, world_size=8, data_parallel_size=2))).notes if n.startswith("data_parallel_size")]
    assert "ZeRO divides over 2, and the estimate is of the whole model on each" in note and "memory is at most what is said" in note
    assert not [n for n in resolve(Setup.from_job(job(2, world_size=8, data_parallel_size=8))).notes if n.startswith("data_parallel_size")]
