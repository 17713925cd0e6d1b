"""Hand-built Profiles, and an estimator and a probe that return them: these tests are of the page, not of the numbers."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

from explorer.errors import BadInput, CouldNotRun
from explorer.profile import BETWEEN, CATEGORIES, PHASES, Host, Peak, PhaseMemory, Profile, Verdict
from explorer.units import GiB

CAPACITY = 78 * GiB


def make_profile(source: str = "estimated", *, activations: int = 10 * GiB, answer: str | None = "fits", notes: tuple[str, ...] = (), between: bool = False) -> Profile:
    """A Profile whose backward of the steady step is the peak: 1 GiB of parameters, 2 of optimizer, and these activations."""
    parts = dict.fromkeys(CATEGORIES, 0) | {"parameters": GiB, "optimizer": 2 * GiB, "activations": activations}
    total = sum(parts.values())

    def phase(name: str, share: int) -> PhaseMemory:
        at = dict(parts) | {"activations": activations // share if share else 0}
        size = sum(at.values())
        return PhaseMemory(phase=name, end_allocated_bytes=size // 2, peak_allocated_bytes=size, peak_reserved_bytes=size + GiB, at_peak=at)

    shares = {"init": 0, "forward": 2, "backward": 1, "step": 0, "eval": 4, "save": 0}
    first = tuple(phase(p, shares[p] * 2) for p in PHASES if p not in BETWEEN)
    steady = tuple(phase(p, shares[p]) for p in PHASES[1:] if between or p not in BETWEEN)
    verdict = Verdict(answer=None) if answer is None else Verdict(answer=answer, capacity_bytes=CAPACITY, headroom_bytes=CAPACITY - total, why="Activations are most of it.")
    return Profile(
        source=source,
        parameters=427_616_513,
        trainable_parameters=427_616_513,
        peak=Peak(allocated_bytes=total, allocated_phase="backward", allocated_step="steady", reserved_bytes=total + GiB, reserved_phase="backward", reserved_step="steady"),
        steps={"first": first, "steady": steady},
        at_peak=parts,
        host=Host(pinned_bytes=5 * GiB, resident_bytes=9 * GiB, peak_bytes=10 * GiB, per_node_bytes=80 * GiB),
        outside_pytorch_bytes=GiB,
        verdict=verdict,
        notes=notes,
        measured_on="cpu" if source == "measured" else None,
    )


class Bench:
    """The stand-in estimator, probe and records, and what was asked of them."""

    def __init__(self) -> None:
        self.estimates: list = []
        self.estimate: Callable = lambda setup: make_profile(activations=setup.micro_batch * GiB // 8, answer="fits" if setup.gpu else None)
        self.largest: Callable = lambda setup: 200
        self.probe: Callable = lambda setup, on_progress, cancel: make_profile("measured", activations=setup.micro_batch * GiB // 8 + 1000)
        self.records: list = []
        self.why_not = ""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Estimator and probe replaced by functions a test sets."""
    made = Bench()

    def estimate(setup, largest=True, on_progress=None):
        made.estimates.append(setup)
        on_progress("tracing gpt2", 0.5)
        return made.estimate(setup)

    estimator = types.ModuleType("explorer.estimator.estimate")
    estimator.estimate = estimate
    search = types.ModuleType("explorer.estimator.largest")
    search.largest_micro_batch = lambda setup, stop=None: made.largest(setup)
    runner = types.ModuleType("explorer.measure.runner")
    runner.accelerator, runner.why_not = lambda: "cpu", lambda setup: made.why_not or None
    runner.probe = lambda setup, on_progress=None, cancel=None, **_: made.probe(setup, on_progress, cancel)
    records = types.ModuleType("explorer.measure.records")
    records.find = lambda setup: next((r for r in made.records if r.setup == setup), None)
    records.all = lambda: list(made.records)
    import explorer.estimator
    import explorer.measure

    for parent, name, module in ((explorer.estimator, "estimate", estimator), (explorer.estimator, "largest", search), (explorer.measure, "runner", runner), (explorer.measure, "records", records)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(parent, name, module, raising=False)
    return made


__all__ = ["BadInput", "CouldNotRun", "make_profile"]
