"""Allocated memory over one step as a short curve, and how far two such curves are apart.

A step's events cannot be counted along an axis: an optimizer that allocates a thousand scalars would fill most of it. So the axis is
*bytes moved*, all that was allocated and freed since the step began: on it the level rises and falls with slope one, a scalar is
a point, and where a run and its estimate allocate the same blocks the curves lie on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from explorer.profile import Profile

POINTS = 400
_SAMPLES = 1000

Curve = tuple[tuple[int, int], ...]
Phases = tuple[tuple[str, int], ...]


def draw(level: np.ndarray, begins: Sequence[tuple[str, int]]) -> tuple[Curve, Phases]:
    """(bytes moved, allocated bytes) at the highest point of each of a few hundred equal stretches, and (phase, bytes moved before it) of each phase's run.

    `level`: allocated bytes before the first event and after each; `begins`: (phase, events before it).
    """
    moved = np.concatenate([[0], np.cumsum(np.abs(np.diff(level)))])
    if moved[-1] == 0:
        return (), ()
    edges = np.linspace(0, moved[-1], POINTS + 1).astype(np.int64)
    x = np.concatenate([moved, edges])
    y = np.concatenate([level, np.interp(edges, moved, level).astype(np.int64)])
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    first, last = np.searchsorted(x, edges[:-1], "left"), np.searchsorted(x, edges[1:], "right")
    highest = [a + int(y[a:b].argmax()) for a, b in zip(first, last, strict=True)]
    curve = dict.fromkeys((int(x[i]), int(y[i])) for i in highest)
    return tuple(curve), tuple((phase, int(moved[at])) for phase, at in begins)


def mean_difference(one: Profile, other: Profile) -> float | None:
    """Mean of |one − other| in bytes over the steady step; None where either has no curve or they ran other phases.

    Each run of a phase in `other` is stretched to its length in `one`, since a phase that moved more bytes is longer; all bytes moved in `one` count alike.
    """
    if not one.timeline or not other.timeline or [p for p, _ in one.timeline_phases] != [p for p, _ in other.timeline_phases]:
        return None
    mine, theirs = _edges(one), _edges(other)
    x = (np.arange(_SAMPLES) + 0.5) / _SAMPLES * mine[-1]
    at = np.interp(x, mine, theirs)
    return float(np.abs(_level(one, x) - _level(other, at)).mean())


def _edges(profile: Profile) -> list[int]:
    return [*(x for _, x in profile.timeline_phases), profile.timeline[-1][0]]


def _level(profile: Profile, at: np.ndarray) -> np.ndarray:
    x, y = np.array(profile.timeline, dtype=np.float64).T
    return np.interp(at, x, y)
