"""All ranks of a job at once, on a machine that has a GPU for each: started by DeepSpeed's launcher, followed, ended together. No torch."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from explorer.errors import CouldNotRun
from explorer.measure.messages import raised
from explorer.measure.processes import die_with_parent
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import human

JOB = "job.json"
PROGRESS = "explorer says "
"""Begins a line of progress among whatever else the ranks write."""
_GRACE_SECONDS = 5.0
"""After one rank failed, for the others to say so too: mostly all do, else they wait for it in a collective for ever."""


def answer_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its answer."""
    return folder / f"rank-{rank}.json"


def run_ranks(argument: Mapping[str, Any], devices: Sequence[str], emit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The asked rank's Profile as a record, every rank's peak in its notes; where a rank ran out of memory, that one's. `devices`: a GPU for each.

    Raises what a rank raised, or CouldNotRun where one went without an answer.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))  # in the worker's folder for this child, which goes with it
    (folder / JOB).write_text(json.dumps(dict(argument)))
    setup = Setup.from_job(argument["job"])
    command = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={_world(devices)}", f"--master_port={_free_port()}", "--quiet", "--module", "--no_local_rank", "explorer.measure.rank", str(folder)]
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, preexec_fn=die_with_parent)  # noqa: PLW1509 (one system call, and no other thread runs Python here)
    threading.Thread(target=_pass_on, args=(launcher.stdout, emit), daemon=True).start()
    try:
        answers = _await(launcher, folder, setup.world_size)
    finally:
        launcher.kill()  # its ranks die with it
        launcher.wait()
    return _summed_up(answers, setup).to_record()


def _world(devices: Sequence[str]) -> str:
    """The launcher's name for one node and its GPUs."""
    return base64.urlsafe_b64encode(json.dumps({"localhost": list(devices)}).encode()).decode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _pass_on(lines: IO[bytes], emit: Callable[[dict[str, Any]], None]) -> None:
    """Progress to whoever asked, all else to this process's log."""
    for line in lines:
        text = line.decode(errors="replace")
        if text.startswith(PROGRESS):
            emit(json.loads(text.removeprefix(PROGRESS)))
        elif text.strip():
            print(text, end="", flush=True)


def _await(launcher: subprocess.Popen[bytes], folder: Path, size: int) -> dict[int, dict[str, Any]]:
    """Rank → its answer, in the order they came: all of them, or those that came before one failed and soon after."""
    answers: dict[int, dict[str, Any]] = {}
    deadline = None
    while len(answers) < size and (deadline is None or time.monotonic() < deadline):
        ended = launcher.poll() is not None
        for rank in range(size):
            if rank not in answers and answer_file(folder, rank).exists():
                answers[rank] = json.loads(answer_file(folder, rank).read_text())
                if deadline is None and _failed(answers[rank]):
                    deadline = time.monotonic() + _GRACE_SECONDS
        if ended:
            break
        time.sleep(0.1)
    if len(answers) < size and (deadline is None or launcher.poll()):  # a rank that failed leaves an answer and the code 0; the others may then miss it
        missing = ", ".join(str(rank) for rank in range(size) if rank not in answers)
        raise CouldNotRun(f"rank {missing} of {size} was killed, and DeepSpeed's launcher ended the others; most likely the machine ran out of host memory")
    return answers


def _failed(answer: Mapping[str, Any]) -> bool:
    return "error" in answer or answer["result"]["verdict"]["failure"] is not None


def _summed_up(answers: Mapping[int, Mapping[str, Any]], setup: Setup) -> Profile:
    """One Profile for all. The first error is the cause: others lose the rank that they wait for."""
    for rank, answer in answers.items():
        if "error" in answer:
            raise raised(answer["error"], f"rank {rank} of {setup.world_size}: ")
    profiles = {rank: Profile.from_json(answer["result"]) for rank, answer in sorted(answers.items())}
    short = [rank for rank, profile in profiles.items() if profile.verdict.failure is not None]
    told = setup.rank if not short or setup.rank in short else short[0]
    peaks = ", ".join(f"rank {rank} {human(profile.peak.allocated_bytes)}" for rank, profile in profiles.items())
    notes = [f"all {setup.world_size} ranks ran for real, started by DeepSpeed's launcher; allocated at most: {peaks}"]
    if short:
        notes.append(f"rank {', '.join(map(str, short))} of {setup.world_size} ran out of memory, and that ended all; these are the figures of rank {told}")
    return replace(profiles[told], notes=(*notes, *profiles[told].notes))
