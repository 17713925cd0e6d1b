"""A job that fits by its estimate, and a message that says it ran out: what can explain it, and no change that it does not need."""

from __future__ import annotations

import pytest

from explorer.advice.consultation import consult
from explorer.advice.oom import read as read_message
from explorer.advice.remaining import remaining
from explorer.dsconfig.read import read
from explorer.estimator.estimate import estimate
from explorer.setup import Setup
from explorer.units import human

GPT2 = Setup(model="gpt2", micro_batch=8, gpu="A100-80GB", deepspeed={"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})


def message(allocated: str, reserved: str, free: str, *, asked: str = "512.00 MiB", process: str = "", total: str = "79.15 GiB") -> str:
    beside = f"Process 4711 has {process} memory in use. " if process else ""
    return f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of which {free} is free. {beside}Including non-PyTorch memory, this process has {reserved} memory in use. Of the allocated memory {allocated} is allocated by PyTorch, and {_less(reserved, allocated)} is reserved by PyTorch but unallocated."


def _less(reserved: str, allocated: str) -> str:
    return f"{float(reserved.split()[0]) - 1.2 - float(allocated.split()[0]):.2f} GiB"


@pytest.mark.parametrize(("text", "first", "never"), [
    (message("70.00 GiB", "78.90 GiB", "100.00 MiB"), "the job that ran is larger: 70.0 GiB were allocated", "fragmentation"),
    (message("5.00 GiB", "6.30 GiB", "200.00 MiB", process="72.50 GiB"), "other processes, with 72.5 GiB of the card", "fragmentation"),
    (message("5.00 GiB", "78.90 GiB", "100.00 MiB"), "fragmentation: 72.7 GiB were reserved and not allocated", "the job that ran is larger"),
    ("RuntimeError: CUDA error: out of memory", "other processes on the card, which nvidia-smi shows", "larger"),
], ids=["a larger job", "others", "fragments", "no numbers"])
def test_what_the_numbers_leave_is_said_and_nothing_is_to_be_changed(text, first, never):
    found = consult(GPT2, read(""), read_message(text), batch_known=True)
    said = {r.id: r for r in found.remarks}["fits-here"]
    assert found.profile.verdict.answer == "fits" and found.fixes == () and said.severity == "cause"
    assert f"What can explain it: (1) {first}" in said.text and never not in said.text
    assert f"with {human(found.profile.verdict.headroom_bytes)} to spare" in said.text


def test_what_the_message_rules_out_is_not_said():
    """PyTorch held all that was not free, and too little of it unallocated: neither others nor fragments."""
    text = remaining(estimate(GPT2, largest=False), read_message(message("5.00 GiB", "6.30 GiB", "100.00 MiB", total="6.40 GiB"))).text
    assert "(1) a batch with more or longer samples" in text and "(2) memory beside the step" in text and "(3)" not in text


def test_a_job_that_does_not_fit_is_helped_as_before():
    found = consult(GPT2.replace(micro_batch=512), read(""), read_message(message("70.00 GiB", "78.90 GiB", "100.00 MiB")), batch_known=True)
    assert "fits-here" not in {r.id for r in found.remarks} and found.best is not None
