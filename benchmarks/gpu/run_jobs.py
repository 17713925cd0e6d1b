"""Measure many jobs on this machine's GPU: one JSON line per job, written as it ends.

    python benchmarks/gpu/run_jobs.py JOBS.jsonl OUT.jsonl [--parallel N] [--limit SECONDS]

JOBS.jsonl holds a job file's object a line (docs/contract.md), with an optional "name". With --parallel the GPU lock is not
taken: allocated and reserved bytes are per process and do not care, device-wide readings do.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from explorer.measure.client import run_in_worker
from explorer.setup import Setup


def measure(job: dict, locked: bool, limit: float) -> dict:
    """The row of one job: its record, or why there is none."""
    name = job.pop("name", "")
    started = time.monotonic()
    row = {"name": name, "setup": job}
    try:
        setup = Setup.from_job(job)
        argument = {"job": setup.to_job(), "locks": "/tmp/explorer-locks" if locked else None}
        row |= {"setup": setup.to_job(), "profile": run_in_worker("explorer.measure.step:run_job", argument, timeout_s=limit)}
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def main() -> None:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300)
    arguments = parser.parse_args()
    jobs = [json.loads(line) for line in arguments.jobs.read_text().splitlines() if line.strip()]
    writing = threading.Lock()

    def one(job: dict) -> None:
        row = measure(job, arguments.parallel == 1, arguments.limit)
        with writing, arguments.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(row["name"], row["seconds"], row.get("error", ""), flush=True)

    with ThreadPoolExecutor(arguments.parallel) as pool:
        list(pool.map(one, jobs))


if __name__ == "__main__":
    main()
