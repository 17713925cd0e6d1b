"""One preloaded server per machine and user: it imports torch, transformers and DeepSpeed once, and forks a child per task.

    python -m explorer.measure.worker SOCKET IDLE_SECONDS [LOCK]

The server touches no CUDA, so that each child can. A client connects, sends one JSON line ({"function", "argument", "env"})
and reads JSON lines: {"progress": text}, then {"result": ...} or {"error": {"kind", "field", "text"}}. When the client goes
away, the child's whole process group is killed at once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from explorer.measure.client import code_version
from explorer.measure.messages import described
from explorer.measure.processes import die_with_parent

FUNCTIONS = ("explorer.measure.step:run_job", "explorer.estimator.recorder:record", "explorer.workload:hub_config")
"""What a client may have run: nothing else."""

_LOG, _LOG_TAIL = "log", 1500
_CODE_CHECK_SECONDS = 5.0
_KILLED = "was killed by the operating system (signal 9), most likely because the machine ran out of host memory"


PRELOADED = (
    "torch", "transformers", "transformers.trainer", "deepspeed", "psutil", "explorer.workload", "explorer.dsconfig.auto", "explorer.measure.step", "explorer.measure.meter_cuda",
    "explorer.measure.meter_cpu", "explorer.measure.summary", "explorer.estimator.recorder", "explorer.estimator.trace",
    "transformers.models.auto.modeling_auto",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""In this order. The last is what deepspeed.initialize imports late, TorchDynamo with it (two seconds or more); older releases have it not."""
_BARE = "EXPLORER_WORKER_BARE"
"""Set where preloading cannot be had: each child then imports for itself."""


def preload() -> None:
    """Everything a child needs, without touching CUDA: torch asks NVML, not the driver, whether there is a GPU. Raises RuntimeError where something did touch it."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with hidden("bitsandbytes"):
        for name in PRELOADED[:-1]:
            importlib.import_module(name)
        _remember_cpu()
        with contextlib.suppress(ImportError):
            importlib.import_module(PRELOADED[-1])
    if importlib.import_module("torch").cuda.is_initialized():
        raise RuntimeError("an import initialized CUDA, which a forked child cannot use then")


@contextlib.contextmanager
def hidden(package: str) -> Iterator[None]:
    """A package not to be found for now: peft imports bitsandbytes where it is installed, and that asks CUDA's driver for the card as it is imported. A child finds it."""
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        for module, asks in _REMEMBERING:
            getattr(getattr(sys.modules.get(module), asks, None), "cache_clear", lambda: None)()


_REMEMBERING = (("transformers.utils.import_utils", "is_bitsandbytes_available"), ("peft.import_utils", "is_bnb_available"))
"""Who keeps the answer to whether bitsandbytes is there."""


def _remember_cpu() -> None:
    """DeepSpeed's builders ask py-cpuinfo, which takes a second and a process or more each time (ops/op_builder/builder.py, `cpu_arch`)."""
    with contextlib.suppress(ImportError):
        import cpuinfo

        known = cpuinfo.get_cpu_info()
        cpuinfo.get_cpu_info = lambda: known


