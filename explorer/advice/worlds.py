"""A job of which nobody said how many GPUs it has: what is assumed, and the verdict for 1 and for 8. No torch."""

from __future__ import annotations

from explorer.errors import BadInput, CouldNotRun
from explorer.estimator import tapes
from explorer.estimator.estimate import estimate
from explorer.setup import Setup
from explorer.units import human

ASKED = (1, 8)


def sentence(setup: Setup, on_progress: tapes.Progress | None = None) -> str:
    """What was taken, and what the answer would be for one GPU and for a node of eight."""
    answers = "; ".join(_answer(setup, n, on_progress) for n in ASKED)
    return f"world_size is not given: {setup.world_size} GPU{'s are' if setup.world_size > 1 else ' is'} taken. {answers}"


def _answer(setup: Setup, n: int, on_progress: tapes.Progress | None) -> str:
    name = "1 GPU" if n == 1 else f"{n} GPUs"
    try:
        profile = estimate(setup.replace(world_size=n, rank=0), largest=False, on_progress=on_progress)
    except (BadInput, CouldNotRun) as refused:
        return f"With {name}: no answer, since {refused}"
    peak = human(profile.peak.allocated_bytes)
    verdict = profile.verdict.answer
    return f"With {name}: {f'{verdict}, ' if verdict else ''}{peak} at the peak on each"
