"""Reads memory on CUDA: PyTorch's counters at every phase, and its allocator's history (torch)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from explorer.allocator_options import written
from explorer.measure import segments
from explorer.measure.history import Event
from explorer.measure.meter import Meter, Reading


class CudaMeter(Meter):
    """PyTorch's CUDA allocator: counters at every phase, and the history of every block."""

    device = "cuda"

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.peak = self.reserved = self.requested = 0
        self.before: dict[str, Any] = {}
        """PyTorch's snapshot when the history began."""
        self.trace: list[Any] = []

    def total_bytes(self) -> int:
        import torch

        torch.cuda.set_device(self.index)  # the first touch of a GPU: of several, this one, so that none other gets a context
        return torch.cuda.get_device_properties(self.index).total_memory

    def prepare(self, capacity: int | None, allocator: Mapping[str, Any]) -> None:
        import torch

        options = written(allocator)
        if options:
            torch.cuda.memory._set_allocator_settings(options)
        if capacity is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, capacity / self.total_bytes()), self.index)

    def set_up_arch(self) -> None:
        import torch

        major, minor = torch.cuda.get_device_capability(self.index)
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"

    def build_device(self) -> str:
        return f"cuda:{self.index}"

    def start(self) -> None:
        """Record every block from here on, and keep peaks through DeepSpeed's own resets (runtime/utils.py, `empty_cache`)."""
        import torch

        torch.zeros(1, device="cuda")
        self.before = torch.cuda.memory._snapshot()
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

        self.trace = torch.cuda.memory._snapshot()["device_traces"][self.index]
        torch.cuda.memory._record_memory_history(enabled=None)

    def events(self) -> list[Event]:
        return segments.read(self.trace, self.before["segments"], segments.options(self.before))

    def _gather_peaks(self) -> None:
        import torch

        stats = torch.cuda.memory_stats()
        self.peak = max(self.peak, stats["allocated_bytes.all.peak"])
        self.reserved = max(self.reserved, stats["reserved_bytes.all.peak"])
        self.requested = max(self.requested, stats["requested_bytes.all.peak"])

    def _mark_block(self, n_bytes: int) -> None:
        import torch

        with torch.cuda.stream(torch.cuda.default_stream()):  # on a side stream it would be the first of its kind, in a segment of its own
            torch.empty(n_bytes, dtype=torch.uint8, device="cuda")

    def _reset(self) -> None:
        self._plain_reset()
        self.peak = self.reserved = 0

    def _read(self, first_mark: int) -> Reading:
        import torch

        torch.cuda.synchronize()
        self._gather_peaks()
        return Reading(torch.cuda.memory_allocated(), self.peak, self.reserved, first_mark, 0)

    def requested_peak(self) -> tuple[int, int]:
        return self.requested, segments.requested_peak(self.trace)

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

        return {"gpu": torch.cuda.get_device_name(self.index), "cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
