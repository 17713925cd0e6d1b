"""Fixes whose changed job was also run on an H200: what the doctor promised is what the step took (benchmarks/accuracy/rows.jsonl)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from explorer import Setup, estimate
from explorer.advice.fixes import propose

ROWS = {row["name"]: row for row in map(json.loads, (Path(__file__).parents[2] / "benchmarks/accuracy/rows.jsonl").read_text().splitlines())}


@pytest.mark.parametrize(
    ("before", "fix", "after"),
    [
        ("llama1b-z2", "gradient-checkpointing", "llama1b-z2-ckpt"),
        ("vitl-z2-bf16", "gradient-checkpointing", "vitl-z2-ckpt"),
        ("llama1b-z2-r0of8", "stage-3", "llama1b-z3-of8"),
        ("gemma2-z1-of8", "stage-3", "gemma2-z3-of8"),
        ("mixtral-s-z2-of8", "stage-3", "mixtral-s-z3-of8"),
        ("clip-z2off-64", "stage-3-offload", "clip-z3offboth-64"),
        ("gpt2-z1-bf16", "offload-optimizer", "gpt2-z1off"),
        ("qwen25-z3-bf16", "offload-optimizer", "qwen25-z3off"),
        ("llama-z2-fp32", "bf16", "llama-z2-bf16"),
        ("t5-z0-fp32", "bf16", "t5-z0-bf16"),
        ("llama1b-z2-eager", "sdpa", "llama-z2-bf16"),
        ("gpt2-z2", "shorter-sequences", "gpt2-s512"),
        ("clipb-z2-fp16", "more-gpus", "clipb-z2-of2"),
        ("bert-z3-bf16", "more-gpus", "bert-z3-of2"),
        ("siglip-z0-fp32", "stage-1", "siglip-z1-fp32"),
    ],
)
def test_the_promised_peak_is_what_a_real_step_took(before, fix, after):
    setup = Setup.from_job(ROWS[before]["setup"])
    promised = next(f for f in propose(setup, estimate(setup, largest=False)) if f.id == fix).profile
    assert promised.at_peak == estimate(Setup.from_job(ROWS[after]["setup"]), largest=False).at_peak, "not the job that was measured"
    assert promised.peak.allocated_bytes == pytest.approx(ROWS[after]["peak"]["allocated_bytes"], rel=0.001)
