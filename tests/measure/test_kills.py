"""Fifty kills at random moments, of whoever asked, of the child and of the worker itself: nothing is left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from explorer.errors import CouldNotRun
from explorer.measure import locks, records
from explorer.measure.client import lock_folder, run_in_worker
from explorer.measure.runner import probe
from tests.measure.conftest import children, wait_for, worker_pid
from tests.measure.jobs import LLAMA, job

KILLS = 50
WORKERS_TURN = {20, 40}
"""Kills that hit the worker itself: to start another takes some seconds."""
JOBS = [job(LLAMA, stage) for stage in (1, 2, 3)]

pytestmark = pytest.mark.usefixtures("needs_extra")


@pytest.fixture
def place(monkeypatch) -> Path:
    """Sockets, locks, temporary files and records of this test's own."""
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    for name in ("XDG_RUNTIME_DIR", "EXPLORER_LOCKS", "TMPDIR"):
        monkeypatch.setenv(name, str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def press(number: int) -> None:
    with contextlib.suppress(CouldNotRun):
        probe(JOBS[number % len(JOBS)])
    os._exit(0)


def ours(place: Path) -> list[int]:
    """The worker of this test and its children: they name its socket."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if str(place).encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(int(entry))
    return found


def test_fifty_kills_leave_nothing_behind(place):
    rng, context = random.Random(7), multiprocessing.get_context("fork")
    worker, kernels = worker_pid(), []
    hit = {"kernel": 0, "child": 0, "worker": 0}
    for number in range(KILLS):
        kernels = [kernel for kernel in kernels if kernel.is_alive()]
        while len(kernels) < 3:
            kernels.append(context.Process(target=press, args=(number + len(kernels),)))
            kernels[-1].start()
        time.sleep(rng.uniform(0.02, 0.5))
        if number in WORKERS_TURN:
            kind, victim = "worker", worker
        else:
            kind, victim = rng.choice([("kernel", kernel.pid) for kernel in kernels] + [("child", pid) for pid in children(worker)])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        hit[kind] += 1
        if kind == "worker":
            worker = worker_pid()
    assert min(hit.values()) >= 2, hit
    for kernel in kernels:
        kernel.kill()
        kernel.join()
    with pytest.raises(CouldNotRun, match="without an answer"):
        run_in_worker("nothing:at_all", {})  # by now the worker has seen all who asked before
    assert wait_for(lambda: ours(place) == [worker], 2)

    asked = time.monotonic()
    with locks.gpu(lock_folder(), "0", lambda place: None):
        assert time.monotonic() - asked < 2  # the system closes a dead process's files a moment after the process is gone
    assert list((lock_folder() / "gpu-0.queue").iterdir()) == []
    written = list(records.folder().glob("*"))
    assert {records.load(path).setup for path in written} <= set(JOBS)
    assert probe(JOBS[0]).measured_on == "cpu"
    assert records.find(JOBS[0]) is not None

    assert wait_for(lambda: not list(place.glob("explorer-*")), 2), "a child's folder"
