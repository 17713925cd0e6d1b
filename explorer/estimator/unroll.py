"""Write a tape's repeated layers out: from names relative to a layer to block numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from explorer.estimator.tape import ALLOCATE, END_OF_FORWARD, FREE, FORWARD, GRADIENT, Segment, Tape, Unrolled

Place = tuple[int, ...]
"""() for a stretch that runs once, (list, unit, direction) for one run of a layer."""


def runs(tape: Tape) -> Iterator[tuple[Segment, Place]]:
    """Every segment in the order it runs, with its place."""
    for step in tape.program:
        if len(step) == 1:
            yield tape.segments[step[0]], ()
            continue
        which, direction, first, second, middle, before_last, last = step
        units = tape.layers[which].units
        segments = [first, second, *[middle] * (units - 4), before_last, last]
        for unit in range(units) if direction == FORWARD else range(units - 1, -1, -1):
            yield tape.segments[segments[unit]], (which, unit, direction)


class _Unroller:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.numbers: dict[tuple[int, ...], int] = {}
        self.order: list[int] = []
        self.rows: list[int] = []
        self.categories: list[int] = []
        self.owners: list[int] = []
        self.hooks: list[tuple[int, int, int, int]] = []
        self.once = 0
        self.modules = {name: i for i, name in enumerate(tape.modules)}
        self.parameters = {p[0]: i for i, p in enumerate(tape.parameters)}
        self.forward_end = -1

    def name(self, place: Place, written: tuple[int, str] | str) -> str:
        """A module's or parameter's full name; inside a layer it is written as (offset in the unit, rest)."""
        if isinstance(written, str):
            return written
        offset, rest = written
        layers = self.tape.layers[place[0]]
        name = f"{layers.path}.{place[1] * layers.period + offset}"
        return f"{name}.{rest}" if rest else name

    def block(self, place: Place, ref: tuple[int, ...]) -> int:
        """A block's number from (k) once · (list, unit, direction, k) absolute, unit −1 the last · (relative unit, direction, k) in the same list."""
        if len(ref) == 1:
            return self.numbers[ref]
        if len(ref) == 3:
            return self.numbers[(place[0], place[1] + ref[0], *ref[1:])]
        unit = ref[1] if ref[1] >= 0 else self.tape.layers[ref[0]].units + ref[1]
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
            else:
                self.hooks.append((len(self.order), kind, self.modules[self.name(place, event[1])], event[2]))





def unroll(tape: Tape) -> Unrolled:
    """The flat event list of a tape."""
    work = _Unroller(tape)
    for segment, place in runs(tape):
        work.run(segment, place)
    return Unrolled(
        order=np.array(work.order, dtype=np.int32),
        size_rows=np.array(work.rows, dtype=np.int32),
        categories=np.array(work.categories, dtype=np.int8),
        owners=np.array(work.owners, dtype=np.int32),
        hooks=tuple(work.hooks),
        forward_end=work.forward_end,
    )


