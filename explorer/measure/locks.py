"""One probe per GPU at a time, across every process of the machine: an flock, which the system frees when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def gpus(folder: str | Path, names: Iterable[str], waiting: Callable[[int], None]) -> Iterator[None]:
    """Hold several GPUs, taken in one order by everybody, so that no two wait for each other."""
    with contextlib.ExitStack() as held:
        for name in sorted(names):
            held.enter_context(gpu(folder, name, waiting))
        yield


@contextlib.contextmanager
def gpu(folder: str | Path, name: str, waiting: Callable[[int], None]) -> Iterator[None]:
    """Hold the GPU of that name; `waiting(place)` is told this process's place in the queue while it waits."""
    queue = Path(folder) / f"gpu-{name}.queue"
    queue.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user made it
        queue.chmod(0o1777)
    with _open(queue.with_suffix(".lock")) as lock, _ticket(queue) as ticket:
        told = 0
        while (place := _place(queue, ticket)) or not _taken(lock):
            place = max(1, place)
            if place != told:
                waiting(place)
                told = place
            time.sleep(0.1)
        yield


def visible(count: int) -> list[str]:
    """Names of the first GPUs that this process may use: as CUDA_VISIBLE_DEVICES has them, else their numbers."""
    chosen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return chosen[:count] if len(chosen) >= count else [str(number) for number in range(count)]


@contextlib.contextmanager
def _ticket(queue: Path) -> Iterator[Path]:
    """A place in the queue: a file that counts while its maker has it locked, so who dies leaves. It shows once it is locked."""
    while True:
        ticket = queue / f"{time.time_ns():020d}-{os.getpid()}"
        coming = queue / f".{ticket.name}"
        with coming.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                coming.rename(ticket)
            except FileNotFoundError:  # taken for a dead one's before it was locked
                continue
            try:
                yield ticket
            finally:
                ticket.unlink(missing_ok=True)
            return


def _open(path: Path) -> IO[str]:
    """Open to be locked; whoever made it. In a shared folder Linux lets no one create over another user's file, so it is created only where it is missing."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return path.open()
        with contextlib.suppress(FileExistsError):
            path.open("x").close()


def _taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _place(queue: Path, ticket: Path) -> int:
    """How many wait before this one. Tickets of processes that died are removed."""
    held = [other.name for other in queue.iterdir() if _held(other)]
    return sum(name < ticket.name for name in held if not name.startswith("."))


def _held(ticket: Path) -> bool:
    try:
        with ticket.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # gone meanwhile
        return False
    with contextlib.suppress(OSError):  # another user's, in a sticky folder
        ticket.unlink(missing_ok=True)
    return False


def clear_abandoned(lock: Path) -> None:
    """Remove the lock file of a compilation that was killed: torch waits for it for ever (torch/utils/file_baton.py). Its owner, if alive, has it open."""
    if not lock.exists():
        return
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(fd) == str(lock.resolve()):
                return
    lock.unlink(missing_ok=True)
