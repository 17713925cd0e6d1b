"""Reads memory during a run: PyTorch's counters and allocator history on CUDA, the profiler's events on the CPU accelerator (torch)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from explorer.measure.history import Event, Mark, mark_size, owners_of
from explorer.measure.owners import engine_tensors, gathered, gradients, storages


class Reading(NamedTuple):
    """One phase: bytes at its end, and its peaks. On the CPU accelerator they are filled in from the history afterwards."""

    end: int
    peak: int
    reserved: int
    first_mark: int
    last_mark: int


def meter() -> Meter:
    """The meter for the accelerator that DeepSpeed was loaded for."""
    from deepspeed.accelerator import get_accelerator

    return CudaMeter() if get_accelerator()._name == "cuda" else CpuMeter()


class Meter:
    """Marks moments, and at each asks the engine which tensors it holds. Subclasses read counters and the history."""

    device = ""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.engine: Any = None
        self.settings: Any = None
        self.kept: list[Any] = []
        self.in_backward = False
        self.batch_owners: dict[int, str] = {}
        self.host = HostWatch()
        self.phase_mark = 0
        self.alone = True
        """Whether no other probe is on the GPU: device-wide readings mean something only then."""

    # --- moments

    def mark(self, label: str, owners: Mapping[int, str] | None = None) -> int:
        """Note a moment; returns its number."""
        self._mark_block(mark_size(len(self.marks)))
        self.marks.append(Mark(label, owners_of({**(owners or {})})))
        return len(self.marks) - 1

    def here(self) -> int:
        """The number the next mark will have."""
        return len(self.marks)

    def begin_init(self) -> None:
        """The model is about to be built."""
        self.host.start()
        self.mark("init begins")
        self._reset()

    def built(self, model: Any, category: str) -> None:
        """The model is there as transformers built it; DeepSpeed will move its weights elsewhere."""
        self.mark("model built", dict.fromkeys(storages([*model.parameters(), *model.buffers()]), category))

    def end_init(self) -> Reading:
        """DeepSpeed is ready."""
        reading = self._read(0)
        self.mark("init ends", self._owners())
        return reading._replace(last_mark=len(self.marks) - 1)

    def batch(self, batch: Mapping[str, Any]) -> None:
        """The batch's tensors, which count as activations."""
        self.batch_owners = {address: "activations" for address in storages(batch.values())}
        self.mark("batch", self.batch_owners)

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self.in_backward = phase == "backward"
        self.phase_mark = self.mark(f"{phase} begins")
        self._reset()

    def end(self, phase: str) -> Reading:
        """A phase has ended."""
        reading = self._read(self.phase_mark)
        self.in_backward = False
        last = self.mark(f"{phase} ends", self._owners())
        self.host.look()
        return reading._replace(last_mark=last)

    def _owners(self) -> dict[int, str]:
        if self.engine is None:
            return {}
        return {**engine_tensors(self.engine, self.settings), **gathered(self.engine.module), **self.batch_owners}

    # --- hooks on the engine

    def watch(self, engine: Any, settings: Any) -> None:
        """See parameters as they are gathered, and where a checkpointed layer runs again."""
        self.engine, self.settings = engine, settings
        for module in engine.module.modules():
            if getattr(module, "gradient_checkpointing", False) and type(module).__name__ != type(engine.module).__name__ and hasattr(module, "_gradient_checkpointing_func"):
                module.register_forward_pre_hook(self._before_recompute)
                module.register_forward_hook(self._after_recompute, always_call=True)
        if settings.stage == 3 and settings.world_size > 1:
            for module in engine.module.modules():
                if module._parameters:
                    module.register_forward_pre_hook(self._on_gather)

    def watch_gradients(self, parameters: Iterable[Any]) -> None:
        """See gradients as autograd makes them: before DeepSpeed's own hooks, which move them elsewhere."""
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, parameter: Any) -> None:
        if self.engine is None:
            return
        self.mark("gradient", {**gradients([parameter]), **engine_tensors(self.engine, self.settings, transient_only=True)})

    def _on_gather(self, module: Any, args: Any) -> None:
        self.mark("gathered", gathered(module))

    def _before_recompute(self, module: Any, args: Any) -> None:
        if self.in_backward:
            self.mark("recompute begins")

    def _after_recompute(self, module: Any, args: Any, output: Any) -> None:
        if self.in_backward:
            self.mark("recompute ends")

    def interrupted(self) -> None:
        """Memory ran out: note what the engine holds now."""
        with contextlib.suppress(Exception):
            self.mark("out of memory", self._owners())

    # --- for subclasses

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def events(self) -> list[Event]:
        raise NotImplementedError

    def _mark_block(self, n_bytes: int) -> None: ...
    def _reset(self) -> None: ...
    def _read(self, first_mark: int) -> Reading:
        raise NotImplementedError

    def total_bytes(self) -> int | None:
        return None

    def prepare(self, capacity: int | None, allocator: Mapping[str, Any]) -> None: ...
    def set_up_arch(self) -> None: ...
    def build_device(self) -> str:
        return self.device

    def outside_bytes(self) -> int:
        return 0

    def pinned_bytes(self) -> int:
        return 0

    def environment(self) -> dict[str, str | None]:
        return {"gpu": None}


