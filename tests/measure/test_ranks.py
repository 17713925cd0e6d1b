"""All ranks of a job at once: two processes on DeepSpeed's CPU accelerator, started by its launcher; and what becomes of their answers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from explorer.errors import BadInput, CouldNotRun
from explorer.measure import ranks
from explorer.measure.messages import described
from explorer.measure.runner import probe
from explorer.profile import Failure
from tests.measure.conftest import children, wait_for, worker_pid
from tests.measure.jobs import LLAMA, job

extra = pytest.mark.usefixtures("needs_extra")
PAIR = job(LLAMA, 2, world_size=2, rank=1)


def of_ranks() -> dict[int, int]:
    """Rank → its process, of all that run now."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            if b"-m\0explorer.measure.rank\0" in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.update((int(pair.removeprefix(b"RANK=")), int(entry)) for pair in environment if pair.startswith(b"RANK="))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def both(needs_extra):
    """(all ranks for real, one that stands in)."""
    return probe(PAIR, save=False, every_rank=True), probe(PAIR, save=False)


def test_every_rank_reports(both):
    real, alone = both
    note = next(note for note in real.notes if "ran for real" in note)
    assert note.startswith("all 2 ranks ran for real, started by DeepSpeed's launcher; allocated at most: rank 0 ") and ", rank 1 " in note
    assert not any("stands in" in note for note in real.notes)
    assert any("stands in for rank 1 of 2" in note for note in alone.notes)


def test_a_real_rank_holds_what_the_one_that_stood_in_held(both):
    real, alone = both
    for phase in ("forward", "backward", "step"):
        mine, theirs = real.phase("steady", phase).at_peak, alone.phase("steady", phase).at_peak
        for category in ("parameters", "optimizer", "gradients", "activations", "comm_buffers"):
            assert mine[category] == pytest.approx(theirs[category], rel=0.02, abs=2048), (phase, category)


@extra
def test_cancelling_ends_every_rank():
    cancel, at = threading.Event(), []

    def progress(text: str, _: float) -> None:
        if "backward" in text and not at:
            assert set(of_ranks()) == {0, 1}
            at.append(time.monotonic())
            cancel.set()

    with pytest.raises(CouldNotRun, match="^cancelled$"):
        probe(PAIR.replace(deepspeed={**PAIR.deepspeed, "gradient_accumulation_steps": 60}), save=False, every_rank=True, on_progress=progress, cancel=cancel)
    assert wait_for(lambda: not of_ranks() and not children(worker_pid()), 2)
    assert time.monotonic() - at[0] < 2.5


@extra
def test_a_rank_that_is_killed_ends_all_in_one_sentence():
    done = []

    def progress(text: str, _: float) -> None:
        if "forward" in text and not done:
            done.append(os.kill(of_ranks()[0], signal.SIGKILL))

    with pytest.raises(CouldNotRun, match="^rank 0 of 2 was killed"):
        probe(PAIR.replace(deepspeed={**PAIR.deepspeed, "gradient_accumulation_steps": 60}), save=False, every_rank=True, on_progress=progress)
    assert wait_for(lambda: not of_ranks() and not children(worker_pid()), 2)


# --- the answers


def short_of_memory(profile):
    failure = Failure(phase="backward", step="first", requested_bytes=1, text="CUDA out of memory.")
    return replace(profile, verdict=replace(profile.verdict, answer="does not fit", failure=failure))


def answer(profile):
    return {"result": json.loads(json.dumps(profile.to_record()))}


def test_the_rank_that_ran_out_of_memory_is_named_and_told_of(both):
    fine = both[1]
    told = ranks._summed_up({0: answer(short_of_memory(fine))}, PAIR)
    assert told.verdict.failure.phase == "backward"
    assert "rank 0 of 2 ran out of memory, and that ended all; these are the figures of rank 0" in told.notes
    told = ranks._summed_up({1: answer(fine), 0: answer(short_of_memory(fine))}, PAIR)
    assert told.verdict.failure is not None
    everyone = ranks._summed_up({0: answer(short_of_memory(fine)), 1: answer(short_of_memory(fine))}, PAIR)
    assert "rank 0, 1 of 2 ran out of memory, and that ended all; these are the figures of rank 1" in everyone.notes


class Launcher:
    """One that runs until it is asked for the last time."""

    def __init__(self, code: int | None = None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code


def test_one_failure_is_not_waited_upon_for_ever(both, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 0.3)
    ranks.answer_file(tmp_path, 0).write_text(json.dumps(answer(short_of_memory(both[1]))))
    assert list(ranks._await(Launcher(), tmp_path, 2)) == [0]


def test_the_first_error_is_the_cause(tmp_path):
    crash = {"error": {"kind": "crash", "field": "", "text": "Connection closed by peer"}}
    cause = {"error": {"kind": "could_not_run", "field": "", "text": "no compiler"}}
    with pytest.raises(CouldNotRun, match="^rank 1 of 2: no compiler$"):
        ranks._summed_up({1: cause, 0: crash}, PAIR)


def test_what_a_rank_refuses_is_bad_input():
    refused = {"error": described(BadInput("model", "transformers refuses it"))}
    with pytest.raises(BadInput, match="^model: transformers refuses it$"):
        ranks._summed_up({0: refused}, PAIR)


def test_a_rank_without_an_answer_is_named(tmp_path):
    with pytest.raises(CouldNotRun, match="^rank 0, 1 of 2 was killed"):
        ranks._await(Launcher(-9), tmp_path, 2)
