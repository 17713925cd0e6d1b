"""The gather at a save: bytes by hand, and only where the config asks for it."""

from __future__ import annotations

import pytest

from explorer import estimate
from explorer.units import human

KEY = "stage3_gather_16bit_weights_on_model_save"


def notes(stage, asked, **job):
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, KEY: asked}}
    return [n for n in estimate({"model": "gpt2", "micro_batch": 1, "deepspeed": config, "world_size": 4, **job}, largest=False).notes if n.startswith(f"zero_optimization.{KEY}: a save")]


@pytest.mark.parametrize("asked", [True, "true"])
def test_gpt2_whole_on_the_host_and_its_embedding_on_the_gpu(asked):
    """124,439,808 weights; the largest module is the table of 50,257 tokens by 768."""
    (note,) = notes(3, asked)
    assert f"rank 0's host then holds {human(2 * 124_439_808)} more" in note
    assert f"each GPU up to {human(2 * 50257 * 768)} more, those of transformer.wte" in note


@pytest.mark.parametrize(("stage", "asked"), [(3, False), (3, "auto"), (2, True)])
def test_no_gather_no_note(stage, asked):
    assert notes(stage, asked) == []
