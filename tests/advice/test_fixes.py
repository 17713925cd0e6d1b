"""What is tried and what it costs: weights that autograd keeps, small optimizer states, buckets, host memory and PCIe."""

from __future__ import annotations

from functools import cache

import pytest

from explorer.advice import pcie
from explorer.advice.diagnose import diagnose
from explorer.advice.fixes import propose
from explorer.advice.kept import kept_weights
from explorer.dsconfig import resolve
from explorer.errors import CouldNotRun
from explorer.estimator import tapes
from explorer.estimator.estimate import estimate
from explorer.setup import Setup
from explorer.units import GiB


def job(model: str = "meta-llama/Llama-2-7b-hf", stage: int = 3, top: dict | None = None, zero: dict | None = None, **more) -> Setup:
    deepspeed = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **(zero or {})}, **(top or {})}
    return Setup(**{"model": model, "micro_batch": 4, "world_size": 8, "gpu": "A100-40GB", "deepspeed": deepspeed, **more})


@cache
def estimated(setup):
    return estimate(setup, largest=False)


@cache
def fixes(setup):
    return {fix.id: fix for fix in propose(setup, estimated(setup))}


# --- weights that autograd keeps

OLD = job(zero_init=False, deepspeed_version="0.16.4")
PLAIN = job(zero={"memory_efficient_linear": False})
MIXTRAL = job("mistralai/Mixtral-8x7B-v0.1", micro_batch=1, sequence=512, world_size=16, gpu="A100-80GB")
RECOMPUTED = MIXTRAL.replace(gradient_checkpointing=True)
EXPERTS = 8 * 3 * 4096 * 14336 * 2
"""Bytes of one Mixtral layer's in bf16; 32 layers."""
ATTENTION = (2 * 4096 * 4096 + 2 * 4096 * 1024) * 2
LINEAR = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) * 2
"""Bytes of Llama-2-7b's layers' matrices."""


def test_experts_are_kept_from_forward_to_backward():
    """Highest in the backward of the first layer it comes to: of the 32, the others' are kept."""
    kept = kept_weights(MIXTRAL)
    assert (kept.reason, kept.n_bytes) == ("transposed", 31 * EXPERTS)
    assert "81.4 GiB of 136 GiB" in kept.text
    fix = fixes(MIXTRAL)["gradient-checkpointing"]
    assert fix.answer == "fits" and fix.saved_bytes > kept.n_bytes


def test_a_recomputed_layers_weights_live_twice():
    kept = kept_weights(RECOMPUTED)
    assert (kept.reason, kept.key) == ("recomputed", "gradient_checkpointing")
    assert kept.n_bytes == pytest.approx(EXPERTS + ATTENTION, rel=0.001)
    assert '"use_reentrant": true' in kept.text


def test_the_other_form_of_checkpointing_is_tried_and_where_it_cannot_be_recorded_that_is_said(monkeypatch):
    def no_worker(*_):
        raise CouldNotRun("torch is not installed; install the extra [probe]")

    monkeypatch.setattr(tapes, "_record", no_worker)
    found = {f.id: f for f in propose(RECOMPUTED, estimated(RECOMPUTED))}
    fix = found["reentrant-checkpointing"]
    assert fix.change == {"gradient_checkpointing": {"use_reentrant": True}}
    assert fix.profile is None and fix.text == "Not estimated: torch is not installed; install the extra [probe]."


@pytest.mark.parametrize(("setup", "key", "cures"), [
    (OLD, "zero_init", {"zero-init": {"zero_init": True}, "newer-deepspeed": {"deepspeed_version": None}}),
    (PLAIN, "zero_optimization.memory_efficient_linear", {"memory-efficient-linear": {"deepspeed": {"zero_optimization": {"memory_efficient_linear": True}}}}),
], ids=["before 0.19.3 without zero.Init", "memory_efficient_linear"])
def test_linear_layers_without_deepspeeds_own_function(setup, key, cures):
    kept = kept_weights(setup)
    assert (kept.reason, kept.key) == ("plain-linear", key)
    assert 0.8 * LINEAR < kept.n_bytes < LINEAR
    for cure, change in cures.items():
        fix = fixes(setup)[cure]
        assert fix.change == change and kept_weights(fix.setup) is None
        assert fix.saved_bytes == pytest.approx(kept.n_bytes, rel=0.03)


def test_a_finding_tells_of_it_with_its_bytes():
    found = {r.id: r for r in diagnose(MIXTRAL, estimated(MIXTRAL))}
    assert found["weights-kept-transposed"].severity == "cause"  # more than a quarter of a peak that does not fit
    assert {r.severity for r in diagnose(PLAIN, estimated(PLAIN)) if r.id == "weights-kept-plain-linear"} == {"hint"}


@pytest.mark.parametrize("setup", [job(), job(stage=2), job("gpt2"), OLD.replace(world_size=1, model="gpt2")], ids=["stage 3", "stage 2", "gpt2", "one GPU"])
def test_where_nothing_is_kept_nothing_is_said(setup):
    """On one GPU a gathered weight is a view of its partition: to keep it costs nothing."""
    assert kept_weights(setup) is None
    assert not [r for r in diagnose(setup, estimated(setup)) if r.id.startswith("weights-kept")]


# --- optimizers

