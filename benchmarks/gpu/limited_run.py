"""One run of limits.py, in a process of its own: what PyTorch counted after each step, and where memory ran out."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import time
from bisect import bisect_right
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

from limit_cases import Case, GiB

STEPS = 10


def measure(case: Case, limit: int | None, folder: Path, addresses: bool) -> dict[str, Any]:
    """Run one case to its end or to where memory ran out."""
    from explorer.measure.meters import meter
    from explorer.setup import Setup

    job = {**case.job, "capacity_gib": None if limit is None or case.fills else limit / GiB}
    if os.environ["DS_ACCELERATOR"] == "cpu":
        job |= {"sequence": 32, "capacity_gib": None, **({} if job.get("trainer") else {"micro_batch": 1})}
    setup = Setup.from_job(job)
    run = _run_class(setup)(setup, lambda message: None)
    run.meter = _Bare(meter(run.world.device))
    row = {"name": case.name, "base": case.base, "factor": case.factor, "weights_bytes": case.weights, "pair": case.pair, "sees": case.sees, "fills": case.fills, "setup": setup.to_job(), "limit_bytes": limit}
    cuda = run.device == "cuda"
    seen = _watch_available(limit if case.sees == "limit" and not case.fills else None)
    row["failure"] = None
    history = addresses and cuda
    run.counters = []
    try:
        run._limit()
        run._environment()
        run._kernels()
        if history:
            import torch

            torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=20_000_000)
        run._initialize()
        if setup.trainer is None:  # the Trainer makes ready as it begins to train
            run.count()
        run._steps()
    except Exception as error:
        from explorer.measure.run import out_of_memory

        if not out_of_memory(error):
            raise
        run.count(alive=False)
        row["failure"] = {"phase": run.phase, "step": len(run.counters) - 2 if len(run.counters) > 1 else -1, "text": str(error)}
    row |= {"steps": run.counters, "available": seen, "parameters": run.parameters, "trainable": run.trainable, "notes": run.notes, "environment": _versions(run)}
    row["lived"] = row["failure"] is None
    if history:
        _dump(case, run, folder)
    return row


def _run_class(setup: Any) -> type:
    from explorer.measure.run import Run
    from explorer.measure.trainer import TrainerRun

    plain = Run if setup.trainer is None else TrainerRun

    class LimitRun(plain):
        """Counts after initialization and after each step, and goes on for a set number of steps."""

        counters: list[dict[str, Any]]

        def count(self, alive: bool = True) -> None:
            self.counters.append({"alive": alive, **self.meter.step_counters()})

        def done(self) -> bool:
            return len(self.steps) >= STEPS

        def began(self) -> None:
            super().began()
            self.count()

        def _step(self, number: int) -> Any:
            reading = super()._step(number)
            self.count()
            return reading

        def _step_once(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._step_once(*args, **kwargs)
            self.count()
            return result

    if plain is TrainerRun:
        initialize = LimitRun._initialize

        def with_folder(self: Any) -> None:
            import tempfile

            self.folder = tempfile.mkdtemp(prefix="explorer-limits-")
            initialize(self)

        LimitRun._initialize = with_folder
    return LimitRun


class _Bare:
    """The probe's meter without its marks and owners, so that nothing but the job allocates. Peaks are of each step and phase."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        self.device, self.host, self.alone = plain.device, plain.host, False
        self.phases: dict[str, dict[str, int]] = {}
        self.step_peak = self.step_reserved = 0
        self.cuda = plain.device == "cuda"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def step_counters(self) -> dict[str, Any]:
        """Counters since the last call."""
        self._look("")
        phases, self.phases = self.phases, {}
        found = {"allocated_peak": max((p["allocated_peak"] for p in phases.values()), default=0), "reserved_peak": max((p["reserved_peak"] for p in phases.values()), default=0), "phases": phases}
        if not self.cuda:
            return found
        import torch

        stats = torch.cuda.memory_stats()
        more = {name: stats[name] for name in ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free") if name in stats}
        return {**found, **more, "allocated": stats["allocated_bytes.all.current"], "reserved": stats["reserved_bytes.all.current"], "at_us": time.time_ns() // 1000}

    def _look(self, phase: str) -> None:
        if not self.cuda:
            return
        import torch

        stats = torch.cuda.memory_stats()
        self.step_peak, self.step_reserved = max(self.step_peak, stats["allocated_bytes.all.peak"]), max(self.step_reserved, stats["reserved_bytes.all.peak"])
        before = self.phases.get(phase or "rest", {"allocated_peak": 0, "reserved_peak": 0, "retries": 0})
        self.phases[phase or "rest"] = {
            "allocated_peak": max(before["allocated_peak"], self.step_peak), "reserved_peak": max(before["reserved_peak"], self.step_reserved),
            "allocated": stats["allocated_bytes.all.current"], "reserved": stats["reserved_bytes.all.current"], "retries": stats.get("num_alloc_retries", 0),
        }
        self.step_peak = self.step_reserved = 0
        (getattr(self, "_plain_reset", None) or torch.cuda.reset_peak_memory_stats)()

    # what run.py calls

    def begin_init(self) -> None:
        if self.cuda:
            import torch

            self._plain_reset = torch.cuda.reset_peak_memory_stats

            def reset(device: Any = None) -> None:
                """DeepSpeed resets peaks while it makes ready (runtime/utils.py, `empty_cache`)."""
                stats = torch.cuda.memory_stats()
                self.step_peak, self.step_reserved = max(self.step_peak, stats["allocated_bytes.all.peak"]), max(self.step_reserved, stats["reserved_bytes.all.peak"])
                self._plain_reset(device)

            for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"):
                setattr(torch.cuda, name, reset)
        self._look("before")

    def end_init(self) -> None:
        self._look("init")

    def begin(self, phase: str) -> None:
        self._look("rest")

    def end(self, phase: str) -> Any:
        self._look(phase)
        found = self.phases.get(phase, {"allocated_peak": 0, "reserved_peak": 0, "allocated": 0})
        from explorer.measure.meter import Reading

        return Reading(found.get("allocated", 0), found["allocated_peak"], found["reserved_peak"], 0, 0)

    def here(self) -> int:
        return 0

    def mark(self, *_: Any, **__: Any) -> int:
        return 0

    def watch(self, engine: Any, settings: Any) -> None:
        self.plain.engine = engine

    built = batch = watch_gradients = interrupted = mark


def _watch_available(limit: int | None) -> list[int]:
    """What DeepSpeed hears when it asks for available memory; `limit`: what it is told instead is this less what PyTorch holds."""
    from deepspeed.accelerator import get_accelerator

    accelerator, seen = get_accelerator(), []
    plain = accelerator.available_memory

    def available(*args: Any, **kwargs: Any) -> int:
        if limit is None:
            seen.append(int(plain(*args, **kwargs)))
        else:
            import torch

            seen.append(max(0, limit - torch.cuda.memory_reserved()))
        return seen[-1]

    accelerator.available_memory = available
    return seen


def _versions(run: Any) -> dict[str, Any]:
    import deepspeed
    import torch
    import transformers

    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "deepspeed": deepspeed.__version__, "gpu": None}
    if run.device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "total_bytes": torch.cuda.get_device_properties(0).total_memory, "driver": _driver()}
    with contextlib.suppress(ImportError):
        import pynvml

        found["pynvml"] = getattr(pynvml, "__version__", "installed")
    return found


