"""Ask the worker for something and follow it: progress, cancel, time limit; start it where none runs. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal

from explorer.errors import CouldNotRun, missing_extra
from explorer.measure.messages import raised

IDLE_SECONDS = 600
START_SECONDS = 120
_LONGEST_SOCKET = 100
_PASSED_ON = ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "EXPLORER_DATA", "HF_HUB_OFFLINE", "HF_HOME", "CUDA_VISIBLE_DEVICES")

Progress = Callable[[str, float], None]


def run_in_worker(function: str, argument: Mapping[str, Any], *, on_progress: Progress | None = None, cancel: threading.Event | None = None, timeout_s: float = 600) -> dict[str, Any]:
    """The result of one of the worker's functions. Raises BadInput or CouldNotRun, as the child did."""
    _require_extra(function)
    started = time.monotonic()
    if on_progress:
        on_progress("starting the worker", 0.0)
    with contextlib.closing(connect(cancel)) as client:
        env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        client.sendall(json.dumps({"function": function, "argument": dict(argument), "env": env}).encode() + b"\n")
        for message in _messages(client, started, cancel, timeout_s):
            if "progress" in message:
                if on_progress:
                    on_progress(message["progress"], time.monotonic() - started)
            elif "error" in message:
                raise raised(message["error"])
            else:
                return message["result"]
    raise CouldNotRun("the worker ended without an answer; try again")


def _messages(client: socket.socket, started: float, cancel: threading.Event | None, timeout_s: float) -> Iterator[dict[str, Any]]:
    client.settimeout(0.1)
    pending = b""
    while True:
        _heed(cancel)
        if time.monotonic() - started > timeout_s:
            raise CouldNotRun(f"it took longer than the limit of {timeout_s:.0f} s and was stopped")
        try:
            chunk = client.recv(1 << 16)
        except TimeoutError:
            continue
        except OSError:
            return
        if not chunk:
            return
        pending += chunk
        *lines, pending = pending.split(b"\n")
        for line in lines:
            yield json.loads(line)


# --- the server


def _require_extra(function: str) -> None:
    needed = ("torch", "transformers", "deepspeed") if function.startswith("explorer.measure") else ("torch", "transformers")
    for package in (*needed, "deepspeed"):
        if importlib.util.find_spec(package) is None:
            raise missing_extra("a real step" if function.startswith("explorer.measure") else "recording a model", package)


def runtime_folder() -> Path:
    """Private to the user: sockets, locks."""
    base = os.environ.get("XDG_RUNTIME_DIR") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = Path(base) / "deepspeed-memory-explorer"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def lock_folder() -> Path:
    """Shared by every user of the machine: one lock file per GPU."""
    folder = Path(os.environ.get("EXPLORER_LOCKS", "/var/lock")) / "deepspeed-memory-explorer"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            folder.chmod(0o1777)
    except OSError:
        folder = runtime_folder()
    return folder


def code_version() -> str:
    """Another for every change to the program's files, and for every Python that runs it."""
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(repr([(str(f), f.stat().st_mtime_ns) for f in files] + [sys.executable]).encode()).hexdigest()[:12]


_own_version = lru_cache(maxsize=1)(code_version)
"""The program this process loaded, as near as can be told."""


def socket_path() -> Path:
    """Where the server for this accelerator and this program listens; Unix allows about a hundred bytes, so a long folder gives way to the temporary one."""
    name = f"worker-{accelerator()}-{_own_version()}.sock"
    path = runtime_folder() / name
    if len(os.fsencode(path)) <= _LONGEST_SOCKET:
        return path
    short = Path(tempfile.gettempdir()) / f"dme-{os.getuid()}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    short.mkdir(mode=0o700, exist_ok=True)
    if short.stat().st_uid != os.getuid() or short.stat().st_mode & 0o077:
        raise CouldNotRun(f"{short} belongs to someone else; set XDG_RUNTIME_DIR to a folder of your own with a short path")
    return short / name


def connect(cancel: threading.Event | None = None) -> socket.socket:
    """A connection to a running server, started first where there is none. Raises CouldNotRun where it does not start, or is no longer wanted."""
    path = socket_path()
    with contextlib.suppress(OSError):
        return _dial(path)
    with (runtime_folder() / "worker.lock").open("w") as lock:
        _hold(lock, cancel)
        with contextlib.suppress(OSError):
            return _dial(path)
        return _start(path, lock, cancel)


def _hold(lock: IO[str], cancel: threading.Event | None) -> None:
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _heed(cancel)
            time.sleep(0.05)


def _heed(cancel: threading.Event | None) -> None:
    if cancel is not None and cancel.is_set():
        raise CouldNotRun("cancelled")


def _dial(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.connect(str(path))
    except OSError:
        client.close()
        raise
    return client


def _start(path: Path, lock: IO[str], cancel: threading.Event | None) -> socket.socket:
    """The server holds the lock too until it listens: where whoever started it is killed meanwhile, the next waits for this one instead of starting another."""
    log = path.with_suffix(".log")
    env = {**os.environ, "DS_ACCELERATOR": accelerator() or "cpu", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    env.pop("TORCH_CUDA_ARCH_LIST", None)  # DeepSpeed's op builder chokes on "9.0a"; it finds the device's own
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "explorer.measure.worker", str(path), str(IDLE_SECONDS), str(lock.fileno())],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=env, pass_fds=(lock.fileno(),),
        )
    threading.Thread(target=process.wait, daemon=True).start()  # so that none is left a zombie
    try:
        return _await(path, process, log, cancel)
    except CouldNotRun:
        process.kill()
        raise


def _await(path: Path, process: subprocess.Popen[bytes], log: Path, cancel: threading.Event | None) -> socket.socket:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return _dial(path)
        if process.poll() is not None:
            raise CouldNotRun(f"the worker could not start: {log.read_text(errors='replace').strip()[-400:]}")
        _heed(cancel)
        time.sleep(0.05)
    raise CouldNotRun(f"the worker did not start within {START_SECONDS} s; see {log}")


@lru_cache(maxsize=1)
def accelerator() -> Literal["cuda", "cpu"] | None:
    """What a probe would run on: an NVIDIA GPU, else DeepSpeed's CPU accelerator; None where the `[probe]` extra is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "deepspeed")):
        return None
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or os.environ.get("DS_ACCELERATOR") == "cpu":
        return "cpu"
    if Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists():
        return "cuda"
    smi = shutil.which("nvidia-smi")
    if smi and subprocess.run([smi, "-L"], capture_output=True, timeout=20, check=False).stdout.startswith(b"GPU"):
        return "cuda"
    return "cpu"
