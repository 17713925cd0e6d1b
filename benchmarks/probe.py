"""The probe's bars, each with what was read.

    python -m benchmarks.probe                      of the records that ship: no GPU needed
    python -m benchmarks.probe gpu [BAR ...]        on this machine's GPU: second, cancel, kills, alone
    python -m benchmarks.probe records FOLDER       measure every shipped record's job anew on this machine's GPU

Ends with 1 where a bar is missed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from explorer.errors import CouldNotRun
from explorer.measure import records
from explorer.measure.client import connect, lock_folder
from explorer.measure.runner import probe
from explorer.setup import Setup
from explorer.timeline import mean_difference
from explorer.units import MiB, human

LLAMA = Setup(model="meta-llama/Llama-3.2-1B", micro_batch=4, deepspeed={"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}})
GPT2 = LLAMA.replace(model="gpt2", micro_batch=8)
KILLS = 10


def say(name: str, bar: str, read: str, good: bool | None) -> bool:
    """One line of the table; whether the bar was met. None: it could not be read."""
    print(f"{name:34} {bar:34} {read:44} {'–' if good is None else 'met' if good else 'MISSED'}", flush=True)
    return good is not False


# --- the records that ship


def shipped() -> bool:
    """Peaks, categories and timelines of every record."""
    return all([_record(record) for record in records.all() if record.shipped])


def _record(record: records.Record) -> bool:
    from explorer.estimator.estimate import estimate

    profile, name = record.profile, record.path.stem
    allocated = profile.peak.allocated_bytes
    steady = max((p.peak_allocated_bytes for p in profile.steps.get("steady", ())), default=None)
    highest = max((y for _, y in profile.timeline), default=None)
    apart = max(abs(sum(p.at_peak.values()) - p.peak_allocated_bytes) for phases in profile.steps.values() for p in phases)
    unexplained = max(abs(p.at_peak["unexplained"]) / p.peak_allocated_bytes for phases in profile.steps.values() for p in phases)
    requested = profile.requested_peak
    difference = mean_difference(profile, estimate(record.setup, largest=False))
    lines = [
        say(name, "timeline's peak = the peak", "no steady step" if highest is None else f"{highest - steady:+d} bytes of {human(steady)}", None if highest is None else highest == steady),
        say("", "history = requested_bytes.all.peak", "not recorded" if requested is None else f"{requested[1] - requested[0]:+d} bytes of {human(requested[0])}", None if requested is None else requested[0] == requested[1]),
        say("", "blocks = allocated_bytes.all.peak", f"{profile.at_peak['unexplained']:+d} bytes", profile.at_peak["unexplained"] == 0),
        say("", "categories within 1 MiB", f"{apart} bytes", apart <= MiB),
        say("", "unexplained ≤ 0.5 %", f"{100 * unexplained:.3f} %, worst phase", unexplained <= 0.005),
        say("", "timeline of the estimate ≤ 2 %", "no curve" if difference is None else f"{100 * difference / allocated:.2f} % of the peak", None if difference is None else difference <= 0.02 * allocated),
    ]
    return all(lines)


# --- on a GPU


def second() -> bool:
    """From press to result, twice in a row: the second is the bar."""
    times = []
    for _ in range(2):
        started = time.monotonic()
        how = _press(LLAMA)
        times.append(time.monotonic() - started)
    return say("second probe, Llama-3.2-1B ZeRO-2", "≤ 10 s from press to result", f"{times[1]:.1f} s {how} (the first {times[0]:.1f} s)", times[1] <= 10)


def _press(setup: Setup) -> str:
    try:
        from explorer.ui.state import ExplorerState
    except ImportError:  # traitlets is not installed
        probe(setup, save=False)
        return "through the client"
    state = ExplorerState(setup)
    state.wait_estimate()
    state.run_probe()
    while state.probe_status.state == "running":
        time.sleep(0.01)
    if state.probe_status.state != "done":
        raise CouldNotRun(state.probe_status.text)
    return "through the page's state"


def cancel() -> bool:
    """Cancelled at three moments: until the call returns, until no child is left, until the GPU's memory is back."""
    met = []
    for moment in ("building the model", "deepspeed.initialize", "step 2: backward"):
        before, stop, at = used_bytes(), threading.Event(), [0.0]

        def progress(text: str, _: float, moment: str = moment, stop: threading.Event = stop, at: list[float] = at) -> None:
            if text == moment and not stop.is_set():
                time.sleep(0.05)
                at[0] = time.monotonic()
                stop.set()

        with contextlib.suppress(CouldNotRun):
            probe(LLAMA, on_progress=progress, cancel=stop, save=False)
        returned = time.monotonic() - at[0]
        gone, back = _until(lambda: not children(worker_pid()), at[0]), _until(lambda before=before: used_bytes() <= before + 64 * MiB, at[0])
        met.append(say(f"cancelled at {moment}", "≤ 2 s, memory back", f"returned {returned:.2f} s, gone {gone:.2f} s, memory {back:.2f} s", max(returned, gone, back) <= 2))
    return all(met)


