"""DeepSpeed's releases: which behaviours hold, and what they do to an estimate."""

import pytest
from packaging.version import Version

from explorer import Setup, estimate
from explorer.dsconfig import resolve, versions
from explorer.errors import BadInput
from explorer.units import MiB

GPT2 = {"model": "gpt2", "micro_batch": 4}


def job(stage: int, version: str | None, zero: dict | None = None, **more) -> Setup:
    zero = {"stage": stage, **(zero or {})}
    return Setup.from_job({**GPT2, "deepspeed_version": version, "deepspeed": {"fp16": {"enabled": True}, "zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, **more})


@pytest.mark.parametrize(
    ("release", "names"),
    [
        ("0.3.10", {"bucket-4.5", "flatten-on-cpu", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.3.17", {"flatten-on-cpu", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.14.0", {"flatten-on-cpu", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.14.1", {"flatten-on-cpu", "fp32-copy-at-step", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.16.9", {"flatten-on-cpu", "fp32-copy-at-step", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.16.10", {"flatten-on-cpu", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.18.6", {"flatten-on-cpu", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.18.7", {"pageable-offload", "no-clipping", "plain-linear"}),
        ("0.19.3", {"pageable-offload"}),
        ("0.19.5", set()),
        ("0.19.8+cu130", set()),
        ("0.20.0", set()),
    ],
)
def test_which_behaviours_a_release_has(release, names):
    assert versions.in_force(Version(release)) == names


def test_no_version_is_the_rules_own():
    assert versions.in_force(versions.read(None)) == frozenset()
    assert versions.notes(None) == []
    assert estimate(job(2, None), largest=False).environment["deepspeed"] == versions.RULES


@pytest.mark.parametrize("written", ["latest", "", "0.16.", 0.16, ["0.16.4"]])
def test_what_is_no_version(written):
    with pytest.raises(BadInput, match="deepspeed_version"):
        estimate(job(2, written), largest=False)


def test_the_old_bucket():
    """huggingface/transformers#10011: 2e8 elements asked for 1.68 GiB in fp16."""
    buckets = {"reduce_bucket_size": 200_000_000}
    old, new = (estimate(job(2, release, buckets, world_size=2, micro_batch=1, sequence=16), largest=False).phase("steady", "backward").at_peak["comm_buffers"] for release in ("0.3.10", None))
    assert old - new == pytest.approx(3.5 * 2e8 * 2, abs=4 * MiB)


def test_the_copy_at_an_offloaded_step():
    """It is as large as this rank's fp32 partition, and gone when the step ends."""
    offload = {"offload_optimizer": {"device": "cpu"}}
    profiles = {release: estimate(job(2, release, offload), largest=False) for release in ("0.16.9", "0.16.10")}
    step, later = (profiles[r].phase("steady", "step") for r in ("0.16.9", "0.16.10"))
    assert step.peak_allocated_bytes - later.peak_allocated_bytes == pytest.approx(4 * profiles["0.16.9"].parameters, rel=0.01)
    assert step.end_allocated_bytes == later.end_allocated_bytes


def test_pinned_by_default_and_when_asked():
    offload = {"offload_optimizer": {"device": "cpu"}}
    assert estimate(job(2, "0.19.4", offload), largest=False).host.pinned_bytes == 0
    assert estimate(job(2, None, offload), largest=False).host.pinned_bytes > 0
    asked = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    assert estimate(job(2, "0.19.4", asked), largest=False).host.pinned_bytes == estimate(job(2, None, asked), largest=False).host.pinned_bytes


def test_the_clipping_default():
    assert resolve(job(2, "0.19.2")).gradient_clipping == 0
    assert resolve(job(2, None)).gradient_clipping == 1


def test_plain_linear_layers_keep_their_gathered_weights():
    """Only at stage 3, and only where the model was not built under zero.Init or the config asks for it."""
    llama = {"model": "meta-llama/Llama-3.2-1B", "world_size": 8}
    kept = estimate(job(3, "0.18.3", zero_init=False, **llama), largest=False)
    released = estimate(job(3, "0.18.3", **llama), largest=False)
    assert kept.phase("first", "forward").at_peak["gathered"] > released.phase("first", "forward").at_peak["gathered"] + 800 * MiB
    asked = estimate(job(3, None, {"memory_efficient_linear": False}, **llama), largest=False)
    assert asked.phase("first", "forward").at_peak["gathered"] == kept.phase("first", "forward").at_peak["gathered"]


def test_an_old_version_is_told_of():
    [note] = versions.notes("0.14.4")
    assert "0.14.4" in note and "fp32 partition" in note and versions.RULES in note
