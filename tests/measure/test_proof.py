"""The largest that fits, put to the proof where no GPU is: the steps are real, and prove nothing."""

from __future__ import annotations

import pytest

from explorer.advice.largest import prove
from tests.measure.jobs import LLAMA, job

pytestmark = pytest.mark.usefixtures("needs_extra")


@pytest.mark.parametrize("limit", [None, 0.01])
def test_the_cpu_accelerator_proves_nothing_and_says_so(limit):
    """They run, the second takes more, and neither is held to be a card's answer, whatever limit the job names."""
    proof = prove(job(LLAMA, 2, capacity_gib=limit), "micro_batch", 2)
    assert {proof.at.measured_on, proof.beyond.measured_on} == {"cpu"}
    assert proof.beyond.peak.allocated_bytes > proof.at.peak.allocated_bytes
    assert proof.holds is None
    assert "no GPU's memory ends" in proof.text
