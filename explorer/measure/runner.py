"""Ask the worker for something and follow it: progress, cancel, time limit. No torch here; it runs in the dashboard's kernel."""

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
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from explorer.errors import BadInput, CouldNotRun, missing_extra
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import GiB, human

IDLE_SECONDS = 600
START_SECONDS = 120
_PASSED_ON = ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "EXPLORER_DATA", "HF_HUB_OFFLINE", "HF_HOME", "CUDA_VISIBLE_DEVICES")

Progress = Callable[[str, float], None]

CPU_PARAMETERS = 250_000_000
"""Largest model the CPU accelerator is asked to train: above it a step takes minutes."""
CPU_WORK = 60e12
"""Parameters × tokens of one micro-batch, likewise: about a minute on two cores."""


def run_in_worker(function: str, argument: Mapping[str, Any], *, on_progress: Progress | None = None, cancel: threading.Event | None = None, timeout_s: float = 600) -> dict[str, Any]:
    """The result of one of the worker's functions. Raises BadInput or CouldNotRun, as the child did."""
    _require_extra(function)
    started = time.monotonic()
    if on_progress:
        on_progress("starting the worker", 0.0)
    with contextlib.closing(_connect()) as client:
        env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        client.sendall(json.dumps({"function": function, "argument": dict(argument), "env": env}).encode() + b"\n")
        for message in _messages(client, started, cancel, timeout_s):
            if "progress" in message:
                if on_progress:
                    on_progress(message["progress"], time.monotonic() - started)
            elif "error" in message:
                raise _raised(message["error"])
            else:
                return message["result"]
    raise CouldNotRun("the worker ended without an answer; try again")


def _messages(client: socket.socket, started: float, cancel: threading.Event | None, timeout_s: float) -> Iterator[dict[str, Any]]:
    client.settimeout(0.1)
    pending = b""
    while True:
        if cancel is not None and cancel.is_set():
            raise CouldNotRun("cancelled")
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


def _raised(error: Mapping[str, str]) -> Exception:
    if error["kind"] == "bad_input":
        return BadInput(error["field"], error["text"])
    return CouldNotRun(error["text"])


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


@lru_cache(maxsize=1)
def _code_version() -> str:
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(repr([(str(f), f.stat().st_mtime_ns) for f in files] + [sys.executable]).encode()).hexdigest()[:12]


def _connect() -> socket.socket:
    """A connection to a running server, started first where there is none."""
    path = runtime_folder() / f"worker-{accelerator()}-{_code_version()}.sock"
    with contextlib.suppress(OSError):
        return _dial(path)
    with (runtime_folder() / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            return _dial(path)
        return _start(path)


def _dial(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.connect(str(path))
    except OSError:
        client.close()
        raise
    return client


def _start(path: Path) -> socket.socket:
    log = path.with_suffix(".log")
    env = {**os.environ, "DS_ACCELERATOR": accelerator() or "cpu", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    env.pop("TORCH_CUDA_ARCH_LIST", None)  # DeepSpeed's op builder chokes on "9.0a"; it finds the device's own
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "explorer.measure.worker", str(path), str(IDLE_SECONDS)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=env,
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return _dial(path)
        if process.poll() is not None:
            raise CouldNotRun(f"the worker could not start: {log.read_text(errors='replace').strip()[-400:]}")
        time.sleep(0.05)
    process.kill()
    raise CouldNotRun(f"the worker did not start within {START_SECONDS} s; see {log}")


# --- the probe


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


def why_not(setup: Setup) -> str | None:
    """One sentence why a real step of this setup cannot run here; None where it can."""
    here = accelerator()
    if here is None:
        return "a real step needs torch, transformers and deepspeed: pip install 'deepspeed-memory-explorer[probe]'"
    if here == "cuda":
        return None
    return _why_not_on_cpu(setup)


def _why_not_on_cpu(setup: Setup) -> str | None:
    from explorer.catalog import find_model, lengths
    from explorer.dsconfig import resolve

    model = find_model(setup.model)
    at = lengths(setup, model)
    settings = resolve(setup)
    parameters = model.parameters or _rough_parameters(model.config)
    if parameters > CPU_PARAMETERS:
        return f"there is no GPU here, and {parameters / 1e6:.0f} million parameters are too many for a step on the CPU (at most {CPU_PARAMETERS / 1e6:.0f} million)"
    tokens = at.micro_batch * ((at.sequence or 0) + (at.target_sequence or 0) + (at.patches or 0) or 1500)
    work = parameters * tokens * settings.gradient_accumulation_steps
    if work > CPU_WORK:
        return f"there is no GPU here, and this step would take minutes on the CPU; try a micro-batch of at most {max(1, int(setup.micro_batch * CPU_WORK / work))}"
    if settings.precision == "fp16":
        return "there is no GPU here, and DeepSpeed's CPU accelerator does not train in fp16; choose bf16 or fp32"
    needed = 24 * parameters + work // max(1, parameters) * 4096 * 4
    free = _available_ram()
    if needed > free // 2:
        return f"there is no GPU here, and the step would need about {human(needed)} of the {human(free)} of host memory that is free"
    return None


def _rough_parameters(config: Mapping[str, Any]) -> int:
    """An order of magnitude for a model that no tape has counted yet: 12 × layers × width², and the vocabulary."""

    def first(*names: str) -> int:
        return next((config[n] for n in names if isinstance(config.get(n), int)), 0)

    parts = [config, *(config[k] for k in ("text_config", "vision_config") if isinstance(config.get(k), Mapping))]
    total = 0
    for config in parts:  # noqa: PLR1704 (first() reads it)
        width = first("hidden_size", "n_embd", "d_model")
        layers = first("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")
        total += 12 * layers * width * width + first("vocab_size") * width
    return total


def _available_ram() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 * GiB


def probe(setup: Setup | Mapping[str, Any], *, on_progress: Progress | None = None, cancel: threading.Event | None = None, timeout_s: float = 900, save: bool = True) -> Profile:
    """One real training step of `setup`, measured. Running out of GPU memory is a result; not being able to run raises CouldNotRun."""
    job = setup if isinstance(setup, Setup) else Setup.from_job(setup)
    reason = why_not(job)
    if reason:
        raise CouldNotRun(reason)
    argument = {"job": job.to_job(), "locks": str(lock_folder())}
    profile = Profile.from_json(run_in_worker("explorer.measure.step:run_job", argument, on_progress=on_progress, cancel=cancel, timeout_s=timeout_s))
    if save:
        from explorer.measure import records

        records.save(job, profile)
    return profile
