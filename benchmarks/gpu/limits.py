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
import gzip
import json
import os
import resource
import signal
import sys
import time
import traceback
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

GiB = 1 << 30
STEPS = 10
SECONDS = 100
"""Most for one run."""
CARD = 126 * GiB
"""Of the card, for all runs at a time."""
OUTSIDE = 3 * GiB // 2
"""CUDA context and NCCL of a process, generously."""
FILLED_OUTSIDE = 5 * GiB // 4
"""The same, as it was read here."""
ROWS = Path(__file__).resolve().parents[1] / "accuracy" / "rows.jsonl"

NAMES = (
    "gpt2-z2", "bert-z2", "lora-llama-1b-z2", "bart-z1-fp16", "bart-z0", "vitl-z2-fp16", "gpt2-z1-fp16", "siglip-z1-fp16", "clipb-z2-fp16", "opt-z3-of8", "whisper-z2-fp16",
    "gpt2-z1off", "bert-z2off-gas3", "vitl-z3offboth", "bart-z3offboth", "phi3-z3offboth", "trainer-clip-z2off", "bart-z2off-ckpt",
    "lora-gpt2-z0", "lora-llama-1b-z2-checkpointed", "lora-llama-1b-z3-of-8", "internvl-z2-lora", "clip-large-frozen-vision-z2", "siglip-z3-of8",
    "trainer-gpt2-z2", "trainer-bert-z3", "mixtral-s-z2-of8", "dinov2-z2-of8", "vitl-z1-bucket2e8-of2", "t5-z0-bf16", "gpt2-z2-expandable", "gpt2-z3-expandable", "qwen3-s512",
)
TRACED = ("llama1b-z2-autocast-of8", "whisper-z1-autocast", "gemma2-z3-of8", "clipb-z2-ckpt", "llama1b-z2-eager", "llama3b-z3-of8", "whisper-z2-eager", "clipb-z2-of2", "llama1b-z3-of8-ckpt", "pythia-z3-of2")
"""Run without a limit only, with --addresses: their reserved bytes are estimated worst."""
FACTORS = (0.99, 1.01, 1.02, 1.04, 1.06, 1.08, 1.11, 1.15)
PAIRED = {"gpt2-z2": (1.01, 1.06, 1.11), "bert-z2": (0.99, 1.02, 1.04), "lora-llama-1b-z2": (1.01, 1.03, 1.06), "bart-z1-fp16": (1.01, 1.06, 1.11)}
OPTIONS: dict[str, dict[str, Any]] = {
    "expandable": {"expandable_segments": True}, "split": {"max_split_size_mb": 128}, "collect": {"garbage_collection_threshold": 0.8}, "roundup": {"roundup_power2_divisions": 4},
}
EXTRA = {
    "internvl-z3-of8": {"model": "OpenGVLab/InternVL3-1B-hf", "micro_batch": 1, "sequence": 512, "world_size": 8, "gpu": "H200", "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}},
    "qwen25-z2off-of8": {"model": "Qwen/Qwen2.5-0.5B", "micro_batch": 1, "sequence": 1024, "world_size": 8, "gpu": "H200", "deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}},
}
_SMALL = {"micro_batch": 1, "sequence": 128, "gpu": "H200"}
_BUCKETS = {"reduce_bucket_size": 5000000, "allgather_bucket_size": 5000000}
FLATTEN: dict[str, tuple[dict[str, Any], float, tuple[float, ...]]] = {
    "llama1b-z2off": ({"model": "meta-llama/Llama-3.2-1B", **_SMALL, "deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, **_BUCKETS}, "bf16": {"enabled": True}}}, 2471628800, (1.1, 1.4, 1.7, 1.95, 2.05)),
    "llama1b-z1-of64": ({"model": "meta-llama/Llama-3.2-1B", **_SMALL, "world_size": 64, "deepspeed": {"zero_optimization": {"stage": 1, **_BUCKETS}, "bf16": {"enabled": True}}}, 2471628800, (1.3, 1.6, 1.95, 2.1)),
    "qwen25-z2-of8": ({"model": "Qwen/Qwen2.5-0.5B", **_SMALL, "world_size": 8, "deepspeed": {"zero_optimization": {"stage": 2, **_BUCKETS}, "fp16": {"enabled": True}}}, 988065536, (1.5, 1.9, 2.05, 2.4)),
    "gpt2l-z2off": ({"model": "gpt2-large", **_SMALL, "deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, **_BUCKETS}, "fp16": {"enabled": True}}}, 1548060160, (1.2, 1.6, 1.95, 2.05)),
}
"""Job, bytes of its 16-bit weights (parameters × 2), limits as multiples of them."""


@dataclass(slots=True)
class Case:
    """One run."""

    name: str
    job: dict[str, Any]
    expected: int
    """Bytes it may take of the card, for the planning only."""
    base: str | None = None
    factor: float | None = None
    """Limit as a multiple of the base's peak allocated, or of the weights where `weights` is set."""
    weights: int | None = None
    sees: str = "card"
    """What DeepSpeed is told is available: the card's free bytes, or the limit's."""
    fills: bool = False
    """Whether another process fills the card but for the limit."""
    pair: str | None = None


def cases() -> list[Case]:
    """Every run: jobs without a limit first, pairs soon after, then limits of the others."""
    rows = {row["name"]: row for row in map(json.loads, ROWS.read_text().splitlines())}
    bases = {name: Case(name, {k: v for k, v in rows[name]["setup"].items() if k != "schema"}, rows[name]["peak"]["reserved_bytes"]) for name in NAMES}
    bases |= {name: Case(name, dict(job), 12 * GiB) for name, job in EXTRA.items()}
    paired = [Case(f"{name}+{option}", {**bases[name].job, "allocator": setting}, bases[name].expected + 2 * GiB, pair=name) for name in PAIRED for option, setting in OPTIONS.items()]
    pairs = [under(bases[name], factor, option) for name, factors in PAIRED.items() for factor in factors for option in (None, *OPTIONS)]
    others = [name for name in bases if name not in PAIRED]
    limited = [under(bases[name], FACTORS[(i + 2 * k) % len(FACTORS)]) for k in range(4) for i, name in enumerate(others)]
    traced = [Case(name, {k: v for k, v in rows[name]["setup"].items() if k != "schema"}, rows[name]["peak"]["reserved_bytes"]) for name in TRACED]
    return [*bases.values(), *pairs, *flattening(), *limited, *paired, *traced, *filling()]


def under(base: Case, factor: float, option: str | None = None) -> Case:
    """A job again under a limit, with an allocator option or without."""
    job = {**base.job, "allocator": OPTIONS[option]} if option else dict(base.job)
    return Case(f"{base.name}{'+' + option if option else ''}@{factor:.2f}", job, base.expected + GiB, base=base.name, factor=factor, pair=base.name if option else None)


def flattening() -> list[Case]:
    """ZeRO-1/2 made ready with less room than weights and flat buffer take together."""
    return [
        Case(f"flatten-{name}-{sees}@{factor:.2f}", dict(job), int(weights * factor) + GiB, base=None, factor=factor, weights=weights, sees=sees)
        for name, (job, weights, factors) in FLATTEN.items() for factor in factors for sees in (("limit", "card") if factor in (1.4, 1.6) else ("limit",))
    ]


def filling() -> list[Case]:
    """The same with the card really full."""
    chosen = (("llama1b-z2off", 1.4), ("llama1b-z2off", 2.05), ("gpt2l-z2off", 1.6))
    return [Case(f"full-{name}@{factor:.2f}", dict(FLATTEN[name][0]), 0, factor=factor, weights=FLATTEN[name][1], fills=True) for name, factor in chosen]


# --- one run, in a process of its own


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
    _append(folder / "segments.jsonl.gz", _packed({**common, "segments": segments, "held": held}))
    if case.factor is None:
        few = entries[: starts[2] if len(starts) > 2 else None]
        _append(folder / f"traces-{len(case.name) % 3}.jsonl.gz", _packed({**common, "trace": few}))


def _packed(row: dict[str, Any]) -> bytes:
    return gzip.compress(json.dumps(row, separators=(",", ":")).encode() + b"\n", 9)


def _append(path: Path, text: str | bytes) -> None:
    with path.open("ab") as out:
        flock(out, LOCK_EX)
        out.write(text.encode() if isinstance(text, str) else text)


# --- all runs


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
    _append(folder / "limits.jsonl", json.dumps(row) + "\n")
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
                _append(folder / "limits.jsonl", json.dumps({"name": case.name, "base": case.base, "factor": case.factor, "error": f"ended with status {status}"}) + "\n")
            print(f"{time.monotonic() - begun:5.0f} s  {case.name}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