def _driver() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return ""


_ACTIONS = {"segment_alloc": 0, "segment_free": 1, "segment_map": 2, "segment_unmap": 3, "alloc": 4, "free_requested": 5, "free_completed": 6, "oom": 7, "snapshot": 8}


def _dump(case: Case, run: Any, folder: Path) -> None:
    """The run's segments in order; of a run without a limit every block up to the end of the second step too. Addresses are in units of 512 bytes from the lowest."""
    import torch

    snapshot = torch.cuda.memory._snapshot()
    trace = snapshot["device_traces"][0]
    lowest = min((e.get("addr", 0) for e in trace if e["action"] in ("segment_alloc", "segment_map")), default=0)
    entries = [[_ACTIONS.get(e["action"], 9), (e.get("addr", lowest) - lowest) // 512, e["size"], e.get("stream", 0)] for e in trace]
    times = [e["time_us"] for e in trace]
    starts = [bisect_right(times, counter["at_us"]) for counter in run.counters]
    segments = [[i, *e] for i, e in enumerate(entries) if e[0] in (0, 1, 2, 3, 7)]
    held = [[(s["address"] - lowest) // 512, s["total_size"], s.get("stream", 0), s["segment_type"], bool(s.get("is_expandable"))] for s in snapshot["segments"]]
    common = {"name": case.name, "lowest": lowest, "actions": _ACTIONS, "starts": starts, "settings": snapshot.get("allocator_settings")}
    append(folder / "segments.jsonl.gz", _packed({**common, "segments": segments, "held": held}))
    if case.factor is None:
        few = entries[: starts[2] if len(starts) > 2 else None]
        append(folder / f"traces-{len(case.name) % 3}.jsonl.gz", _packed({**common, "trace": few}))


def _packed(row: dict[str, Any]) -> bytes:
    return gzip.compress(json.dumps(row, separators=(",", ":")).encode() + b"\n", 9)


def append(path: Path, text: str | bytes) -> None:
    with path.open("ab") as out:
        flock(out, LOCK_EX)
        out.write(text.encode() if isinstance(text, str) else text)
