"""What training takes of the host's memory, read off real runs: one JSON line a case, written as it ends.

    python -m benchmarks.gpu.host OUT.jsonl [--parallel 10] [--seconds 330] [--only WORD] [--rows NAMES.txt]

Four kinds of case. "parts": a fresh process uses one part of CUDA after another (`host_parts.py`). "checkpoint": a model made on the
spot is saved and loaded in the forms there are (`host_checkpoints.py`). "loader": the Trainer's data loader, with and without workers.
"job": a job of `host-jobs.jsonl`, and rows of `benchmarks/accuracy/rows.jsonl` again, each in a fork of a process that has imported
everything, as the probe runs it. No case is started after --seconds. At the end the cases that failed are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import host_checkpoints, host_parts
from benchmarks.gpu.host_parts import GiB, watched

HERE = Path(__file__).parent
JOBS = HERE / "host-jobs.jsonl"
ROWS = HERE.parent / "accuracy" / "rows.jsonl"
GPU_BUDGET_BYTES, HOST_BUDGET_BYTES = 110 * GiB, 100 * GiB
"""Of an H200 and its 128 GiB host: what the cases that run together may take."""

LONGEST_SECONDS, LAST_SECONDS = 100, 12
"""What one case may take, and what the last ones may after --seconds."""

Case = dict[str, Any]
"""name, kind, argument, gpu_bytes, host_bytes."""


def cases(names: Sequence[str]) -> Iterator[Case]:
    """All of them, those first that nothing else tells."""
    for kind, module in (("parts", host_parts), ("checkpoint", host_checkpoints)):
        for name, argument in module.CASES.items():
            yield {"name": name, "kind": kind, "argument": argument, "gpu_bytes": 3 * GiB, "host_bytes": 8 * GiB}
    for job in _lines(JOBS):
        sizes = {"gpu_bytes": job.pop("gpu_gib", 8) * GiB, "host_bytes": job.pop("host_gib", 4) * GiB}
        yield {"name": job.pop("name"), "kind": "job", "argument": job, **sizes}
    rows = {row["name"]: row for row in _lines(ROWS)}
    for row in (rows[name] for name in names):
        yield {"name": row["name"], "kind": "job", "argument": row["setup"], "gpu_bytes": row["peak"]["reserved_bytes"], "host_bytes": row["host"].get("resident_bytes", 2 * GiB)}


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


# --- one case


def run(case: Case) -> Any:
    """In this process."""
    kind, argument = case["kind"], case["argument"]
    if kind == "job":
        return job(argument)
    return (host_parts if kind == "parts" else host_checkpoints).run(argument)


def job(setup: dict[str, Any]) -> dict[str, Any]:
    """A job as the probe runs it, with what kinds of memory were resident at its peak and at its end."""
    from explorer.measure.step import make_run
    from explorer.setup import Setup

    said: list[str] = []
    with watched() as watch:
        run = make_run(Setup.from_job(setup), lambda event: said.append(str(event.get("progress", ""))) or watch.mark(said[-1]))
        run.meter.alone = False
        profile = run.profile()
    record = profile.to_json()
    return {
        "setup": setup, "host": record["host"], "environment": record["environment"], "peak": record["peak"], "failure": record["verdict"]["failure"], "notes": record["notes"],
        "watch": watch.result(), "pinned": host_parts.pinned_statistics(),
    }


# --- many


def compile_extensions() -> None:
    """DeepSpeed's optimizers, once for all cases (nvcc and g++, a minute)."""
    code = "import torch, deepspeed, os; os.environ['TORCH_CUDA_ARCH_LIST'] = '.'.join(map(str, torch.cuda.get_device_capability())); from deepspeed.ops.op_builder import {0}; {0}().load(verbose=False)"
    started = [subprocess.Popen([sys.executable, "-c", code.format(name)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for name in ("FusedAdamBuilder", "CPUAdamBuilder")]
    for process in started:
        process.wait()


class Scheduler:
    """Starts cases while there is room, and writes what they print."""

    def __init__(self, out: Path, parallel: int, seconds: float) -> None:
        self.out, self.parallel, self.until = out, parallel, time.monotonic() + seconds
        self.running: dict[int, tuple[Case, int, float]] = {}
        """Process → its case, its number, when it began."""
        self.failed: list[str] = []

    def play(self, waiting: list[Case], start: Callable[[Case], tuple[int, int]]) -> None:
        """Every case once; those that no time is left for are not started."""
        while (waiting and time.monotonic() < self.until) or self.running:
            case = next((c for c in waiting if self._room(c)), None) if time.monotonic() < self.until else None
            if case is not None:
                waiting.remove(case)
                pid, pipe = start(case)
                self.running[pid] = case, pipe, time.monotonic()
                continue
            self._reap()

    def _room(self, case: Case) -> bool:
        mine = [c for c, _, _ in self.running.values()]
        if not mine:
            return True
        return len(mine) < self.parallel and all(sum(c[key] for c in mine) + case[key] <= most for key, most in (("gpu_bytes", GPU_BUDGET_BYTES), ("host_bytes", HOST_BUDGET_BYTES)))

    def _reap(self) -> None:
        for pid, (case, pipe, began) in list(self.running.items()):
            if time.monotonic() > min(began + LONGEST_SECONDS, self.until + LAST_SECONDS):
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.running[pid]
                self._write(case, pipe, status, time.monotonic() - began)
        time.sleep(0.05)

    def _write(self, case: Case, pipe: int, status: int, seconds: float) -> None:
        text = Path(f"/tmp/host-case-{pipe}.json")
        answer = json.loads(text.read_text()) if text.exists() else {"error": f"ended with status {status}"}
        text.unlink(missing_ok=True)
        if "error" in answer:
            self.failed.append(f"{case['name']}: {answer['error']}")
        with self.out.open("a") as out:
            out.write(json.dumps({"name": case["name"], "kind": case["kind"], "seconds": round(seconds, 1), **answer}) + "\n")
        print(case["name"], round(seconds, 1), str(answer.get("error", ""))[-300:], flush=True)


_number = iter(range(1 << 30))
_fresh: list[subprocess.Popen[bytes]] = []
"""Kept, since a Popen that nobody holds is waited for by the next one, and the scheduler would find no such child."""


def forked(case: Case) -> tuple[int, int]:
    """A fork of this process runs it; its answer is a file."""
    number = next(_number)
    pid = os.fork()
    if pid:
        return pid, number
    quiet = os.open(f"/tmp/host-case-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    _answer(case, number)


def fresh(case: Case) -> tuple[int, int]:
    """A process of its own runs it."""
    number = next(_number)
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.host", "--case", json.dumps(case), "--number", str(number)], stdout=subprocess.DEVNULL, stderr=open(f"/tmp/host-case-{number}.log", "w"))
    _fresh.append(child)
    return child.pid, number


def _answer(case: Case, number: int) -> None:
    try:
        answer = {"result": run(case)}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:500], "trace": traceback.format_exc()[-1500:]}
    temporary = Path(f"/tmp/host-case-{number}.part")
    temporary.write_text(json.dumps(answer, default=str))
    temporary.rename(f"/tmp/host-case-{number}.json")
    os._exit(0)


def main() -> None:
    """Run the cases, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--parallel", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--only", default="", help="cases whose name or kind holds this word")
    parser.add_argument("--rows", type=Path, default=HERE / "host-rows.txt", help="names of rows to run again, one a line")
    parser.add_argument("--case")
    parser.add_argument("--number", type=int)
    given = parser.parse_args()
    if given.case:
        _answer(json.loads(given.case), given.number)
    names = given.rows.read_text().split() if given.rows.exists() else ()
    waiting = [c for c in cases(names) if given.only in c["name"] or given.only == c["kind"]]
    scheduler = Scheduler(given.out, given.parallel, given.seconds)
    jobs = [c for c in waiting if c["kind"] == "job"]
    building = threading.Thread(target=compile_extensions) if jobs or any("adam" in str(c["argument"]) for c in waiting) else None
    if building:
        building.start()
    first = [c for c in waiting if c["kind"] != "job" and "adam" not in str(c["argument"])]
    scheduler.play(first, fresh)
    if building:
        building.join()
    scheduler.play([c for c in waiting if c["kind"] != "job" and "adam" in str(c["argument"])], fresh)
    if jobs:
        from explorer.measure.worker import preload

        preload()
        scheduler.play(jobs, forked)
    print(f"{len(scheduler.failed)} failed", *scheduler.failed, sep="\n")


if __name__ == "__main__":
    main()
