"""Jobs whose batches vary in length: the peak is the longest's, and the cache grows with the lengths it has seen."""

from __future__ import annotations

import pytest

from explorer import Setup, estimate
from explorer.catalog import find_model, lengths
from explorer.errors import BadInput
from explorer.estimator.replay import MOST_BATCHES, _turns
from explorer.units import GiB

NEAR = 0.003
"""PyTorch counts a block that it does not split as a whole: what is allocated hangs a little on what was freed before."""

JOB = {"model": "gpt2", "micro_batch": 2, "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}}


def of(**changes):
    return estimate(Setup.from_job({**JOB, **changes}), largest=False)


def test_one_length_is_a_job_of_that_length():
    plain, listed = of(sequence=512), of(lengths=[512, 512, 512, 512])
    assert listed.peak == plain.peak and listed.steps == plain.steps


def test_the_peak_is_the_longest_batch_s():
    varying, longest = of(lengths=[64, 100, 900, 1000, 300, 512]), of(sequence=1000, padding=True)
    assert varying.peak.allocated_bytes == pytest.approx(longest.peak.allocated_bytes, rel=NEAR)
    assert any("batches are 100 to 1,000 tokens long" in note for note in varying.notes)


@pytest.mark.parametrize("stage, accumulation", [(0, 1), (2, 4), (3, 1), (3, 3)])
def test_every_wrapper_takes_batches_in_turn(stage, accumulation):
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, "gradient_accumulation_steps": accumulation}
    varying = of(deepspeed=config, lengths=[64, 64, 1000, 1000, 300, 300, 512, 512])
    longest = of(deepspeed=config, sequence=1000)
    assert varying.peak.allocated_bytes == pytest.approx(longest.peak.allocated_bytes, rel=NEAR)


def test_the_growth_of_the_cache_can_decide():
    """Under a limit that the longest batch alone fits without a flush, a job of many lengths does not."""
    job = {"model": "meta-llama/Llama-3.2-1B", "micro_batch": 4, "sequence": 2000, "world_size": 8}
    many = [100, 900, 300, 2000, 700, 650, 1200, 1300, 400, 80, 90, 1999, 512, 512, 512, 512]
    same, varying = of(**job, padding=True), of(**job, lengths=many)
    assert varying.peak.reserved_bytes > same.peak.reserved_bytes * 1.03
    limit = same.peak.reserved_bytes * 1.001 / GiB
    assert of(**job, padding=True, capacity_gib=limit).verdict.retries == 0
    verdict = of(**job, lengths=many, capacity_gib=limit).verdict
    assert verdict.answer != "fits" and (verdict.failure is not None or 0 < verdict.retries < len(many))


def test_sequence_is_where_samples_are_cut():
    found = lengths(Setup.from_job({**JOB, "sequence": 256, "lengths": [100, 200, 900, 40, 7]}), find_model("gpt2"))
    assert found.batches == (200, 256) and found.sequence == 256 and found.pads


def test_fewer_samples_than_a_batch_come_again():
    assert lengths(Setup.from_job({**JOB, "micro_batch": 5, "lengths": [100, 200]}), find_model("gpt2")).batches == (200,)


@pytest.mark.parametrize("count, at_once", [(5, 1), (5, 2), (500, 1), (500, 3), (1, 2)])
def test_a_turn_is_whole_steps_and_has_the_longest(count, at_once):
    batches = [7] * count
    batches[count // 3] = 9
    turn = _turns(batches, at_once)
    assert len(turn) % at_once == 0 and len(turn) <= MOST_BATCHES and 9 in turn


@pytest.mark.parametrize("asked, said", [
    ([], "give a list"), ("700", "give a list"), (700, "give a list"), ([0], "at least 1"), ([1.5], "whole number"),
    ([True], "whole number"), ([float("nan")], "whole number"), ([10**30], "whole number"), ([[7]], "whole number"),
    ([2000], "beyond the 1024 positions"),
])
def test_what_is_no_list_of_lengths_is_named(asked, said):
    with pytest.raises(BadInput, match=said) as error:
        of(lengths=asked)
    assert "lengths" in str(error.value)


def test_a_model_without_text_has_no_lengths():
    with pytest.raises(BadInput, match="reads no text"):
        estimate(Setup.from_job({**JOB, "model": "facebook/dinov2-large", "lengths": [7, 8]}))
