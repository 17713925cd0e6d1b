"""One worker for all of these tests, on DeepSpeed's CPU accelerator, with sockets, locks and tapes of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_worker() -> Iterator[Path]:
    """A short path: a Unix socket's has a limit of about a hundred characters."""
    from explorer.estimator import tapes
    from explorer.measure.client import accelerator

    folder = Path(tempfile.mkdtemp(prefix="explorer-"))
    patch = pytest.MonkeyPatch()
    for name in ("XDG_RUNTIME_DIR", "EXPLORER_LOCKS"):
        patch.setenv(name, str(folder))
    patch.setenv("DS_ACCELERATOR", "cpu")
    patch.setattr(tapes, "cache_folder", lambda: folder / "tapes")
    accelerator.cache_clear()
    yield folder
    patch.undo()
    accelerator.cache_clear()
    shutil.rmtree(folder, ignore_errors=True)  # the worker ends when its socket is gone


@pytest.fixture(scope="session")
def needs_extra() -> None:
    """Skip where the probe's packages are missing."""
    for package in ("torch", "transformers", "deepspeed"):
        pytest.importorskip(package)


def worker_pid() -> int:
    """The process at the other end of the worker's socket."""
    import socket
    import struct

    from explorer.measure.client import connect

    with connect() as client:
        return struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, zombies left out.

    A process is read as a zombie as soon as its first thread has ended; while another still gives memory back, its files are open and its locks held.
    """
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            threads = len(os.listdir(f"/proc/{entry}/task"))
        except OSError:
            continue
        if int(fields[1]) == pid and (fields[0] != "Z" or threads > 1):
            found.append(int(entry))
    return found


def wait_for(what: Callable[[], object], seconds: float = 10) -> bool:
    """Whether it came to hold in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.05)
    return False
