"""Follows a run: marks its moments, and asks the engine at each which tensors it holds. Each accelerator's own half is in meter_cuda.py and meter_cpu.py (torch)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from explorer.measure.history import Event, Mark, mark_size, owners_of
from explorer.measure.host import HostWatch
from explorer.measure.owners import coordinator, engine_tensors, gather_streams, gathered, gradients, storages


class Reading(NamedTuple):
    """One phase: bytes at its end, and its peaks. On the CPU accelerator they are filled in from the history afterwards."""

    end: int
    peak: int
    reserved: int
    first_mark: int
    last_mark: int


class Meter:
    """Marks moments, and at each asks the engine which tensors it holds. Subclasses read counters and the history."""

    device = ""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.engine: Any = None
        self.settings: Any = None
        self.in_backward = False
        self.host = HostWatch()
        self.phase_mark = 0
        self.gathers: frozenset[int] = frozenset()
        """Streams on which ZeRO-3 makes nothing but gathered parameters."""
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
        """The batch's tensors, which count as activations. Said once: they may be gone at a later mark, and something else in their place."""
        self.mark("batch", dict.fromkeys(storages(batch.values()), "activations"))

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
        return {**engine_tensors(self.engine, self.settings), **gathered(self.engine.module.parameters())}

    # --- hooks on the engine

    def watch(self, engine: Any, settings: Any) -> None:
        """See parameters as they are gathered, and where a checkpointed layer runs again."""
        self.engine, self.settings = engine, settings
        for module in engine.module.modules():
            if getattr(module, "gradient_checkpointing", False) and type(module).__name__ != type(engine.module).__name__ and hasattr(module, "_gradient_checkpointing_func"):
                module.register_forward_pre_hook(self._before_recompute)
                module.register_forward_hook(self._after_recompute, always_call=True)
        gatherer = coordinator(engine)
        if gatherer is not None and settings.world_size > 1:
            gatherer.fetch_sub_module = self._seeing_gathers(gatherer.fetch_sub_module)
            self.gathers = gather_streams(gatherer)

    def watch_gradients(self, parameters: Iterable[Any]) -> None:
        """See gradients as autograd makes them: before DeepSpeed's own hooks, which move them elsewhere."""
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, parameter: Any) -> None:
        if self.engine is None:
            return
        self.mark("gradient", {**gradients([parameter]), **engine_tensors(self.engine, self.settings, transient_only=True)})

    def _seeing_gathers(self, fetch: Any) -> Any:
        """DeepSpeed's `fetch_sub_module`, which every forward and backward of a module begins with, and what it gathered."""

        def fetching(module: Any, *args: Any, **kwargs: Any) -> None:
            fetch(module, *args, **kwargs)
            self.mark("gathered", gathered(module.parameters()))

        return fetching

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

    def requested_peak(self) -> tuple[int, int] | None:
        """(as PyTorch counted it, as the history has it): the most bytes asked for at any moment."""
        return None

    def outside_bytes(self) -> int:
        return 0

    def pinned_bytes(self) -> int:
        return 0

    def environment(self) -> dict[str, str | None]:
        return {"gpu": None}
