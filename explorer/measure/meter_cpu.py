"""Reads memory on DeepSpeed's CPU accelerator: the profiler's allocation events (torch)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from explorer.measure.history import Event
from explorer.measure.meter import Meter, Reading


class CpuMeter(Meter):
    """DeepSpeed's CPU accelerator: sizes of every tensor from the profiler's allocation events."""

    device = "cpu"

    def start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profiler.__enter__()

    def stop(self) -> None:
        self.profiler.__exit__(None, None, None)

    def events(self) -> list[Event]:
        tree = self.profiler.profiler.kineto_results.experimental_event_tree()
        found = [(e.start_time_ns, i, Event(e.typed[1].alloc_size, e.typed[1].ptr, block=e.typed[1].alloc_size)) for i, e in enumerate(_allocations(tree))]
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