STATES = job(sequence=128, micro_batch=1, gradient_checkpointing=True, top={"optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}})


def test_small_states_free_six_bytes_an_element():
    """The peak is in the step, where all that differs is the moments: 8 bytes become 2 and the maxima of blocks of 256."""
    fix = fixes(STATES)["8-bit-optimizer"]
    assert estimated(STATES).peak.allocated_phase == fix.profile.peak.allocated_phase == "step"
    assert fix.saved_bytes == pytest.approx(6_738_415_616 / 8 * (8 - 2 - 8 / 256), rel=0.002)
    assert "bitsandbytes" in fix.cost and any("bitsandbytes" in note for note in fix.profile.notes)


def test_a_plain_engines_optimizer_becomes_the_trainers_with_its_numbers():
    changed = fixes(STATES)["8-bit-optimizer"].setup
    assert "optimizer" not in changed.deepspeed
    assert dict(changed.trainer) == {
        "optim": "adamw_bnb_8bit", "learning_rate": 3e-4, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "max_grad_norm": 1.0, "bf16": True,
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    assert not [f for f in resolve(changed).findings if f.id == "trainer-disagrees"]


def test_an_unfactored_adafactor_does_not_help_and_says_by_how_much():
    fix = fixes(STATES)["adafactor"]
    assert fix.text.startswith("Does not help: it takes") and "not factored" in fix.cost


@pytest.mark.parametrize("setup", [
    STATES.with_deepspeed("zero_optimization.offload_optimizer", {"device": "cpu"}),  # DeepSpeed's CPUAdam takes its place
    job(stage=2, world_size=1, micro_batch=1, gpu="B200"),  # 6.7e9 elements in one tensor
], ids=["offloaded", "beyond its kernels' count"])
def test_what_would_be_refused_is_not_proposed(setup):
    assert not [name for name in fixes(setup) if "8-bit" in name]


def test_where_it_is_not_followed_the_bound_is_said():
    setup = Setup(model="gpt2", micro_batch=1, gpu="A10", deepspeed={"zero_optimization": {"stage": 0}})
    assert "Not modelled: trainer.optim: adamw_bnb_8bit is told by the Trainer to keep embeddings' states in fp32" in fixes(setup)["8-bit-optimizer"].text


# --- buckets, host and PCIe


def test_the_gather_bucket_is_said_not_to_help():
    text = fixes(job("gpt2", 2, zero={"allgather_bucket_size": 500_000_000}, gpu="A10", micro_batch=16))["smaller-allgather-bucket"].text
    assert text.startswith("Does not help: it frees 0 B of")


def test_stage_3_has_buckets_too():
    assert fixes(job())["smaller-buckets"].saved_bytes == pytest.approx((500_000_000 - 50_000_000) * 2, rel=0.01)


def test_a_node_too_small_for_offload_is_weighed():
    """Masters and moments of 3.2e9 parameters take 16 bytes each, 48 GiB, and a disk takes them over."""
    setup = job("meta-llama/Llama-3.2-3B", 3, zero={"offload_optimizer": {"device": "cpu"}}, world_size=1, micro_batch=1, host_ram_gib=32)
    assert estimated(setup).verdict.answer == "fits" and estimated(setup).host.per_node_bytes > 32 * GiB
    found = fixes(setup)
    assert found["offload-to-nvme"].spares_host and found["offload-to-nvme"].solves and not found["stage-3-offload"].solves
    assert "the node's 32 GiB would not hold" in found["stage-3-offload"].text
    assert next(iter(found.values())).solves


def test_what_passes_over_pcie_in_a_step():
    """By hand, of gpt2 on one GPU in bf16: n gradients down in fp32 and n weights up; every pass fetches offloaded weights once."""
    setup = job("gpt2", 2, world_size=1, micro_batch=1)
    profile, n = estimated(setup), 124_439_808
    by = {(stage, parameters): pcie.bytes_per_step(setup, resolve(setup), profile, stage, parameters) for stage, parameters in ((2, False), (3, False), (3, True))}
    assert by == {(2, False): (4 + 2) * n, (3, False): (2 * 2 + 4 + 2) * n, (3, True): (2 * 2 + 4 + 2 * 2) * n}
    twice = setup.with_deepspeed("gradient_accumulation_steps", 2)
    assert pcie.bytes_per_step(twice, resolve(twice), profile, 2, False) == (4 + 2 + 3 * 2) * n  # down, up, down in 16 bit


# --- one change, one row


WAITING = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(("stage", "parts"), [(0, ("offload_optimizer",)), (0, tuple(WAITING)), (1, ("offload_param",)), (2, ("offload_param",)), (2, tuple(WAITING))], ids=str)
def test_an_offload_that_waits_for_its_stage_makes_no_second_row_and_costs_what_it_costs(stage, parts):
    setup = job("meta-llama/Llama-2-7b-hf", stage, {"bf16": {"enabled": True}}, {part: WAITING[part] for part in parts}, sequence=1024, world_size=4)
    found = fixes(setup)
    changed = [fix.setup for fix in found.values()]
    assert len(set(changed)) == len(changed)
    before = resolve(setup)
    for fix in found.values():
        after = resolve(fix.setup)
        woken = after.offload_param is not None or after.offload_optimizer is not None and before.offload_optimizer is None
        assert ("over PCIe" in fix.cost) == woken, fix.id


def test_stage_3_with_parameters_alone_on_the_host():
    """By hand, of gpt2 in bf16: two passes fetch the weights, the step sends them down."""
    setup = job("gpt2", 2, world_size=1, micro_batch=1)
    assert pcie.bytes_per_step(setup, resolve(setup), estimated(setup), 3, True, optimizer=False) == (2 * 2 + 2) * 124_439_808


def test_two_at_once_do_not_undo_each_other():
    """Offload of the optimizer wants stage 1 at least: stage 3 beside it stays 3."""
    setup = job(stage=2, zero={"offload_param": {"device": "cpu"}}, sequence=1024, world_size=4)
    assert all(resolve(fix.setup).stage == 3 for name, fix in fixes(setup).items() if "stage-3" in name.split("+"))
