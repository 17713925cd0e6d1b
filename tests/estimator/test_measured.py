"""Every row measured on an H200 is a test of the estimate (benchmarks/accuracy/rows.jsonl); what no tape ships for is recorded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from explorer import Setup, estimate

ROWS = [json.loads(line) for line in (Path(__file__).parents[2] / "benchmarks/accuracy/rows.jsonl").read_text().splitlines()]
RAN = [row for row in ROWS if row["failure"] is None]


A_BUFFER_MORE = {"llama1b-z2-autocast-of8": 0.09, "whisper-z1-autocast": 0.07}
"""What is not understood yet: at 16-bit autocast with fp32 weights one buffer of the model's size finds no cached block that is large enough."""
UNCOUNTED = {"trainer-bert-z0-adafactor": 150_000_000}
"""Bytes of the step that the estimate says it does not count (Adafactor's column means)."""


def slack_bytes(row):
    """A few MiB; where the job names another card than the H200 it stood in on, also the difference of two cuBLAS workspaces."""
    return (4 << 20) + (0 if row["setup"].get("gpu") == "H200" else 2 * (24 << 20))


@cache
def estimated(index):
    return estimate(Setup.from_job(RAN[index]["setup"]), largest=False)


@pytest.mark.parametrize("index", range(len(RAN)), ids=[row["name"] for row in RAN])
def test_peak_allocated(index):
    """Within three tenths of a per cent; nearly all are within a hundredth."""
    assert estimated(index).peak.allocated_bytes == pytest.approx(RAN[index]["peak"]["allocated_bytes"], rel=0.003)


@pytest.mark.parametrize("index", range(len(RAN)), ids=[row["name"] for row in RAN])
def test_peak_reserved(index):
    """Nearly all to the byte, and all within 5 per cent, but where one flat buffer more or less is a large part."""
    if "capacity_gib" not in RAN[index]["setup"]:
        most = A_BUFFER_MORE.get(RAN[index]["name"], 0.05)
        assert estimated(index).peak.reserved_bytes == pytest.approx(RAN[index]["peak"]["reserved_bytes"], rel=most)


def test_reserved_is_exact_on_most_rows():
    """Which hangs on the order of requests and on where the driver puts segments: of 264 rows more than 160 are to the byte."""
    whole = [i for i, row in enumerate(RAN) if "capacity_gib" not in row["setup"]]
    exact = sum(estimated(i).peak.reserved_bytes == RAN[i]["peak"]["reserved_bytes"] for i in whole)
    near = sum(abs(estimated(i).peak.reserved_bytes / RAN[i]["peak"]["reserved_bytes"] - 1) <= 0.03 for i in whole)
    assert exact > 160
    assert near >= 0.95 * len(whole)


@pytest.mark.parametrize("index", [pytest.param(i, id=row["name"]) for i, row in enumerate(RAN) if row["setup"]["deepspeed"].get("fp16", {}).get("enabled") is True])
def test_the_first_applied_step_of_fp16(index):
    """It follows skipped ones where a gradient overflowed, whose workspaces and cached blocks it finds there; at stage 3 it prefetches then."""
    if "capacity_gib" in RAN[index]["setup"]:
        return
    for phase in RAN[index]["steps"]["first"]:
        ours = estimated(index).phase("first", phase["phase"])
        assert ours.peak_allocated_bytes == pytest.approx(phase["peak_allocated_bytes"], rel=0.012, abs=slack_bytes(RAN[index]))


@pytest.mark.parametrize("index", range(len(RAN)), ids=[row["name"] for row in RAN])
def test_every_phase_of_the_steady_step(index):
    """Peak and end of forward, backward and step: which large blocks the allocator keeps whole can move a step by a per cent (T5, stage 0, fp32)."""
    for phase in RAN[index]["steps"]["steady"]:
        ours = estimated(index).phase("steady", phase["phase"])
        if phase["phase"] == "step" and RAN[index]["name"] in UNCOUNTED:
            assert 0 < phase["peak_allocated_bytes"] - ours.peak_allocated_bytes < UNCOUNTED[RAN[index]["name"]]
            assert any("Adafactor" in note for note in estimated(index).notes)
            continue
        assert ours.peak_allocated_bytes == pytest.approx(phase["peak_allocated_bytes"], rel=0.012, abs=slack_bytes(RAN[index]))
        assert ours.end_allocated_bytes == pytest.approx(phase["end_allocated_bytes"], rel=0.02, abs=slack_bytes(RAN[index]))


@pytest.mark.parametrize("index", [pytest.param(i, id=row["name"]) for i, row in enumerate(RAN) if "at_peak" in row])
def test_categories_at_the_peak(index):
    """Each within three per cent of the peak."""
    total = RAN[index]["peak"]["allocated_bytes"]
    for category, n_bytes in RAN[index]["at_peak"].items():
        assert estimated(index).at_peak[category] == pytest.approx(n_bytes, abs=0.03 * total), category


@pytest.mark.parametrize("row", [row for row in ROWS if row["failure"]], ids=[row["name"] for row in ROWS if row["failure"]])
def test_what_ran_out_of_memory(row):
    """Never called a fit; where it is called none, the phase is the one that failed."""
    verdict = estimate(Setup.from_job(row["setup"]), largest=False).verdict
    assert verdict.answer in ("tight", "does not fit")
    if verdict.answer == "does not fit":
        assert verdict.failure.phase == row["failure"]["phase"]


@pytest.mark.parametrize("index", [pytest.param(i, id=row["name"]) for i, row in enumerate(RAN) if "capacity_gib" in row["setup"]])
def test_what_ran_under_a_limit(index):
    """Never said not to fit."""
    assert estimated(index).verdict.answer in ("fits", "tight")
