"""What the settings do, in sentences whose numbers are the estimate's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from explorer.advice.effects import effects
from explorer.advice.remarks import Remark
from explorer.estimator.estimate import estimate
from explorer.setup import Setup
from explorer.units import human


def said(zero: dict[str, Any], launcher: str | None = None, **fields: Any) -> dict[str, Remark]:
    setup = Setup(**{"model": "gpt2", "micro_batch": 1, "sequence": 128, "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": zero}, **fields})
    return {remark.id: remark for remark in effects(setup, estimated(setup), launcher)}


@cache
def estimated(setup: Setup):
    return estimate(setup, largest=False)


@pytest.mark.parametrize(("zero", "elements", "twice", "default"), [
    ({"stage": 2, "overlap_comm": True}, 500_000_000, True, True),
    ({"stage": 2, "reduce_bucket_size": 200_000_000}, 200_000_000, False, False),
    ({"stage": 1, "overlap_comm": True, "reduce_bucket_size": 100_000_000}, 100_000_000, True, False),
])
def test_buckets_cost_what_they_are_set_to(zero, elements, twice, default):
    remark = said(zero)["buffers-cost"]
    assert remark.text.startswith(f"DeepSpeed's own buffers take up to {human(elements * 2 * (1 + twice))} here")
    assert f"{elements:,} elements" in remark.text
    assert ("two of that" in remark.text, "its default" in remark.text) == (twice, default)


def test_no_buffers_no_word():
    assert "buffers-cost" not in said({"stage": 0})
    assert "pinned-host" not in said({"stage": 2})


def test_pinned_memory_is_told_with_its_number():
    pinned = {"device": "cpu", "pin_memory": True}
    profile = estimated(Setup(model="gpt2", micro_batch=1, sequence=128, deepspeed={"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": pinned}}))
    text = said({"stage": 2, "offload_optimizer": pinned})["pinned-host"].text
    assert profile.host.pinned_bytes > 0 and f"locks {human(profile.host.pinned_bytes)}" in text and human(profile.host.per_node_bytes) in text
    assert "pinned-host" not in said({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}})


def test_every_auto_comes_with_what_fills_it():
    auto = dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto")
    text = said({"stage": 3, **auto}, trainer={"bf16": True})["auto-resolved"].text
    for part in ("reduce_bucket_size = 589824 (hidden_size²)", "stage3_prefetch_bucket_size = 530841 (0.9 × hidden_size²)", "stage3_param_persistence_threshold = 7680 (10 × hidden_size)"):
        assert part in text


@pytest.mark.parametrize(("launcher", "right"), [("deepspeed", True), ("accelerate", True), ("torchrun", True), ("python", False), (None, False)])
def test_a_launcher_is_right_or_not_spoken_of(launcher, right):
    assert ("launcher-right" in said({"stage": 2}, launcher)) == right