class Server:
    """Accepts connections and watches children; single-threaded, so that forking is safe."""

    def __init__(self, path: str, idle_seconds: float) -> None:
        self.path, self.idle_seconds = path, idle_seconds
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self.listener.bind(path)
        os.chmod(path, 0o600)
        self.identity = _identity(path)
        self.listener.listen(32)
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.children: dict[int, tuple[socket.socket, Path]] = {}
        """Process → its client, and the folder that holds its log and whatever it puts into a temporary place."""
        self.last_used = self.last_checked = time.monotonic()
        self.code = code_version()

    def serve(self) -> None:
        """Until idle for long enough, or until the socket's file is gone or the program on disk is another; a task under way is let finish."""
        while True:
            clients = [client for client, _ in self.children.values()]
            ready, _, _ = select.select([self.listener, *clients], [], [], 0.2)
            if self.listener in ready:
                self._accept()
            for pid, (client, _) in list(self.children.items()):
                if client in ready and _gone(client):
                    _kill(pid)
            self._reap()
            if self.children:
                self.last_used = time.monotonic()
            elif self._done() and not self._withdraw():
                return

    def _done(self) -> bool:
        return time.monotonic() - self.last_used > self.idle_seconds or _identity(self.path) != self.identity or self._outdated()

    def _withdraw(self) -> bool:
        """Be found no more; whether someone came just before."""
        if _identity(self.path) == self.identity:
            os.unlink(self.path)
        return bool(select.select([self.listener], [], [], 0)[0])

    def _outdated(self) -> bool:
        """Whether the program's files changed since they were loaded; looked at every few seconds."""
        if time.monotonic() - self.last_checked < _CODE_CHECK_SECONDS:
            return False
        self.last_checked = time.monotonic()
        return code_version() != self.code

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        client.settimeout(5)
        try:
            request = json.loads(client.makefile("r", encoding="utf-8").readline())
            if request["function"] not in FUNCTIONS or (select.select([client], [], [], 0)[0] and _gone(client)):
                raise ValueError("unknown function, or whoever asked is gone")
        except (OSError, ValueError, KeyError, TypeError):
            client.close()
            return
        client.settimeout(None)
        self.last_used = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f"explorer-{os.getpid()}-"))
        pid = os.fork()
        if pid == 0:
            self.listener.close()
            for other, _ in self.children.values():
                other.close()
            _child(client, request, folder)
        self.children[pid] = client, folder

    def _reap(self) -> None:
        for pid, (client, folder) in list(self.children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            _kill(pid)  # whatever the child left behind in its group
            if status != 0:
                with contextlib.suppress(OSError):
                    client.sendall(_line({"error": _crash(status, folder / _LOG)}))
            client.close()
            shutil.rmtree(folder, ignore_errors=True)
            del self.children[pid]


def _identity(path: str) -> tuple[int, int] | None:
    """Which socket it is: another server may have taken the name."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _remove_abandoned(temporary: Path) -> None:
    """The children's folders of servers that were killed."""
    for folder in temporary.glob("explorer-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _gone(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _crash(status: int, log: Path) -> dict[str, str]:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        what = _KILLED if number == signal.SIGKILL else f"ended by signal {number} ({signal.Signals(number).name})"
    else:
        what = f"ended with code {os.WEXITSTATUS(status)}"
    tail = log.read_text(errors="replace")[-_LOG_TAIL:].strip() if log.exists() else ""
    return {"kind": "crash", "field": "", "text": f"the child process {what}" + (f"; its last words: {tail}" if tail else "")}


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _child(client: socket.socket, request: dict[str, Any], folder: Path) -> None:
    """Run one task and leave without running anything the server set up."""
    os.setsid()
    die_with_parent()
    log = os.open(folder / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request.get("env") or {})
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def emit(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            client.sendall(_line(message))

    try:
        module, _, name = request["function"].partition(":")
        answer = {"result": getattr(importlib.import_module(module), name)(request["argument"], emit)}
    except BaseException as error:  # whatever it was, the client hears of it
        answer = {"error": described(error)}
    emit(answer)
    client.close()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Serve on argv[1], for argv[2] idle seconds; argv[3], where given, is an open file whose lock ends when the server can be found."""
    if _BARE not in os.environ:
        try:
            preload()
        except RuntimeError:  # slower is better than not at all
            os.execve(sys.executable, [sys.executable, "-m", "explorer.measure.worker", *sys.argv[1:]], {**os.environ, _BARE: "1"})
    server = Server(sys.argv[1], float(sys.argv[2]))
    for handle in sys.argv[3:]:
        os.close(int(handle))
    server.serve()


if __name__ == "__main__":
    main()
