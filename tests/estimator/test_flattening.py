"""Where stages 1 and 2 flatten the weights: as the card's free memory and the release decide it."""

from __future__ import annotations

import pytest

from explorer import Setup, estimate
from explorer.units import GiB

LLAMA = {"model": "meta-llama/Llama-2-7b-hf", "sequence": 512, "gradient_checkpointing": True, "world_size": 4}


def job(stage: int = 2, offload: bool = True, trainer: dict | None = None, **more) -> Setup:
    zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
    config = {"bf16": {"enabled": True}, "zero_optimization": zero, "optimizer": {"type": "AdamW"}}
    if trainer is not None:
        del config["optimizer"]
    return Setup.from_job({**LLAMA, "micro_batch": 1, "deepspeed": config, "trainer": trainer, **more})


def estimated(**more):
    return estimate(job(**more), largest=False)


def way(profile) -> str:
    [note] = [n for n in profile.notes if "flattens the weights" in n]
    return note


def init_peak(profile) -> float:
    return profile.phase("first", "init").peak_allocated_bytes / GiB


def test_weights_above_half_the_card_go_by_way_of_the_host():
    """12.6 GiB of weights on a card of 23.5 GiB: a second copy has no room, and the job fits all the same."""
    profile = estimated(gpu="RTX 4090")
    assert profile.verdict.answer == "fits"
    assert "0.19.8 flattens the weights on the CPU" in way(profile) and "9.7 GiB free" in way(profile)
    assert init_peak(profile) == pytest.approx(2 * 6_738_415_616 * 1.25 / GiB, rel=0.001)  # the weights, and a clone of a rank's quarter
    assert profile.phase("steady", "backward").peak_allocated_bytes < 15 * GiB


@pytest.mark.parametrize("gpu", ["A100-40GB", "H200"])
def test_a_card_with_room_for_two_copies_flattens_on_the_gpu(gpu):
    profile = estimated(gpu=gpu)
    assert "0.19.8 flattens the weights on the GPU" in way(profile)
    assert init_peak(profile) == pytest.approx(2 * 2 * 6_738_415_616 / GiB, rel=0.001)


@pytest.mark.parametrize(("release", "place"), [("0.18.0", "CPU"), ("0.18.6", "CPU"), ("0.18.7", "GPU"), ("0.8.3", "CPU")])
def test_releases_before_0_18_7_never_flatten_on_the_gpu(release, place):
    profile = estimated(gpu="A100-80GB", deepspeed_version=release)
    assert f"DeepSpeed {release} flattens the weights on the {place}" in way(profile)
    assert init_peak(profile) == pytest.approx(12.55 * (1.25 if place == "CPU" else 2), rel=0.01)


def test_a_limit_does_not_change_what_the_card_has_free():
    """A limit on PyTorch alone: DeepSpeed still sees the whole card, flattens on the GPU, and runs out of memory there."""
    profile = estimated(gpu="H200", capacity_gib=22)
    assert "on the GPU" in way(profile)
    assert profile.verdict.answer == "does not fit" and profile.verdict.failure.phase == "init"


def test_a_capacity_without_a_card_is_never_sure():
    """A card of that size would do it; a larger one under that limit would not."""
    profile = estimated(capacity_gib=22)
    assert "on the CPU" in way(profile) and "as large as capacity_gib" in way(profile)
    assert profile.verdict.answer == "tight" and "name the card (gpu)" in profile.verdict.why
    assert estimated(capacity_gib=30).verdict.answer == "fits"


def test_without_a_capacity_there_is_room():
    assert "no card is named" in way(estimated())


def test_each_parameter_group_is_asked_about_by_itself():
    """The Trainer's second group is 0.5 MiB of norms, which always has room; the first has not."""
    trainer = {"bf16": True, "per_device_train_batch_size": 1}
    assert "in part on the GPU and in part on the CPU" in way(estimated(gpu="RTX 4090", trainer=trainer))


def test_stage_1_without_offload_as_stage_2():
    """DeepSpeed's own masters take another 6.3 GiB a GPU of 4; flattening comes first."""
    assert "on the CPU" in way(estimated(stage=1, offload=False, gpu="RTX 4090"))


@pytest.mark.parametrize("stage", [0, 3])
def test_other_stages_flatten_otherwise(stage):
    assert not [n for n in estimated(stage=stage, offload=stage == 3, gpu="RTX 4090").notes if "flattens the weights" in n]


def test_amd_cards_are_asked_for_what_pytorch_has_allocated():
    """No NVML there: what lies outside PyTorch does not count."""
    own = {"model": "meta-llama/Llama-3.1-8B", "world_size": 1, "offload": False}
    [note] = [n for n in estimate(job(gpu="MI210", **own), largest=False).notes if "flattens" in n]
    assert f"the card has {63.98 - 2 * 8_030_261_248 / GiB:.1f} GiB free" in note


def test_weights_on_their_way_over_the_host_are_in_its_peak():
    """Both copies, before anything else is held there: in bf16, of a process with nothing offloaded."""
    on_cpu = estimated(gpu="A100-80GB", offload=False, deepspeed_version="0.18.6").host.peak_bytes
    on_gpu = estimated(gpu="A100-80GB", offload=False, deepspeed_version="0.18.7").host.peak_bytes
    assert on_cpu - on_gpu == pytest.approx(2 * 2 * 6_738_415_616, rel=0.001)
