"""A tape as a program: its events, segments and loops, and how the loops are written out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

ALLOCATE, FREE, GRADIENT, ENTER, LEAVE, END_OF_FORWARD, MATMUL = range(7)
FORWARD, BACKWARD, RECOMPUTE = range(3)
ACTIVATION, TEMPORARY = 0, 1
CUBLAS, CUBLASLT = 0, 1


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A tape with its repeats written out. Blocks are numbered from 1; `order` holds +block for an allocation, −block for a free."""

    order: np.ndarray
    """int32, the events in time."""
    size_rows: np.ndarray
    """int32 per block (index block − 1): its row in the size table."""
    categories: np.ndarray
    """int8 per block: ACTIVATION or TEMPORARY, by whether it outlived the forward that made it."""
    owners: np.ndarray
    """int32 per block: index into `modules`, −1 for none."""
    hooks: tuple[tuple[int, int, int, int], ...]
    """(position in `order`, kind, parameter or module, block or direction) for GRADIENT, ENTER and LEAVE; MATMUL (library, direction) where a thread first multiplies matrices with it."""
    forward_end: int
    """Position in `order` where backward begins."""


class Segment(NamedTuple):
    """A stretch of events. `place` is () for one that runs once, else (list, direction) of a layer."""

    place: tuple[int, ...]
    events: tuple[tuple[Any, ...], ...]


class Layers(NamedTuple):
    """A ModuleList whose layers repeat: `units` of `period` layers each."""

    path: str
    units: int
    period: int


Place = tuple[int, ...]
"""() for a stretch that runs once, (list, unit, direction) for one run of a layer."""


def runs(segments: Sequence[Segment], program: Sequence[tuple[int, ...]], layers: Sequence[Layers]) -> Iterator[tuple[Segment, Place]]:
    """Every segment in the order it runs, with its place."""
    for step in program:
        if len(step) == 1:
            yield segments[step[0]], ()
            continue
        which, direction, first, second, middle, before_last, last = step
        units = layers[which].units
        roles = [first, second, *[middle] * (units - 4), before_last, last]
        for unit in range(units) if direction == FORWARD else range(units - 1, -1, -1):
            yield segments[roles[unit]], (which, unit, direction)


class _Unroller:
    def __init__(self, layers: Sequence[Layers], modules: Sequence[str], parameters: Sequence[str]) -> None:
        self.layers = layers
        self.numbers: dict[tuple[int, ...], int] = {}
        self.order: list[int] = []
        self.rows: list[int] = []
        self.categories: list[int] = []
        self.owners: list[int] = []
        self.hooks: list[tuple[int, int, int, int]] = []
        self.once = 0
        self.modules = {name: i for i, name in enumerate(modules)}
        self.parameters = {name: i for i, name in enumerate(parameters)}
        self.forward_end = -1

    def name(self, place: Place, written: tuple[int, str] | str) -> str:
        """A module's or parameter's full name; inside a layer it is written as (offset in the unit, rest)."""
        if isinstance(written, str):
            return written
        offset, rest = written
        layers = self.layers[place[0]]
        name = f"{layers.path}.{place[1] * layers.period + offset}"
        return f"{name}.{rest}" if rest else name

    def block(self, place: Place, ref: tuple[int, ...]) -> int:
        """A block's number from (k) once · (list, unit, direction, k) absolute, unit −1 the last · (relative unit, direction, k) in the same list."""
        if len(ref) == 1:
            return self.numbers[ref]
        if len(ref) == 3:
            return self.numbers[(place[0], place[1] + ref[0], *ref[1:])]
        unit = ref[1] if ref[1] >= 0 else self.layers[ref[0]].units + ref[1]
        return self.numbers[(ref[0], unit, *ref[2:])]

    def run(self, segment: Segment, place: Place) -> None:
        allocated = 0
        for event in segment.events:
            kind = event[0]
            if kind == ALLOCATE:
                _, row, category, owner = event
                self.rows.append(row)
                number = len(self.rows)
                self.categories.append(category)
                self.owners.append(self.modules.get(self.name(place, owner), -1))
                if place:
                    self.numbers[(*place, allocated)] = number
                    allocated += 1
                else:
                    self.numbers[(self.once,)] = number
                    self.once += 1
                self.order.append(number)
            elif kind == FREE:
                self.order.append(-self.block(place, event[1]))
            elif kind == GRADIENT:
                self.hooks.append((len(self.order), GRADIENT, self.parameters[self.name(place, event[1])], self.block(place, event[2])))
            elif kind == END_OF_FORWARD:
                self.forward_end = len(self.order)
            elif kind == MATMUL:
                self.hooks.append((len(self.order), MATMUL, event[1], FORWARD if self.forward_end < 0 else BACKWARD))
            else:
                self.hooks.append((len(self.order), kind, self.modules[self.name(place, event[1])], event[2]))





def unroll(segments: Sequence[Segment], program: Sequence[tuple[int, ...]], layers: Sequence[Layers], modules: Sequence[str], parameters: Sequence[str]) -> Unrolled:
    """The flat event list of a tape; `modules` and `parameters` are the whole model's names."""
    work = _Unroller(layers, modules, parameters)
    for segment, place in runs(segments, program, layers):
        work.run(segment, place)
    return Unrolled(
        order=np.array(work.order, dtype=np.int32),
        size_rows=np.array(work.rows, dtype=np.int32),
        categories=np.array(work.categories, dtype=np.int8),
        owners=np.array(work.owners, dtype=np.int32),
        hooks=tuple(work.hooks),
        forward_end=work.forward_end,
    )