class CudaMeter(Meter):
    """PyTorch's CUDA allocator: counters at every phase, and the history of every block."""

    device = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.reserved = 0
        self.snapshot: Any = None

    def total_bytes(self) -> int:
        import torch

        return torch.cuda.get_device_properties(0).total_memory

    def prepare(self, capacity: int | None, allocator: Mapping[str, Any]) -> None:
        import torch

        options = []
        if allocator.get("expandable_segments"):
            options.append("expandable_segments:True")
        if allocator.get("max_split_size_mb"):
            options.append(f"max_split_size_mb:{allocator['max_split_size_mb']}")
        if options:
            torch.cuda.memory._set_allocator_settings(",".join(options))
        if capacity is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, capacity / self.total_bytes()), 0)

    def set_up_arch(self) -> None:
        import torch

        major, minor = torch.cuda.get_device_capability(0)
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"

    def build_device(self) -> str:
        return "cuda:0"

    def start(self) -> None:
        """Record every block from here on, and keep peaks through DeepSpeed's own resets (runtime/utils.py, `empty_cache`)."""
        import torch

        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=20_000_000)
        plain = torch.cuda.reset_peak_memory_stats

        def reset(device: Any = None) -> None:
            self._gather_peaks()
            plain(device)

        self._plain_reset = plain
        torch.cuda.reset_peak_memory_stats = reset
        for name in ("reset_max_memory_allocated", "reset_max_memory_cached"):
            setattr(torch.cuda, name, reset)

    def stop(self) -> None:
        import torch

        self.snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)

    def events(self) -> list[Event]:
        traces = self.snapshot["device_traces"][0]
        result = []
        for entry in traces:
            if entry["action"] == "alloc":
                result.append(Event(entry["size"], entry["addr"], entry.get("stream", 0)))
            elif entry["action"] == "free_requested":
                result.append(Event(-entry["size"], entry["addr"], entry.get("stream", 0)))
        return result

    def _gather_peaks(self) -> None:
        import torch

        stats = torch.cuda.memory_stats()
        self.peak = max(self.peak, stats["allocated_bytes.all.peak"])
        self.reserved = max(self.reserved, stats["reserved_bytes.all.peak"])

    def _mark_block(self, n_bytes: int) -> None:
        import torch

        torch.empty(n_bytes, dtype=torch.uint8, device="cuda")

    def _reset(self) -> None:
        self._plain_reset()
        self.peak = self.reserved = 0

    def _read(self, first_mark: int) -> Reading:
        import torch

        torch.cuda.synchronize()
        self._gather_peaks()
        return Reading(torch.cuda.memory_allocated(), self.peak, self.reserved, first_mark, 0)

    def outside_bytes(self) -> int:
        """What the device is used for beyond what PyTorch reserved, other processes' memory included; 0 where others run too."""
        import torch

        if not self.alone:
            return 0

        free, total = torch.cuda.mem_get_info()
        return max(0, total - free - torch.cuda.memory_reserved())

    def pinned_bytes(self) -> int:
        import torch

        with contextlib.suppress(Exception):
            return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
        return 0

    def environment(self) -> dict[str, str | None]:
        import torch

        return {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}


class CpuMeter(Meter):
    """DeepSpeed's CPU accelerator: sizes of every tensor from the profiler's allocation events."""

    device = "cpu"

    def start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self.profiler.__enter__()

    def stop(self) -> None:
        self.profiler.__exit__(None, None, None)

    def events(self) -> list[Event]:
        tree = self.profiler.profiler.kineto_results.experimental_event_tree()
        found = [(e.start_time_ns, i, Event(e.typed[1].alloc_size, e.typed[1].ptr, 0)) for i, e in enumerate(_allocations(tree))]
        found.sort(key=lambda x: x[0])
        return [event for _, _, event in found]

    def _mark_block(self, n_bytes: int) -> None:
        import torch

        torch.empty(n_bytes, dtype=torch.uint8)

    def _read(self, first_mark: int) -> Reading:
        return Reading(0, 0, 0, first_mark, 0)


def _allocations(tree: Any) -> Iterator[Any]:
    from torch._C._profiler import _EventType

    waiting = list(reversed(tree))
    while waiting:
        event = waiting.pop()
        if event.tag == _EventType.Allocation:
            yield event
        waiting.extend(reversed(event.children))


class HostWatch:
    """Resident memory of this process over the run, less what it had before the model."""

    def __init__(self) -> None:
        self.base = self.peak = 0
        self._stop = threading.Event()

    def start(self) -> None:
        """Watch from here, every 50 ms."""
        self.base = self._resident()
        threading.Thread(target=self._watch, daemon=True).start()

    def look(self) -> int:
        """Resident bytes now, beyond the base."""
        now = self._resident()
        self.peak = max(self.peak, now)
        return max(0, now - self.base)

    def finish(self) -> tuple[int, int]:
        """(resident now, most so far), beyond the base."""
        self._stop.set()
        now = self.look()
        return now, max(0, self.peak - self.base)

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.look()

    @staticmethod
    def _resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


