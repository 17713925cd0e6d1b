"""What only a CUDA GPU can show; skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

from explorer import Setup, estimate, probe
from explorer.measure.client import accelerator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(accelerator() != "cuda", reason="needs an NVIDIA GPU")]

BF16_STAGE_2 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}


def torch_cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.fixture
def gpt2(monkeypatch):
    """A job of about ten GiB; the suite's other tests keep to the CPU."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    accelerator.cache_clear()
    yield Setup(model="gpt2", micro_batch=8, gpu="H200", deepspeed=BF16_STAGE_2)
    accelerator.cache_clear()


def test_the_estimate_is_within_three_per_cent(gpt2):
    measured = probe(gpt2, save=False)
    assert measured.measured_on == "cuda"
    assert estimate(gpt2, largest=False).peak.allocated_bytes == pytest.approx(measured.peak.allocated_bytes, rel=0.03)


def test_categories_add_up_to_allocated(gpt2):
    """To the byte: in every phase PyTorch's counter says what the blocks of its trace add up to, as asked for and as handed out."""
    measured = probe(gpt2, save=False)
    for phase in (phase for phases in measured.steps.values() for phase in phases):
        assert sum(phase.at_peak.values()) == phase.peak_allocated_bytes
        assert phase.at_peak["unexplained"] == 0, phase.phase
    counted, followed = measured.requested_peak
    assert counted == followed


def test_the_blocks_of_an_expandable_segment_too(gpt2):
    measured = probe(gpt2.replace(allocator={"expandable_segments": True}), save=False)
    assert [phase.at_peak["unexplained"] for phases in measured.steps.values() for phase in phases] == [0] * 7


def test_every_rank_runs_where_there_is_a_gpu_for_each(gpt2):
    count = torch_cuda_devices()
    if count < 2:
        pytest.skip("needs two GPUs")
    measured = probe(gpt2.replace(world_size=2), save=False)
    assert any("all 2 ranks ran for real" in note for note in measured.notes)


def test_running_out_of_memory_is_a_result(gpt2):
    profile = probe(gpt2.replace(capacity_gib=4.0), save=False)
    assert profile.verdict.answer == "does not fit"
    assert profile.verdict.failure.phase in ("forward", "backward")
    assert "out of memory" in profile.verdict.failure.text
