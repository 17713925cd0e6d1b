"""The Trainer's own step on DeepSpeed's CPU accelerator: its "auto" values and groups are those of Settings, its memory what was estimated."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from explorer.catalog import find_model, lengths
from explorer.dsconfig import resolve
from explorer.errors import BadInput
from explorer.estimator import tapes
from explorer.measure.runner import probe
from explorer.profile import Profile
from explorer.setup import Setup
from tests.measure.jobs import GPT2, PARAMETERS, estimated
from tests.measure.test_probe import BLOCKS, phases

pytestmark = pytest.mark.usefixtures("needs_extra")


def job(stage: int, *, offload: bool = False, optimizer: bool = False, trainer: dict[str, Any] | None = None, **fields: Any) -> Setup:
    """As people write it for the Trainer: "auto" wherever it may stand."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    batch = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping"), "auto")
    deepspeed = {"bf16": {"enabled": "auto"}, "zero_optimization": zero, **batch}
    if optimizer:
        deepspeed["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
    return Setup(model=GPT2, micro_batch=2, sequence=64, deepspeed=deepspeed, trainer={"bf16": True, "weight_decay": 0.01, **(trainer or {})}, **fields)


JOBS = {
    "stage 0": job(0),
    "stage 2": job(2),
    "stage 2 of 8, last rank, accumulation": job(2, world_size=8, rank=7, trainer={"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}),
    "stage 2, DeepSpeed's optimizer": job(2, optimizer=True, trainer={"learning_rate": 3e-4, "adam_beta2": 0.95}),
    "stage 2 offloaded": job(2, offload=True),
    "stage 3": job(3),
    "stage 3 of 8": job(3, world_size=8),
}


SMALL = 54 * 384
"""Stage 3 keeps the norms and biases gathered, each 128 bytes in a block of 512."""


@cache
def both(name: str) -> tuple[Setup, Profile, Profile]:
    """(setup, measured, estimated), one run each."""
    setup = JOBS[name]
    return setup, probe(setup, save=False), estimated(setup)


@pytest.mark.parametrize("name", JOBS)
def test_the_trainer_ran_it(name):
    _, measured, _ = both(name)
    assert [p.phase for p in measured.steps["first"]] == ["init", "forward", "backward", "step"]
    assert [p.phase for p in measured.steps["steady"]] == ["forward", "backward", "step"]
    assert measured.parameters == measured.trainable_parameters == PARAMETERS["gpt2"]
    assert measured.environment["accelerate"]
    assert any("transformers.Trainer" in note for note in measured.notes)
    for step, phase in phases(measured):
        assert sum(phase.at_peak.values()) == phase.peak_allocated_bytes, (step, phase.phase)
        assert phase.at_peak["unexplained"] == 0


@pytest.mark.parametrize("name", JOBS)
def test_the_estimate_said_what_the_engine_holds(name):
    """Weights, gradients, optimizer and buckets at every phase's peak within 2 %; the estimate's blocks of 512 bytes allowed for."""
    _, measured, said = both(name)
    for step, theirs in phases(said):
        if theirs.phase == "init" and "stage 3" in name:
            continue  # the probe sees gathers only once there is an engine: before, they are temporary
        mine = measured.phase(step, theirs.phase)
        for category in ("parameters", "gradients", "optimizer", "comm_buffers"):
            assert theirs.at_peak.get(category, 0) == pytest.approx(mine.at_peak[category], rel=0.02, abs=BLOCKS), (step, theirs.phase, category)


@pytest.mark.parametrize("name", JOBS)
def test_the_estimate_said_what_a_step_takes(name):
    """The optimizer's step, and what stays after it."""
    _, measured, said = both(name)
    for step in ("first", "steady"):
        theirs, mine = said.phase(step, "step"), measured.phase(step, "step")
        assert theirs.peak_allocated_bytes == pytest.approx(mine.peak_allocated_bytes, rel=0.02, abs=SMALL), step
        assert theirs.end_allocated_bytes == pytest.approx(mine.end_allocated_bytes, rel=0.02, abs=SMALL), step


@pytest.mark.parametrize("name", ["stage 2 of 8, last rank, accumulation", "stage 2, DeepSpeed's optimizer", "stage 2 offloaded", "stage 3"])
def test_settings_are_the_engines(name):
    """Every "auto" that moves memory, the optimizer, and who is in which group."""
    setup = JOBS[name]
    settings = resolve(setup)
    found = _facts(setup)
    config, zero = found["config"], found["config"]["zero_optimization"]
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping"):
        assert config[key] == settings.config[key], key
    assert config["bf16"]["enabled"] is True and settings.precision == "bf16"
    assert zero["reduce_bucket_size"] == settings.reduce_bucket_size == 64 * 64
    if settings.stage == 3:
        assert (zero["stage3_prefetch_bucket_size"], zero["stage3_param_persistence_threshold"]) == (settings.prefetch_bucket_size, settings.param_persistence_threshold)
    assert settings.optimizer.implementation.endswith(found["optimizer"])
    assert found["fused"] == (settings.optimizer.implementation == "torch.optim.AdamW")
    assert [elements for elements, _ in found["groups"]] == _groups(setup)
    if settings.parameter_groups == "decay":
        assert [decay for _, decay in found["groups"]] == [0.01, 0.0]


def _facts(setup: Setup) -> dict[str, Any]:
    """In a process of its own: the worker runs nothing but its own tasks."""
    ran = subprocess.run([sys.executable, "-m", "tests.measure.trainer_facts", json.dumps(setup.to_job())], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def _groups(setup: Setup) -> list[int]:
    settings, model = resolve(setup), find_model(setup.model)
    tape = tapes.find(setup, tapes.key(setup, settings.compute, model, lengths(setup, model), None), model)
    parameters = tape.model_parameters()
    if settings.parameter_groups == "one":
        return [sum(p.numel for p in parameters)]
    return [sum(p.numel for p in parameters if p.decays is decays) for decays in (True, False)]


def test_a_schedule_without_a_step_to_warm_up_in_is_a_finding_and_keeps_nobody_from_measuring():
    """The Trainer fills "auto" with its warmup_steps, 0 where nothing is said, which DeepSpeed refuses."""
    setup = JOBS["stage 2, DeepSpeed's optimizer"]
    scheduled = setup.replace(deepspeed={**setup.deepspeed, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}})
    assert "no-warmup" in {finding.id for finding in resolve(scheduled).findings}
    assert "no-warmup" not in {finding.id for finding in resolve(scheduled.replace(trainer={**scheduled.trainer, "warmup_steps": 1})).findings}
    assert probe(scheduled, save=False).peak == both("stage 2, DeepSpeed's optimizer")[1].peak


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer": {"no_such_argument": 1}}, "no_such_argument"),
        ({"trainer": {"bf16": True, "per_device_train_batch_size": 2, "weight_decay": 0.01, "max_grad_norm": 2.0}, "deepspeed": {**JOBS["stage 2"].deepspeed, "gradient_clipping": 1.0}}, "ds gradient_clipping=1.0 vs hf max_grad_norm=2.0"),
    ],
    ids=["unknown argument", "mismatch"],
)
def test_what_the_trainer_refuses_is_told_in_its_words(changes, words):
    with pytest.raises(BadInput) as caught:
        probe(JOBS["stage 2"].replace(**changes), save=False)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_trainers_phases_are_the_plain_engines():
    """One group under both: the same optimizer named in the JSON. What differs is the batch: the Trainer fetches it anew each step."""
    setup = JOBS["stage 2, DeepSpeed's optimizer"]
    _, measured, _ = both("stage 2, DeepSpeed's optimizer")
    config = dict(resolve(setup).config)
    plain = probe(setup.replace(trainer=None, deepspeed=config), save=False)
    for step, phase in phases(plain):
        mine = measured.phase(step, phase.phase)
        assert mine.peak_allocated_bytes == pytest.approx(phase.peak_allocated_bytes, abs=8192), (step, phase.phase)
        for category in ("parameters", "gradients", "optimizer", "comm_buffers"):
            assert mine.at_peak[category] == phase.at_peak[category], (step, phase.phase, category)
