"""The worker: children that are cancelled, killed, refused or late; one GPU at a time; an end when idle."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from explorer.errors import BadInput, CouldNotRun
from explorer.measure import locks
from explorer.measure.client import lock_folder, run_in_worker
from explorer.measure.runner import probe, why_not
from explorer.setup import Setup
from tests.measure.conftest import children, wait_for, worker_pid
from tests.measure.jobs import GPT2, LLAMA, job

LONG = job(GPT2, 1, accumulation=60)
RUN = "explorer.measure.step:run_job"


@pytest.mark.usefixtures("needs_extra")
@pytest.mark.parametrize("moment", ["building the model", "deepspeed.initialize", "step 1: forward", "step 1: backward"])
def test_cancelling_takes_two_seconds_at_most_and_leaves_no_child(moment):
    cancel, at = threading.Event(), []

    def progress(text: str, _: float) -> None:
        if text == moment and not at:
            at.append(time.monotonic())
            cancel.set()

    with pytest.raises(CouldNotRun, match="^cancelled$"):
        probe(LONG, on_progress=progress, cancel=cancel, save=False)
    assert wait_for(lambda: not children(worker_pid()), 2)
    assert time.monotonic() - at[0] < 2


@pytest.mark.usefixtures("needs_extra")
def test_cancelling_leaves_the_queue():
    held, cancel = threading.Event(), threading.Event()
    first = threading.Thread(target=_until_cancelled, args=(held, cancel))
    first.start()
    assert held.wait(60)
    later, at = threading.Event(), []

    def progress(text: str, _: float) -> None:
        if text.startswith("waiting for the GPU"):
            at.append(time.monotonic())
            later.set()

    with pytest.raises(CouldNotRun, match="^cancelled$"):
        probe(LONG, on_progress=progress, cancel=later, save=False)
    assert time.monotonic() - at[0] < 2 and first.is_alive()
    cancel.set()
    first.join(10)
    assert wait_for(lambda: not children(worker_pid()), 2)
    told: list[int] = []
    with locks.gpu(lock_folder(), "0", told.append):
        assert told == []


def _until_cancelled(running: threading.Event, cancel: threading.Event) -> None:
    with contextlib.suppress(CouldNotRun):
        probe(LONG, on_progress=lambda text, _: running.set() if "forward" in text else None, cancel=cancel, save=False)


@pytest.mark.usefixtures("needs_extra")
def test_a_killed_child_is_one_sentence():
    def progress(text: str, _: float) -> None:
        if "forward" in text:
            for pid in children(worker_pid()):
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(CouldNotRun, match="the child process was killed by the operating system"):
        probe(LONG, on_progress=progress, save=False)
    assert wait_for(lambda: not children(worker_pid()))


@pytest.mark.usefixtures("needs_extra")
def test_a_time_limit_is_one_sentence_and_ends_the_child():
    with pytest.raises(CouldNotRun, match="longer than the limit of 1 s"):
        run_in_worker(RUN, {"job": LONG.to_job()}, timeout_s=1)
    assert wait_for(lambda: not children(worker_pid()))


@pytest.mark.usefixtures("needs_extra")
def test_bad_input_comes_back_as_bad_input():
    bad = job({**LLAMA, "hidden_act": "nothing"}, 2)
    with pytest.raises(BadInput) as caught:
        run_in_worker(RUN, {"job": bad.to_job()})
    assert caught.value.field == "model"


@pytest.mark.usefixtures("needs_extra")
def test_only_the_workers_own_functions_run(tmp_path):
    with pytest.raises(CouldNotRun, match="without an answer"):
        run_in_worker("os:mkdir", {"path": str(tmp_path / "made")})
    assert not (tmp_path / "made").exists()


KERNEL = """
import json, sys, time
from explorer.measure.runner import probe
from explorer.setup import Setup
said = []
profile = probe(Setup.from_job(json.loads(sys.argv[1])), on_progress=lambda text, _: said.append((text, time.monotonic())), save=False)
print(json.dumps({"said": said, "peak": profile.peak.allocated_bytes}))
"""


@pytest.mark.usefixtures("needs_extra")
def test_five_kernels_press_at_once():
    """One runs after the other, none is lost, and each is told its place as it moves up."""
    worker_pid()
    content = json.dumps(job(LLAMA, 1).to_job())
    kernels = [subprocess.Popen([sys.executable, "-c", KERNEL, content], stdout=subprocess.PIPE, text=True) for _ in range(5)]
    answers = [json.loads(kernel.communicate(timeout=120)[0]) for kernel in kernels]
    assert len({answer["peak"] for answer in answers}) == 1
    runs, waits = [], []
    for answer in answers:
        moments = [(text, at) for text, at in answer["said"] if text != "starting the worker"]
        waits.append([int(text.split("place ")[1].rstrip(")")) for text, _ in moments if text.startswith("waiting for the GPU")])
        ran = [at for text, at in moments if not text.startswith("waiting")]
        runs.append((ran[0], ran[-1]))
    runs.sort()
    assert all(ended <= begun for (_, ended), (begun, _) in itertools.pairwise(runs))
    assert all(places == sorted(places, reverse=True) for places in waits)
    assert sorted(places[-1] for places in waits if places) == [1] * sum(map(bool, waits)) and sum(map(bool, waits)) >= 3
    assert max(max(places, default=0) for places in waits) >= 2


@pytest.mark.usefixtures("needs_extra")
def test_the_worker_ends_when_idle(_own_worker):
    path = _own_worker / "idle.sock"
    process = subprocess.Popen([sys.executable, "-m", "explorer.measure.worker", str(path), "0.5"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert process.wait(timeout=90) == 0
    finally:
        process.kill()
    assert not path.exists()


LARGE = {"model": "meta-llama/Llama-3.1-8B", "micro_batch": 1}
REASONS = {
    "too many parameters": (LARGE, "million parameters are too many"),
    "fp16": ({**job(GPT2, 2, precision="fp16").to_job()}, "does not train in fp16"),
    "too long": ({"model": "gpt2", "micro_batch": 4096}, "take minutes on the CPU; try a micro-batch of at most"),
}


@pytest.mark.usefixtures("needs_extra")
@pytest.mark.parametrize(("content", "words"), REASONS.values(), ids=REASONS)
def test_why_a_step_cannot_run_here(content, words):
    setup = Setup.from_job(content)
    assert words in why_not(setup)
    with pytest.raises(CouldNotRun, match=words):
        probe(setup)


def test_nothing_speaks_against_a_small_job():
    assert why_not(job(LLAMA, 2)) is None
