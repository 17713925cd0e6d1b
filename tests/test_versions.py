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
        ("0.3.10", {"all-gather-copies", "bucket-4.5", "flatten-on-cpu", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.3.17", {"all-gather-copies", "flatten-on-cpu", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.8.3", {"all-gather-copies", "one-dtype", "bf16-optimizer-at-stage-0", "flatten-on-cpu", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.12.3", {"all-gather-copies", "bf16-optimizer-at-stage-0", "flatten-on-cpu", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.14.0", {"bf16-optimizer-at-stage-0", "flatten-on-cpu", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.14.1", {"bf16-optimizer-at-stage-0", "flatten-on-cpu", "fp32-copy-at-step", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.16.9", {"bf16-optimizer-at-stage-0", "flatten-on-cpu", "fp32-copy-at-step", "pageable-offload", "no-clipping", "plain-linear"}),
        ("0.16.10", {"bf16-optimizer-at-stage-0", "flatten-on-cpu", "pageable-offload", "no-clipping", "plain-linear"}),
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


@pytest.mark.parametrize("bucket", [None, 200_000_000])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_copy_of_an_all_gather(stage, bucket):
    """0.8.3 gathers the weights through a copy of about allgather_bucket_size elements; 0.12.4 in place."""
    zero = {} if bucket is None else {"allgather_bucket_size": bucket}
    llama = {"model": "meta-llama/Llama-3.2-1B", "world_size": 8, "micro_batch": 1, "sequence": 128}
    offload = {"offload_optimizer": {"device": "cpu"}}
    old, new = (estimate(job(stage, release, {**zero, **offload}, **llama), largest=False) for release in ("0.8.3", "0.12.4"))
    step, later = (p.phase("steady", "step").peak_allocated_bytes for p in (old, new))
    assert step - later == pytest.approx(2 * (bucket or 617_907_200), rel=0.05)  # 1,235,814,400 weights in two pieces
    in_place = any("gathers into the flat parameter buffer in place" in n for n in new.notes)
    assert in_place is (bucket is not None) and not any("in place" in n for n in old.notes)


def test_a_model_smaller_than_the_bucket_is_copied_whole():
    old, new = (estimate(job(2, release, {"offload_optimizer": {"device": "cpu"}}, world_size=2), largest=False) for release in ("0.12.3", "0.12.4"))
    step, later = (p.phase("steady", "step").peak_allocated_bytes for p in (old, new))
    assert step - later == pytest.approx(2 * old.parameters, rel=0.01)


def bf16(stage: int, version: str | None, accumulation: str | None = None) -> Setup:
    types = {"data_types": {"grad_accum_dtype": accumulation}} if accumulation else {}
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW"}, **types}
    return Setup.from_job({**GPT2, "deepspeed_version": version, "world_size": 4, "deepspeed": config})


@pytest.mark.parametrize("release", ["0.8.3", "0.17.5"])
def test_bf16_at_stage_0_had_an_optimizer_of_its_own(release):
    """fp32 gradients of everything, and a quarter of the masters and states on each of four GPUs."""
    old = estimate(bf16(0, release), largest=False)
    held = old.phase("steady", "forward").at_peak
    assert held["gradients"] == pytest.approx(4 * old.parameters, rel=0.02)
    assert held["optimizer"] == pytest.approx(12 * old.parameters / 4, rel=0.02)
    new = estimate(bf16(0, "0.17.6"), largest=False)
    assert new.phase("steady", "forward").at_peak["optimizer"] == pytest.approx(12 * old.parameters, rel=0.02)


@pytest.mark.parametrize(
    ("release", "stage", "accumulation"),
    [("0.8.3", 2, "fp32"), ("0.9.5", 3, "fp32"), ("0.10.0", 1, "fp16"), ("0.17.5", 0, "bf16")],
)
def test_what_a_release_refuses_of_the_gradients_dtype(release, stage, accumulation):
    with pytest.raises(BadInput, match=rf"grad_accum_dtype: is {accumulation}.*{release} refuses"):
        resolve(bf16(stage, release, accumulation))


@pytest.mark.parametrize(("release", "stage", "accumulation"), [("0.8.3", 1, "fp32"), ("0.10.1", 2, "fp32"), ("0.17.6", 0, "bf16")])
def test_what_it_takes(release, stage, accumulation):
    assert resolve(bf16(stage, release, accumulation)).grad_accum_dtype == accumulation
