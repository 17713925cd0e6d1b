"""One probe per GPU: a queue that the dead leave, a lock that any user may take, and what a killed compilation left."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from explorer.measure import locks
from explorer.measure.locks import clear_abandoned

HOLD = "import sys, time; from explorer.measure import locks\nwith locks.gpu(sys.argv[1], '0', lambda place: print(place, flush=True)):\n    print('held', flush=True)\n    time.sleep(60)"


def holder(folder, **options) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, **options)


def test_the_killed_leave_the_queue_whoever_has_their_number_now(tmp_path):
    running, waiting = holder(tmp_path), None
    try:
        assert running.stdout.readline() == "held\n"
        waiting = holder(tmp_path)
        assert waiting.stdout.readline() == "1\n"
        told, taken = [], threading.Event()

        def third() -> None:
            with locks.gpu(tmp_path, "0", told.append):
                taken.set()

        thread = threading.Thread(target=third)
        thread.start()
        time.sleep(0.5)
        assert told == [2]
        waiting.kill()
        time.sleep(0.5)
        assert told == [2, 1] and not taken.is_set()
        running.kill()
        assert taken.wait(5)
        thread.join()
        waiting.wait(), running.wait()
        # a ticket whose maker is gone counts for nothing, though its number is a living process's
        (tmp_path / "gpu-0.queue" / f"{0:020d}-{os.getpid()}").touch()
        with locks.gpu(tmp_path, "0", told.append):
            assert told == [2, 1] and len(list((tmp_path / "gpu-0.queue").iterdir())) == 1
        assert list((tmp_path / "gpu-0.queue").iterdir()) == []
    finally:
        for process in filter(None, (running, waiting)):
            process.kill()
            process.wait()


def test_the_lock_is_given_back_when_its_holder_fails(tmp_path):
    with pytest.raises(RuntimeError), locks.gpu(tmp_path, "0", print):
        raise RuntimeError
    with locks.gpu(tmp_path, "0", print):
        pass


def test_several_are_taken_in_one_order(tmp_path):
    """Two that ask for the same two GPUs in opposite orders do not wait for each other."""
    done = []

    def take(names: list[str]) -> None:
        for _ in range(3):
            with locks.gpus(tmp_path, names, lambda place: None):
                time.sleep(0.02)
        done.append(names)

    threads = [threading.Thread(target=take, args=(names,), daemon=True) for names in (["0", "1"], ["1", "0"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(done) == 2


def _as_nobody(folder: str, held) -> None:  # noqa: ANN001 (an event)
    os.setuid(65534)
    with locks.gpu(folder, "0", lambda place: None):
        held.set()
        time.sleep(60)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_may_take_it():
    """In a folder like /var/lock: open to all, sticky; the files are those of the first who came."""
    folder = tempfile.mkdtemp(prefix="locks-")
    os.chmod(folder, 0o1777)
    with locks.gpu(folder, "0", print):
        pass
    context = multiprocessing.get_context("fork")
    held, told = context.Event(), []
    other = context.Process(target=_as_nobody, args=(folder, held), daemon=True)
    other.start()
    try:
        assert held.wait(5)
        threading.Timer(0.5, other.kill).start()
        with locks.gpu(folder, "0", told.append):
            assert told == [1]
    finally:
        other.kill()
        other.join()
        shutil.rmtree(folder)


@pytest.mark.parametrize(("setting", "names"), [(None, ["0", "1"]), ("", ["0", "1"]), ("3,5,7", ["3", "5"]), (" GPU-ab , 2", ["GPU-ab", "2"]), ("4", ["0", "1"])])
def test_a_gpu_is_known_by_its_name_on_the_machine(monkeypatch, setting, names):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert locks.visible(2) == names


def test_a_lock_whose_owner_is_gone_is_removed_and_a_held_one_stays(tmp_path):
    lock = tmp_path / "lock"
    with lock.open("w"):
        clear_abandoned(lock)
        assert lock.exists()
    clear_abandoned(lock)
    assert not lock.exists()
    clear_abandoned(lock)  # nothing there: nothing to do
