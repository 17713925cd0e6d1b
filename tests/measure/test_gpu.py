"""What only a CUDA GPU can show; skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

from explorer import Setup, estimate, probe
from explorer.measure.client import accelerator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(accelerator() != "cuda", reason="needs an NVIDIA GPU")]

BF16_STAGE_2 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}


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
    measured = probe(gpt2, save=False)
    assert sum(measured.at_peak.values()) == measured.peak.allocated_bytes
    assert abs(measured.at_peak["unexplained"]) <= 0.005 * measured.peak.allocated_bytes


def test_running_out_of_memory_is_a_result(gpt2):
    profile = probe(gpt2.replace(capacity_gib=4.0), save=False)
    assert profile.verdict.answer == "does not fit"
    assert profile.verdict.failure.phase in ("forward", "backward")
    assert "out of memory" in profile.verdict.failure.text
