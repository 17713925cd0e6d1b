"""One probe per GPU at a time, across every process of the machine: an flock, which the system frees when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def gpu(folder: str | Path, index: int, waiting: Callable[[int], None]) -> Iterator[None]:
    """Hold GPU `index`; `waiting(place)` is told this process's place in the queue while it waits."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{index}.lock"
    queue = folder / f"gpu-{index}.queue"
    queue.mkdir(exist_ok=True)
    ticket = queue / f"{time.time_ns():020d}-{os.getpid()}"
    with path.open("w") as lock, _ticket(ticket):
        told = 0
        while not _first(queue, ticket) or not _taken(lock):
            place = _place(queue, ticket)
            if place != told:
                waiting(place)
                told = place
            time.sleep(0.2)
        yield


@contextlib.contextmanager
def _ticket(path: Path) -> Iterator[None]:
    path.touch()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _taken(lock) -> bool:  # noqa: ANN001 (a file)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _alive(queue: Path) -> list[Path]:
    """Tickets in order, without those of processes that died."""
    tickets = []
    for ticket in sorted(queue.iterdir()):
        pid = int(ticket.name.rpartition("-")[2])
        if Path(f"/proc/{pid}").exists():
            tickets.append(ticket)
        else:
            ticket.unlink(missing_ok=True)
    return tickets


def _place(queue: Path, ticket: Path) -> int:
    tickets = _alive(queue)
    return tickets.index(ticket) if ticket in tickets else 1


def _first(queue: Path, ticket: Path) -> bool:
    tickets = _alive(queue)
    return not tickets or tickets[0] == ticket


def clear_abandoned(lock: Path) -> None:
    """Remove the lock file of a compilation that was killed: torch waits for it for ever (torch/utils/file_baton.py). Its owner, if alive, has it open."""
    if not lock.exists():
        return
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(fd) == str(lock.resolve()):
                return
    lock.unlink(missing_ok=True)
