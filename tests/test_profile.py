"""Profile: the answer's form is the contract's (docs/contract.md), and JSON loses nothing."""

from __future__ import annotations

import json

import pytest

from explorer.profile import CATEGORIES, Failure, Host, Peak, PhaseMemory, Profile, Verdict, difference

ANSWER_KEYS = [
    "schema", "source", "method", "parameters", "trainable_parameters", "peak", "steps", "at_peak", "host", "outside_pytorch_bytes", "verdict", "largest_micro_batch", "provenance", "warmup_steps",
    "measured_on", "environment", "notes",
]
"""The contract's, in its order."""


def profile(peak: int = 800, **changes) -> Profile:
    at = dict.fromkeys(CATEGORIES, peak // len(CATEGORIES))
    phase = {name: PhaseMemory(phase=name, end_allocated_bytes=5, peak_allocated_bytes=peak, peak_reserved_bytes=peak + 1, at_peak=at) for name in ("init", "forward", "backward", "step")}
    return Profile(**{
        "source": "measured", "parameters": 7, "trainable_parameters": 6,
        "peak": Peak(allocated_bytes=peak, allocated_phase="backward", allocated_step="steady", reserved_bytes=peak + 1, reserved_phase="step", reserved_step="first"),
        "steps": {"first": tuple(phase.values()), "steady": tuple(phase[n] for n in ("forward", "backward", "step"))},
        "at_peak": at, "host": Host(pinned_bytes=1, pageable_bytes=2, resident_bytes=3, peak_bytes=4, per_node_bytes=5), "outside_pytorch_bytes": 9,
        "verdict": Verdict(answer="fits", capacity_bytes=1000, headroom_bytes=200, why="it ran"),
        "provenance": {"parameters": "measured"}, "warmup_steps": 2, "measured_on": "cpu", "environment": {"torch": "2.13", "gpu": None}, "notes": ("a note",), "timeline": ((1, 5), (2, peak)), **changes,
    })


def test_the_answer_has_exactly_the_contracts_keys():
    answer = profile().to_json()
    assert list(answer) == ANSWER_KEYS
    assert set(answer["peak"]) == {"allocated_bytes", "allocated_phase", "allocated_step", "reserved_bytes", "reserved_phase", "reserved_step"}
    assert set(answer["steps"]) == {"first", "steady"}
    assert all(set(p) == {"phase", "end_allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes"} for phases in answer["steps"].values() for p in phases)
    assert tuple(answer["at_peak"]) == CATEGORIES
    assert set(answer["host"]) == {"pinned_bytes", "pageable_bytes", "resident_bytes", "peak_bytes", "per_node_bytes"}
    assert set(answer["verdict"]) == {"answer", "capacity_bytes", "headroom_bytes", "failure", "why", "retries"}


FAILED = Verdict(answer="does not fit", capacity_bytes=1000, headroom_bytes=-5, failure=Failure(phase="backward", step="first", requested_bytes=77, text="CUDA out of memory."), why="…")


@pytest.mark.parametrize("verdict", [FAILED, Verdict(answer=None)], ids=["out of memory", "no capacity"])
def test_a_profile_survives_json(verdict):
    one = profile(verdict=verdict)
    assert Profile.from_json(json.loads(json.dumps(one.to_record()))) == one
    answer = json.loads(json.dumps(one.to_json()))
    assert Profile.from_json(answer).to_json() == answer


def test_a_difference_names_the_worst_category():
    measured = profile(at_peak={**dict.fromkeys(CATEGORIES, 100), "activations": 20, "temporary": 130})
    found = difference(measured, profile(790))
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (10, 10)
    assert found.by_category["activations"] == 20 - 98
    assert found.worst_category == "activations"
