"""A message whose memory contradicts the estimate: what of the job was not pasted."""

from __future__ import annotations

import pytest

from explorer.advice import doctor, naming
from explorer.advice.consultation import consult
from explorer.advice.oom import read as read_message
from explorer.advice.unsaid import unsaid
from explorer.dsconfig.read import read
from explorer.estimator.estimate import estimate, events
from explorer.setup import Setup
from explorer.units import GiB

LLAMA = Setup(model="meta-llama/Llama-3.2-1B", micro_batch=16, sequence=4096, gpu="A100-80GB", world_size=8, deepspeed={"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
CHECKPOINTED = LLAMA.replace(gradient_checkpointing=True)


def message(allocated: float, asked: str = "31.31 GiB") -> str:
    return f"CUDA out of memory. Tried to allocate {asked} (GPU 0; 79.15 GiB total capacity; {allocated:.2f} GiB already allocated; 20.00 GiB free; {min(allocated + 30, 79):.2f} GiB reserved in total by PyTorch)"


def there(setup: Setup, asked: str = "31.31 GiB") -> float:
    """GiB allocated when the logits in fp32 are first asked for."""
    found = events(setup)
    return int(found.usage.allocated[naming.places(found, read_message(message(1, asked)))[0]]) / GiB


def said(consultation):
    return {r.id: r for r in consultation.remarks}


def test_checkpointing_that_was_not_pasted_is_named_and_answered_for():
    found = doctor(message(there(CHECKPOINTED)), LLAMA)
    remark = said(found)["not-pasted"]
    assert there(LLAMA) > 4 * there(CHECKPOINTED)
    assert remark.key == "gradient_checkpointing" and "was not pasted. With gradient checkpointing it has 23.5 GiB: answered for the job with it" in remark.text
    assert f"has {there(LLAMA):.0f} GiB by then" in remark.text
    assert found.setup == CHECKPOINTED and found.profile.peak == estimate(CHECKPOINTED, largest=False).peak
    assert "gradient-checkpointing" not in {f.id for f in found.fixes}


def test_a_job_that_was_given_whole_stays_and_is_told_what_to_set():
    found = consult(LLAMA, read(""), read_message(message(there(CHECKPOINTED))), batch_known=True)
    assert found.setup == LLAMA and "set gradient_checkpointing so and ask again" in said(found)["not-pasted"].text


def test_checkpointing_that_does_not_explain_all_of_it_is_likeliest_all_the_same():
    found = doctor(message(1.3 * there(CHECKPOINTED)), LLAMA)
    assert found.setup == LLAMA and "checkpointing most likely: with gradient checkpointing it has" in said(found)["not-pasted"].text


def test_the_other_way_round():
    """A quarter of the batch: 7.83 GiB of logits, and checkpointing that the run did not have."""
    quarter = LLAMA.replace(micro_batch=4)
    text = message(there(quarter, "7.83 GiB"), "7.83 GiB")
    checkpointed = quarter.replace(gradient_checkpointing=True)
    found = unsaid(checkpointed, read_message(text), events(checkpointed))
    assert found.agrees and found.setup == quarter and "Without gradient checkpointing it has" in found.remark(True).text


def test_a_longer_batch_is_found_by_its_logits():
    """No tensor of the job is of that size, and more is allocated than it ever has."""
    short = CHECKPOINTED.replace(micro_batch=1, sequence=512)
    found = unsaid(short, read_message(message(60.0, "20.00 MiB")), events(short))
    assert found.at_peak and found.setup is None and "compare model, batch, lengths" in found.remark(False).text
    eighth = CHECKPOINTED.replace(micro_batch=2)
    peak = estimate(eighth, largest=False).peak.allocated_bytes
    assert peak < 0.75 * there(CHECKPOINTED) * GiB
    found = unsaid(eighth, read_message(message(there(CHECKPOINTED))), events(eighth))
    assert (found.key, found.setup.micro_batch, found.agrees) == ("micro_batch", 16, True)


@pytest.mark.parametrize("setup", [LLAMA, CHECKPOINTED], ids=["plain", "checkpointed"])
def test_the_estimates_own_message_contradicts_nothing(setup):
    failure = estimate(setup, largest=False).verdict.failure
    assert unsaid(setup, read_message(failure.text), events(setup)) is None
    assert unsaid(setup, read_message(message(there(setup))), events(setup)) is None


def test_logits_are_called_by_their_shape():
    text = said(doctor(message(there(CHECKPOINTED)), CHECKPOINTED))["request-named"].text
    assert text.startswith("The 31.31 GiB that failed is the size of logits in fp32 (16 × 4096 × 128256 × 4 B): ")
    assert text.count("in forward") == 1
