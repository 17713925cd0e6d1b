"""`estimate(factory=...)`: a person's own model, recorded in the worker, and never reached from a job file."""

from __future__ import annotations

import pytest

from explorer import Setup, estimate
from explorer.catalog import find_model
from explorer.catalog.own import find_factory
from explorer.errors import BadInput, CouldNotRun

pytest.importorskip("torch")

from tests import own_model  # noqa: E402 (needs torch)

JOB = {"micro_batch": 4, "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}}
WEIGHTS = 8 * (64 * 256 + 256 + 256 * 64 + 64)
KEPT_PER_SAMPLE = 16 * 8 * 2 * (64 + 256) + 16 * 64 * 4
"""Sixteen positions: each block's input (the first's is the batch) and ReLU in bf16; the loss's fp32 copy."""


def test_its_parameters_and_activations():
    one, two = (estimate({**JOB, "micro_batch": n}, factory=own_model.build, largest=False) for n in (4, 8))
    assert one.parameters == one.trainable_parameters == WEIGHTS
    ends = [{p.phase: p.end_allocated_bytes for p in profile.steps["steady"]}["forward"] for profile in (one, two)]
    assert ends[1] - ends[0] == 4 * KEPT_PER_SAMPLE


def test_a_name_says_the_same_and_a_length_counts():
    by_name = estimate({**JOB, "sequence": 32}, factory="tests.own_model:build", largest=False)
    assert by_name == estimate({**JOB, "micro_batch": 4, "sequence": 32}, factory=own_model.build, largest=False)
    assert by_name.peak.allocated_bytes > estimate(JOB, factory=own_model.build, largest=False).peak.allocated_bytes


def test_a_job_file_does_not_reach_it():
    with pytest.raises(BadInput, match="factory: is not a key of a job"):
        Setup.from_job({**JOB, "model": "gpt2", "factory": "tests.own_model:build"})
    with pytest.raises(BadInput, match="neither a catalog name, a folder with a config.json, nor a hub id"):
        find_model("tests.own_model:broken")


def test_a_changed_file_is_another_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "changing_model.py"
    file.write_text("def build(micro_batch): ...\n")
    before = find_factory("changing_model:build")
    file.write_text("def build(micro_batch): return 1\n")
    after = find_factory("changing_model:build")
    assert before.digest != after.digest and before[:4] == after[:4] == ("changing_model:build", str(tmp_path), False, None)


REFUSED = {
    "no function": ("tests.own_model:nothing", "is no function that its file defines"),
    "no module": ("nowhere.at_all:build", "no file of a module \"nowhere.at_all\" is found"),
    "no name": ("tests.own_model", "give a module's own function"),
    "a lambda": (lambda micro_batch: None, "give a module's own function"),
    "no micro_batch": ("tests.own_model:fixed", "takes no micro_batch"),
    "a batch of its own size": ("tests.own_model:deaf", "no tensor begins with micro_batch"),
    "no batch": ("tests.own_model:bare", "returned something else than"),
    "an error": ("tests.own_model:broken", "raised ValueError: no such file"),
}


@pytest.mark.parametrize(("function", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_one_sentence(function, words):
    with pytest.raises(BadInput, match=words) as caught:
        estimate(JOB, factory=function, largest=False)
    assert caught.value.field == "factory"


def test_where_python_was_started_cannot_be_imported():
    def build(micro_batch): ...

    build.__module__ = "__main__"
    with pytest.raises(BadInput, match="put it into a file of its own"):
        estimate(JOB, factory=build, largest=False)


def test_two_models_are_one_too_many():
    with pytest.raises(BadInput, match="model: is \"gpt2\", and a factory makes the model"):
        estimate({**JOB, "model": "gpt2"}, factory=own_model.build, largest=False)


def test_a_frozen_reference_model_is_weights_and_nothing_else():
    alone, both = (estimate(JOB, factory=f, largest=False) for f in (own_model.build, own_model.preference))
    assert (both.parameters, both.trainable_parameters) == (2 * WEIGHTS, WEIGHTS)
    more = {category: both.at_peak[category] - alone.at_peak[category] for category in both.at_peak}
    assert 2 * WEIGHTS <= more["parameters"] <= 2 * WEIGHTS + 512 * 32  # each of its 32 tensors in a block of its own
    assert more["gradients"] == more["optimizer"] == 0
    assert abs(more["activations"]) < 1024


def test_what_cannot_be_followed_is_told_with_its_states():
    """bf16 weights and gradients, fp32 master and two moments: sixteen bytes a parameter, and what the step adds."""
    with pytest.raises(CouldNotRun, match="looks at tensor values.*its states alone.* at least on this GPU: a bound"):
        estimate(JOB, factory=own_model.moody, largest=False)


def test_a_setting_that_is_not_modelled_is_told_with_its_states():
    job = {"model": "gpt2", "micro_batch": 2, "deepspeed": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}}
    with pytest.raises(CouldNotRun, match="torch_autocast at stage 3 is not modelled.*its states alone"):
        estimate(job, largest=False)
