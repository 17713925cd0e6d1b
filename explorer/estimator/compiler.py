"""Turn traces of one model at several sizes into a Tape: sizes become expressions, repeated layers become a loop. No torch.

Every expression is exact at every traced size, one of which no fit has seen; a layer becomes a loop only where two middle
layers did the same thing, event for event. Otherwise `Irregular` is raised and the recorder writes the model out whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from explorer.estimator.program import ALLOCATE, BACKWARD, END_OF_FORWARD, ENTER, FORWARD, FREE, GRADIENT, LEAVE, MATMUL, RECOMPUTE, Layers, Segment

Point = tuple[int, ...]


class Irregular(ValueError):
    """The traces do not share one structure, or a size is no polynomial; the text says where."""


@dataclass(frozen=True, kw_only=True)
class Basis:
    """The monomials that sizes are written in, and the sizes to trace: one more than there are monomials."""

    variables: tuple[str, ...]
    exponents: tuple[tuple[int, ...], ...]
    points: tuple[Point, ...]

    def matrix(self, points: Sequence[Point]) -> np.ndarray:
        """float64 (points, monomials)."""
        return np.array([[np.prod([float(x) ** e for x, e in zip(point, exponent, strict=True)]) for exponent in self.exponents] for point in points])


def basis(values: Mapping[str, Sequence[int]], squares_of_batch: bool) -> Basis:
    """Monomials of degree one in the batch (two for a contrastive loss) times degree two in the lengths.

    `values`: variable → the values to trace at; the last one of each is held out of the fit.
    """
    variables = tuple(values)
    batch_powers = range(3 if squares_of_batch else 2) if "batch" in variables else range(1)
    lengths = [v for v in variables if v != "batch"]
    length_powers = [p for p in itertools.product(range(3), repeat=len(lengths)) if sum(p) <= 2]
    exponents = [((b,) if "batch" in variables else ()) + p for b in batch_powers for p in length_powers if b < 2 or sum(p) == 0]
    empty = Basis(variables=variables, exponents=tuple(exponents), points=())
    chosen: list[Point] = []
    for point in sorted(itertools.product(*(v[:-1] for v in values.values())), key=sum):
        scaled = empty.matrix([*chosen, point])
        if np.linalg.matrix_rank(scaled / scaled.max(axis=0)) > len(chosen):
            chosen.append(point)
        if len(chosen) == len(exponents):
            break
    if len(chosen) < len(exponents):
        raise Irregular("too few sizes to tell the monomials apart")
    held_out = tuple(v[-1] for v in values.values())
    return Basis(variables=variables, exponents=tuple(exponents), points=(*chosen, held_out))


class SizeTable:
    """Distinct size expressions, fitted once each."""

    def __init__(self, basis: Basis) -> None:
        self.basis = basis
        self.fit = basis.matrix(basis.points[:-1])
        self.all = basis.matrix(basis.points)
        self.rows: dict[tuple[Any, ...], int] = {}
        self.table: list[np.ndarray] = []
        self.lengths: list[np.ndarray] = []
        self.rounding: list[tuple[int, int, int, int]] = []

    def row(self, sizes: Sequence[int], how: Sequence[Any], what: str) -> int:
        """The row of a block with these bytes at the basis's points. Raises Irregular where no expression gives them."""
        key = (tuple(sizes), tuple(how))
        if key not in self.rows:
            self.rows[key] = self._add(np.array(sizes, dtype=float), how, what)
        return self.rows[key]

    def _add(self, sizes: np.ndarray, how: Sequence[Any], what: str) -> int:
        multiple, above, columns, most, length = 0, -1, 0, 0, np.zeros(self.all.shape[1])
        if how[0] is not None:
            lengths = np.array([h.length for h in how], dtype=float)
            multiple, above, columns, most = how[0].multiple, how[0].above, how[0].columns, how[0].most
            length = self._solve(lengths, what)
            if multiple:
                sizes = sizes / (np.ceil(lengths / multiple) * multiple)
        self.table.append(np.zeros(self.all.shape[1]) if columns else self._solve(sizes, what))
        self.lengths.append(length)
        self.rounding.append((multiple, above, columns, most))
        return len(self.table) - 1

    def _solve(self, wanted: np.ndarray, what: str) -> np.ndarray:
        scale = self.fit.max(axis=0)
        coefficients = np.linalg.solve(self.fit / scale, wanted[:-1]) / scale
        coefficients = _tidy(coefficients, scale, wanted)
        if np.abs(self.all @ coefficients - wanted).max() > 0.51:
            raise Irregular(f"the size of {what} is no polynomial in {', '.join(self.basis.variables)}")
        return coefficients


