"""The worker: children that are cancelled, killed, refused or late; one GPU at a time; an end when idle."""

from __future__ import annotations

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
from tests.measure.conftest import children, worker_pid
from tests.measure.jobs import GPT2, LLAMA, job

LONG = job(GPT2, 1, accumulation=60)
RUN = "explorer.measure.step:run_job"


def wait_for(what, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.usefixtures("needs_extra")
def test_cancelling_leaves_no_child():
    cancel, said = threading.Event(), []

    def progress(text: str, _: float) -> None:
        said.append(text)
        if "forward" in text:
            cancel.set()

    with pytest.raises(CouldNotRun, match="^cancelled$"):
        probe(LONG, on_progress=progress, cancel=cancel, save=False)
    assert said[0] == "starting the worker" and "building the model" in said
    assert wait_for(lambda: not children(worker_pid()))


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


@pytest.mark.usefixtures("needs_extra")
def test_two_probes_run_one_after_the_other():
    spans: dict[int, list[float]] = {0: [], 1: []}
    waited: list[str] = []

    def run(number: int) -> None:
        def progress(text: str, _: float) -> None:
            (waited if text.startswith("waiting") else spans[number]).append(text if text.startswith("waiting") else time.monotonic())

        run_in_worker(RUN, {"job": job(LLAMA, 1).to_job(), "locks": str(lock_folder())}, on_progress=progress)

    threads = [threading.Thread(target=run, args=(number,)) for number in spans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, other = sorted((span[1:] for span in spans.values()), key=lambda span: span[0])  # the first is "starting the worker"
    assert len(one) == len(other) > 8
    assert one[-1] < other[0]
    assert waited == ["waiting for the GPU (place 2)", "waiting for the GPU (place 1)"] or waited == ["waiting for the GPU (place 2)"] or waited == ["waiting for the GPU (place 1)"]


def test_a_dead_process_in_the_queue_is_passed_over(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    queue = tmp_path / "gpu-0.queue"
    queue.mkdir()
    (queue / f"{0:020d}-{dead.pid}").touch()
    told: list[int] = []
    with locks.gpu(tmp_path, 0, told.append):
        assert told == []
        assert len(list(queue.iterdir())) == 1
    assert list(queue.iterdir()) == []


def test_the_lock_is_given_back_when_its_holder_fails(tmp_path):
    with pytest.raises(RuntimeError), locks.gpu(tmp_path, 0, print):
        raise RuntimeError
    with locks.gpu(tmp_path, 0, print):
        pass


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
