"""The player compiled: core/allocator.c as WebAssembly, which ships with the package and is run by wasmtime: no compiler is needed.

It does what `player.py` does, event by event. Where wasmtime cannot be imported, Python does it.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from explorer.estimator.allocator import UNLIMITED, Options
from explorer.estimator.player import Events, Outcome

CODE = Path(__file__).parent / "core" / "allocator.wasm"
_PAGE = 1 << 16
_FAILED, _PARTING, _FULL = 1, 2, 3
_REPORT = np.dtype([(name, "<i4") for name in ("position", "levels", "flushes", "keep")] + [(name, "<i8") for name in ("reserved", "allocated", "needed")])
"""The struct Report."""


class Full(Exception):
    """More blocks than there is room for: Python's player has no such end."""


def plays(options: Options) -> bool:
    """Whether it knows these options, and can run here."""
    collects = options.collect_above and options.fraction
    return not options.expandable_segments and not collects and _module() is not None


@cache
def _module() -> Any:
    """(wasmtime, engine, module), compiled once a process; None where wasmtime cannot run here."""
    try:
        import wasmtime

        engine = wasmtime.Engine()
        return wasmtime, engine, wasmtime.Module.from_file(engine, str(CODE))
    except (ImportError, OSError, RuntimeError):
        return None


class _Machine(threading.local):
    """One thread's instance and its memory, which one run at a time has for itself."""

    def __init__(self) -> None:
        wasmtime, engine, module = _module()
        self.store = wasmtime.Store(engine)
        exports = wasmtime.Instance(self.store, module, []).exports(self.store)
        self.memory = exports["memory"]
        self.functions = {name: exports[name] for name in ("bytes", "sizes", "begin", "limit", "copy", "play", "turn")}
        self.heap = exports["__heap_base"].value(self.store)
        self.view = np.empty(0, np.uint8)

    def call(self, name: str, *arguments: int) -> int | None:
        return self.functions[name](self.store, *arguments)

    def grow(self, n_bytes: int) -> None:
        """Have so many bytes at least."""
        lacking = n_bytes - self.memory.data_len(self.store)
        if lacking > 0:
            self.memory.grow(self.store, -(-lacking // _PAGE))
        if len(self.view) != self.memory.data_len(self.store):
            pointer = ctypes.cast(self.memory.data_ptr(self.store), ctypes.POINTER(ctypes.c_uint8))
            self.view = np.ctypeslib.as_array(pointer, (self.memory.data_len(self.store),))


@cache
def _machine() -> _Machine:
    """One object; each thread that looks at it finds its own."""
    return _Machine()


@atexit.register
def _close() -> None:
    """Before Python takes modules apart: wasmtime's objects need its own to be closed."""
    _machine.cache_clear()
    _module.cache_clear()


class _Run:
    """One stream in the machine's memory, with room for a state per limit."""

    def __init__(self, events: Events, limits: int) -> None:
        self.machine = machine = _machine()
        self.events = events
        self.blocks = len(events.rounded)
        alive = int(np.cumsum(np.sign(events.order)).max(initial=0))
        self.room = min(2 * alive + 4096, 2 * self.blocks + 64)
        self.state_bytes = -(-machine.call("bytes", self.room, self.blocks) // 8) * 8
        self.at = -(-machine.heap // 8) * 8
        carried = np.array([*events.carried.items()], dtype=np.int32).ravel()
        flags = np.zeros(len(events.order), np.uint8)
        flags[[position - 1 for position in events.releases]] = 1
        columns = [events.rounded, events.stream.streams.astype(np.uint8), events.order.astype(np.int32), flags, carried]
        spaces = [16 * (len(events.order) + 2), 4 * (len(events.order) + 2), 16, 4 * 9, _REPORT.itemsize]
        places = [self._space(n) for n in (*(column.nbytes for column in columns), *spaces)]
        self.states = self.at
        machine.grow(self.at + limits * self.state_bytes)
        for column, place in zip(columns, places, strict=False):
            machine.view[place : place + column.nbytes] = column.view(np.uint8)
        *_, self.levels, self.flushes, self.layout, self.itself, self.report = places
        self.read(self.itself, 9, np.int32)[:] = [*places[:8], len(carried) // 2]  # the struct Run
        self.used = 0

    def _space(self, n_bytes: int) -> int:
        place = self.at
        self.at += -(-n_bytes // 8) * 8
        return place

    def state(self) -> int:
        """The address of a state that is not used yet."""
        self.used += 1
        return self.states + (self.used - 1) * self.state_bytes

    def read(self, place: int, count: int, kind: Any) -> np.ndarray:
        """`count` values at an address: a view, which the next call changes."""
        return self.machine.view[place : place + count * np.dtype(kind).itemsize].view(kind)


class CompiledPlayer:
    """As `player.Player`."""

    def __init__(self, events: Events, options: Options, limits: Sequence[int]) -> None:
        self.run = _Run(events, len(limits))
        self.state = self.run.state()
        self.limits = list(limits)
        most = options.max_split_bytes if options.max_split_bytes is not None else UNLIMITED
        self.run.machine.call("begin", self.state, self.run.room, self.run.blocks, most)
        self.run.read(self._sizes, self.run.blocks, np.int64)[:] = events.rounded
        self._limit()
        self.reserved = self.allocated = 0

    @property
    def _sizes(self) -> int:
        return self.run.machine.call("sizes", self.state)

    def _limit(self) -> None:
        self.run.machine.call("limit", self.state, self.limits[0], self.limits[-1])

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of each block as the allocator counts them: int64."""
        return self.run.read(self._sizes, self.run.blocks, np.int64).copy()

    def play(self, at: int, end: int, keep: bool) -> Outcome:
        """As `Player.play`. Raises Full where there is no room for more blocks."""
        run = self.run
        report = run.read(run.report, 1, _REPORT)
        report["keep"] = keep
        result = run.machine.call("play", self.state, run.itself, run.report, at, end)
        if result == _FULL:
            raise Full
        position, levels, flushes, _, self.reserved, self.allocated, needed = report[0].tolist()
        changed = run.read(run.levels, 2 * levels, np.int64).reshape(-1, 2).tolist()
        return Outcome(
            position, result == _FAILED, needed if result == _PARTING else 0,
            [tuple(level) for level in changed], run.read(run.flushes, flushes, np.int32).tolist(),
        )

    def turn(self, ended: bool) -> Hashable:
        """As `Player.turn`, with a hash of 128 bits for the layout."""
        run = self.run
        run.machine.call("turn", self.state, run.itself, int(ended))
        return run.read(run.layout, 16, np.uint8).tobytes()

    def part(self, needed: int) -> CompiledPlayer:
        """As `Player.part`."""
        other = object.__new__(CompiledPlayer)
        other.__dict__ |= self.__dict__
        other.state = self.run.state()
        self.run.machine.call("copy", other.state, self.state)
        other.limits = [limit for limit in self.limits if limit < needed]
        self.limits = [limit for limit in self.limits if limit >= needed]
        self._limit()
        other._limit()
        return other