def _tidy(coefficients: np.ndarray, scale: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Remove the solver's noise: coefficients are small fractions of whole bytes."""
    rounded = np.round(coefficients * 5040) / 5040
    rounded[np.abs(coefficients * scale) < 1e-6 * max(1.0, float(np.abs(wanted).max()))] = 0
    return rounded


@dataclass
class _Place:
    """Where in the program an event stands: once, or (list, unit, direction) of a truncated model's layers."""

    key: tuple[int, ...]
    events: list[tuple[Any, ...]]


class Compiler:
    """Cuts a trace into segments and names every block relative to its layer.

    In the thinned model each list has `units` units: four, or six where a layer's neighbours matter (a decoder's layers add
    up the encoder's gradient, which the last one only begins).
    """

    def __init__(self, layers: Sequence[Layers], units: int) -> None:
        self.layers, self.units = layers, units
        self.seen_outside: set[tuple[int, ...]] = set()
        """Layers' blocks that are freed elsewhere: the first and last two layers' may be, every layer's may not."""

    @property
    def middle(self) -> tuple[int, int]:
        """The two units that must agree."""
        return self.units // 2 - 1, self.units // 2

    def unit(self, module: str) -> tuple[int, int, int, str] | None:
        """(list, unit, offset in the unit, rest of the name) of a module or parameter inside a repeated layer."""
        for number, layers in enumerate(self.layers):
            if module.startswith(layers.path + "."):
                index, _, rest = module[len(layers.path) + 1 :].partition(".")
                return number, int(index) // layers.period, int(index) % layers.period, rest
        return None

    def cut(self, events: Sequence[tuple[Any, ...]]) -> list[_Place]:
        """The trace in stretches: a layer's begins where it is first entered in a direction, and ends where the last one is left."""
        places = [_Place((), [])]
        for event in events:
            here = self._place_of(event, places[-1].key)
            if here != places[-1].key:
                places.append(_Place(here, []))
            places[-1].events.append(event)
            if event[0] == LEAVE and self._ends(event, here):
                places.append(_Place((), []))
        return [p for p in places if p.events]

    def _place_of(self, event: tuple[Any, ...], current: tuple[int, ...]) -> tuple[int, ...]:
        if event[0] != ENTER:
            return current
        unit = self.unit(event[1])
        if unit is None or unit[3]:
            return current
        direction = FORWARD if event[2] == FORWARD else BACKWARD
        return unit[0], unit[1], direction

    def _ends(self, event: tuple[Any, ...], here: tuple[int, ...]) -> bool:
        """Whether this leaves the last layer a direction visits."""
        unit = self.unit(event[1])
        if not here or unit is None or unit[3] or unit[0] != here[0] or event[2] == RECOMPUTE:
            return False
        last = (self.units - 1, self.layers[unit[0]].period - 1) if event[2] == FORWARD else (0, 0)
        return (unit[1], unit[2]) == last

    def names(self, places: Sequence[_Place]) -> dict[int, tuple[int, ...]]:
        """Block → its absolute name: (k) for one made once, (list, unit, direction, k) in a layer."""
        names, once = {}, 0
        for place in places:
            k = 0
            for event in place.events:
                if event[0] == ALLOCATE:
                    names[event[1]] = (*place.key, k) if place.key else (once,)
                    k += 1
                    once += not place.key
        return names

    def relative(self, name: tuple[int, ...], place: tuple[int, ...]) -> tuple[int, ...]:
        """A block's name as seen from a place: relative in the same unit or its neighbour, else from the list's nearer end."""
        if len(name) == 1:
            return name
        if place and place[0] == name[0] and abs(name[1] - place[1]) <= 1:
            return name[1] - place[1], *name[2:]
        self.seen_outside.add(name)
        if {(name[0], unit, *name[2:]) for unit in self.middle} <= self.seen_outside:
            raise Irregular("something outside the layers frees a block of every layer")
        return name[0], name[1] if name[1] < self.units // 2 else name[1] - self.units, *name[2:]

    def written(self, name: str, place: tuple[int, ...]) -> Any:
        """A module's or parameter's name as seen from a place."""
        unit = self.unit(name)
        if not place:
            if unit is not None and 0 < unit[1] < self.units - 1:
                raise Irregular(f"{name} acts outside its layer")
            return name if unit is None else self._absolute(unit, name)
        if unit is None or unit[:2] != place[:2]:
            if unit is not None:
                raise Irregular(f"{name} acts inside another layer")
            return name
        return unit[2], unit[3]

    def _absolute(self, unit: tuple[int, int, int, str], name: str) -> str:
        if unit[1] == 0:
            return name
        layers = self.layers[unit[0]]
        index = (layers.units - 1) * layers.period + unit[2]
        return ".".join(x for x in (layers.path, str(index), unit[3]) if x)


def compile_events(traces: Sequence[Sequence[tuple[Any, ...]]], categories: Mapping[int, int], table: SizeTable, layers: Sequence[Layers], units: int) -> tuple[tuple[Segment, ...], tuple[tuple[int, ...], ...]]:
    """(segments, program) of traces of the same model, one per point of the table's basis, in order."""
    _same_structure(traces)
    rows = _rows(traces, table)
    compiler = Compiler(layers, units)
    places = compiler.cut(traces[0])
    names = compiler.names(places)
    segments: list[Segment] = []
    program: list[tuple[int, ...]] = []
    written = [(p.key, tuple(_write(e, p.key, compiler, names, rows, categories) for e in p.events)) for p in places]
    i = 0
    while i < len(written):
        key, events = written[i]
        if not key:
            segments.append(Segment((), events))
            program.append((len(segments) - 1,))
            i += 1
            continue
        program.append(_loop(written[i : i + units], key, segments, compiler))
        i += units
    return tuple(segments), tuple(program)


class _Sizes:
    """Stands for a SizeTable where only one size is known: a row is the size itself."""

    def row(self, sizes: Sequence[int], how: Sequence[Any], what: str) -> Any:
        return tuple(sizes), tuple(how)


def check_layers(events: Sequence[tuple[Any, ...]], categories: Mapping[int, int], layers: Sequence[Layers], units: int) -> None:
    """Raise Irregular where one trace already shows that the layers make no loop."""
    compile_events([events], categories, _Sizes(), layers, units)


def _loop(run: Sequence[tuple[tuple[int, ...], Any]], key: tuple[int, ...], segments: list[Segment], compiler: Compiler) -> tuple[int, ...]:
    """(list, direction, then the segments of its first, second, middle, next to last and last unit)."""
    which, direction = key[0], key[2]
    units = list(range(compiler.units)) if direction == FORWARD else list(range(compiler.units))[::-1]
    if [place for place, _ in run] != [(which, unit, direction) for unit in units]:
        raise Irregular("layers do not run one after the other")
    by_unit = {place[1]: events for place, events in run}
    one, other = compiler.middle
    if by_unit[one] != by_unit[other]:
        raise Irregular("two middle layers differ")
    roles = (0, 1, one, compiler.units - 2, compiler.units - 1)
    made: dict[Any, int] = {}
    for unit in roles:
        if by_unit[unit] not in made:
            made[by_unit[unit]] = len(segments)
            segments.append(Segment((which, direction), by_unit[unit]))
    return which, direction, *(made[by_unit[unit]] for unit in roles)


def _same_structure(traces: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    first = traces[0]
    for other in traces[1:]:
        if len(other) != len(first):
            raise Irregular("another size makes other allocations")
        for a, b in zip(first, other, strict=True):
            if a[:2] != b[:2] or (a[0] == ALLOCATE and a[4] != b[4]) or (a[0] != ALLOCATE and a != b):
                raise Irregular(f"at another size, event {a[:2]} is {b[:2]}")


def _rows(traces: Sequence[Sequence[tuple[Any, ...]]], table: SizeTable) -> dict[int, int]:
    rows = {}
    for together in zip(*traces, strict=True):
        if together[0][0] == ALLOCATE:
            _, block, _, _, owner = together[0]
            rows[block] = table.row([e[2] for e in together], [e[3] for e in together], f"a block of {owner or 'the model'}")
    return rows


def _write(event: tuple[Any, ...], place: tuple[int, ...], compiler: Compiler, names: Mapping[int, tuple[int, ...]], rows: Mapping[int, int], categories: Mapping[int, int]) -> tuple[Any, ...]:
    kind = event[0]
    if kind == ALLOCATE:
        return ALLOCATE, rows[event[1]], categories[event[1]], _owner(event[4], place, compiler)
    if kind == FREE:
        return FREE, compiler.relative(names[event[1]], place)
    if kind == GRADIENT:
        return GRADIENT, compiler.written(event[1], place), compiler.relative(names[event[2]], place)
    if kind in (END_OF_FORWARD, MATMUL):
        return event
    return kind, compiler.written(event[1], place), event[2]


def _owner(module: str, place: tuple[int, ...], compiler: Compiler) -> Any:
    """A block's module; where another layer's node made it, the name alone would break the loop, and is left out."""
    unit = compiler.unit(module)
    if unit is None:
        return module
    return (unit[2], unit[3]) if place and unit[:2] == place[:2] else ""
