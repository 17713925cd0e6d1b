"""Real jobs without a limit and then under limits near their peak: one JSON line per run, written as it ends.

    python benchmarks/gpu/limits.py OUT [--parallel N] [--minutes M] [--addresses] [--only NAME ...] [--cpu]

OUT/limits.jsonl: per run its job, limit, and of every step whether it lived, PyTorch's counters and its out-of-memory text. The limit
is `capacity_gib`: what PyTorch may reserve, as `torch.cuda.set_per_process_memory_fraction` sets it, as a multiple of the peak
allocated of the same job without one. With --addresses also OUT/segments.jsonl.gz (each cudaMalloc and cudaFree in order) and
OUT/traces-N.jsonl.gz (every block up to the end of the second step, of the runs without a limit).

`set_per_process_memory_fraction` does not change what DeepSpeed takes for available: it asks NVML for the card's free bytes
(accelerator/cuda_accelerator.py, `available_memory`), or, without pynvml, takes total less allocated. The runs named "flatten" give it the
limit's own answer (`"sees": "limit"`) or the card's (`"card"`); those named "full" have a second process that fills the card.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from limit_cases import Case, GiB, cases
from limited_run import append, measure

SECONDS = 100
"""Most for one run."""
CARD = 126 * GiB
"""Of the card, for all runs at a time."""
OUTSIDE = 3 * GiB // 2
"""CUDA context and NCCL of a process, generously."""
FILLED_OUTSIDE = 5 * GiB // 4
"""The same, as it was read here."""


def child(case: Case, limit: int | None, folder: Path, addresses: bool) -> None:
    """Run a case here and write its line, whatever comes."""
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.alarm(SECONDS)
    started = time.monotonic()
    try:
        row = measure(case, limit, folder, addresses)
    except BaseException as error:
        traceback.print_exception(error)
        row = {"name": case.name, "base": case.base, "factor": case.factor, "job": case.job, "limit_bytes": limit, "error": f"{type(error).__name__}: {error}"[:2000]}
    row["seconds"] = round(time.monotonic() - started, 1)
    row["host_peak_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    append(folder / "limits.jsonl", json.dumps(row) + "\n")
    os._exit(0)


def known(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows written so far."""
    path = folder / "limits.jsonl"
    if not path.exists():
        return {}
    return {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}


def limit_of(case: Case, rows: dict[str, dict[str, Any]]) -> int | None:
    """Bytes of a case's limit; −1 where its base did not run."""
    if case.factor is None:
        return None
    if case.weights is not None:
        return int(case.weights * case.factor)
    steps = rows.get(case.base or "", {}).get("steps")
    peak = max((s["allocated_peak"] for s in steps), default=0) if steps else 0
    return int(peak * case.factor) if peak else -1


def ready(waiting: list[Case], running: dict[int, Case], rows: dict[str, dict[str, Any]], over: set[str]) -> Iterator[Case]:
    """Cases that may begin now, in order: their base is known, and the card has room."""
    used = sum(c.expected + OUTSIDE for c in running.values())
    for case in list(waiting):
        if case.base is not None and case.base not in rows:
            if case.base in over:
                waiting.remove(case)
            continue
        if case.fills and (running or len(waiting) > sum(c.fills for c in waiting)):
            continue
        if used + case.expected + OUTSIDE > CARD:
            continue
        waiting.remove(case)
        used += case.expected + OUTSIDE
        yield case
        if case.fills:
            return


def start(case: Case, limit: int | None, folder: Path, addresses: bool) -> int:
    """Fork a child for a case; where it wants the card full, one that fills it comes first."""
    filler = _fill(limit) if case.fills and limit else 0
    pid = os.fork()
    if pid == 0:
        child(case, limit, folder, addresses)
    if filler:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.kill(filler, signal.SIGKILL)
        os.waitpid(filler, 0)
        return 0
    return pid


def _fill(limit: int) -> int:
    """A process that leaves of the card what a job may reserve and its own context takes."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        import torch

        free, _ = torch.cuda.mem_get_info()
        held = torch.empty(max(0, free - limit - FILLED_OUTSIDE), dtype=torch.uint8, device="cuda")
        os.write(writer, b"1" if held.numel() else b"0")
        time.sleep(SECONDS)
        os._exit(0)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    return pid


def compile_first(folder: Path) -> None:
    """DeepSpeed's kernels, once, before many want them."""
    for name in ("FusedAdamBuilder", "CPUAdamBuilder"):
        pid = os.fork()
        if pid == 0:
            log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            with contextlib.suppress(Exception):
                import torch
                from deepspeed.accelerator import get_accelerator

                if torch.cuda.is_available():
                    major, minor = torch.cuda.get_device_capability()
                    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
                get_accelerator().create_op_builder(name).load(verbose=False)
            os._exit(0)
    for _ in range(2):
        os.wait()


def main() -> None:
    """Run what the time allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parallel", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=8.5, help="no run begins later, compiling included")
    parser.add_argument("--addresses", action="store_true")
    parser.add_argument("--only", nargs="*", help="names of runs, or their beginnings")
    parser.add_argument("--cpu", action="store_true", help="on DeepSpeed's CPU accelerator: tries the script, measures nothing")
    parser.add_argument("--list", action="store_true", help="print the runs and end")
    arguments = parser.parse_args()
    begun = time.monotonic()
    chosen = [c for c in cases() if not arguments.only or any(c.name.startswith(name) for name in arguments.only)]
    if arguments.list:
        print("\n".join(c.name for c in chosen), f"\n{len(chosen)} runs, {sum(c.factor is not None for c in chosen)} under a limit")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"DS_ACCELERATOR": "cpu" if arguments.cpu else "cuda", "OMP_NUM_THREADS": "4"}
    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    from explorer.measure import worker

    worker.preload()
    compile_first(arguments.out)
    print(f"ready after {time.monotonic() - begun:.0f} s", flush=True)
    everything(chosen, arguments, begun)
    rows = known(arguments.out)
    print(f"{len(rows)} rows, {sum('error' in r for r in rows.values())} errors, {sum(r.get('lived') is True and r['factor'] is not None for r in rows.values())} lived under a limit, {time.monotonic() - begun:.0f} s", flush=True)


def everything(waiting: list[Case], arguments: argparse.Namespace, begun: float) -> None:
    """Keep so many runs going until none is left or the time is over."""
    folder, running, over = arguments.out, {}, set()
    while True:
        rows = known(folder)
        late, alone = time.monotonic() - begun > arguments.minutes * 60, False
        if not late:
            for case in ready(waiting, running, rows, over):
                limit = limit_of(case, rows)
                if limit == -1:
                    continue
                pid = start(case, limit, folder, arguments.addresses)
                alone = alone or not pid
                if pid:
                    running[pid] = case
                if len(running) >= arguments.parallel:
                    break
        if alone:
            continue
        if not running:
            return
        pid, status = os.wait()
        case = running.pop(pid, None)
        if case is not None:
            over.add(case.name)
            if status:
                append(folder / "limits.jsonl", json.dumps({"name": case.name, "base": case.base, "factor": case.factor, "error": f"ended with status {status}"}) + "\n")
            print(f"{time.monotonic() - begun:5.0f} s  {case.name}", flush=True)


if __name__ == "__main__":
    main()
