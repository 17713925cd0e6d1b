"""What is known where a model cannot be followed, or a setting is not modelled: its states alone, which is a bound and no estimate. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from explorer.dsconfig import Settings
from explorer.estimator.allocator import Options
from explorer.estimator.program import ALLOCATE, END_OF_FORWARD, GRADIENT, TEMPORARY, Segment
from explorer.estimator.replay import replay
from explorer.estimator.tape import Tape
from explorer.estimator.usage import run
from explorer.units import human


def states_only(tape: Tape, element_bytes: int, patches: int) -> Tape:
    """A tape of the same model whose forward does nothing and whose backward makes each gradient, last parameter first."""
    trained = [p for p in reversed(tape.model_parameters(patches)) if p.trainable]
    sizes = [p.numel * element_bytes for p in trained]
    events = [(END_OF_FORWARD,)]
    for number, parameter in enumerate(trained):
        events += [(ALLOCATE, number, TEMPORARY, ""), (GRADIENT, parameter.name, (number,))]
    table = np.array(sizes, dtype=float).reshape(-1, 1)
    return replace(
        tape, variables=(), exponents=((),), table=table, lengths=np.zeros_like(table), rounding=np.tile(np.array([0, -1, 0, 0]), (len(sizes), 1)),
        layers=(), segments=(Segment((), tuple(events)),), program=((0,),), batch=(),
    )


def states_bound(settings: Settings, tape: Tape, lengths: Mapping[str, int | None]) -> str:
    """The peak of the states alone, as a sentence."""
    known = replace(settings, autocast=None, grad_accum_dtype=settings.precision)
    alone = states_only(tape, known.model_bytes, lengths.get("patches") or 0)
    stream, rules = replay(known, alone, lengths, 0)
    peak = int(run(stream, Options(), None, frozenset(rules.releases)).allocated.max())
    return f"its states alone, without activations, take {human(peak)} at least on this GPU: a bound, not an estimate"