def kills() -> bool:
    """The client or the child killed at a random moment: nothing left, the lock free, every record whole, and the next probe runs."""
    rng, worst, before = random.Random(1), 0.0, used_bytes()
    for _ in range(KILLS):
        client = multiprocessing.get_context("fork").Process(target=_quietly, args=(GPT2,))
        client.start()
        time.sleep(rng.uniform(0.2, 3.5))
        victim = rng.choice([client.pid, *children(worker_pid())])
        at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        client.join(10)
        worst = max(worst, _until(lambda: not children(worker_pid()), at), _until(lambda: used_bytes() <= before + 64 * MiB, at))
    whole = all(_whole(path) for path in records.folder().glob("*")) if records.folder().is_dir() else True
    started = time.monotonic()
    probe(GPT2, save=False)
    return say(f"{KILLS} kills of client or child", "none left, lock free", f"all back within {worst:.2f} s; next ran in {time.monotonic() - started:.1f} s", worst <= 5 and whole and not list((lock_folder() / "gpu-0.queue").iterdir()))


def _quietly(setup: Setup) -> None:
    with contextlib.suppress(CouldNotRun):
        probe(setup)


def _whole(path: Path) -> bool:
    try:
        records.load(path)
    except ValueError:
        return False
    return path.suffix == ".json"


def alone() -> bool:
    """The same job in a group of one of NCCL's, and as rank 0 of 1 in a fake group."""
    real, fake = (_in_a_process(how) for how in (False, True))
    apart = abs(real - fake) / real
    return say("rank 0 of 1 against NCCL alone", "≤ 0.5 % allocated", f"{100 * apart:.4f} % ({human(real)}, {human(fake)})", apart <= 0.005)


def _in_a_process(fake: bool) -> int:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_here, args=(LLAMA.to_job(), fake, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join(10)
        process.kill()


def _run_here(job: dict[str, Any], fake: bool, sender: Any) -> None:
    from explorer.measure import step

    if fake:
        import torch.distributed as dist

        plain = dist.init_process_group

        def in_a_fake_group(backend: str, **_: Any) -> None:
            dist.init_process_group = plain
            step.stand_in(0, 1)

        dist.init_process_group = in_a_fake_group
    sender.send(step.make_run(Setup.from_job(job), lambda message: None).profile().peak.allocated_bytes)


# --- what is left of a probe


def used_bytes() -> int:
    """Bytes used of GPU 0, by whomever, as NVML counts them."""
    import ctypes

    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
    if nvml.nvmlDeviceGetMemoryInfo(device, memory):
        raise CouldNotRun("NVML does not say how much memory is used")
    return int(memory[2])


def worker_pid() -> int:
    """The process at the other end of the worker's socket."""
    import socket
    import struct

    with connect() as client:
        return struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _until(what: Callable[[], bool], since: float) -> float:
    """Seconds from `since` until it holds; at most 20."""
    while not what() and time.monotonic() - since < 20:
        time.sleep(0.02)
    return time.monotonic() - since


# --- records


def remeasure(folder: Path) -> bool:
    """Every shipped record's job, run here; one file each, in the records' form."""
    folder.mkdir(parents=True, exist_ok=True)
    good = True
    for record in records.all():
        if not record.shipped:
            continue
        started = time.monotonic()
        try:
            profile = probe(record.setup, save=False)
        except CouldNotRun as error:
            print(f"{record.path.stem:24} {error}", flush=True)
            good = False
            continue
        (folder / record.path.name).write_text(json.dumps(records.to_json(record.setup, profile, str(profile.environment["date"]))), encoding="utf-8")
        print(f"{record.path.stem:24} {time.monotonic() - started:5.1f} s  {human(profile.peak.allocated_bytes)} (was {human(record.profile.peak.allocated_bytes)})", flush=True)
    return good


BARS: dict[str, Callable[[], bool]] = {"second": second, "cancel": cancel, "kills": kills, "alone": alone}


def main(arguments: list[str]) -> int:
    """Print the bars asked for."""
    match arguments:
        case []:
            return 0 if shipped() else 1
        case ["gpu", *names]:
            return 0 if all([BARS[name]() for name in names or BARS]) else 1
        case ["records", folder]:
            return 0 if remeasure(Path(folder)) else 1
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
