"""The largest that fits: micro-batch, length, or model of a family, for a card and a setup; and a probe at n and n + 1, where one is asked for. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from explorer.catalog import find_model, models
from explorer.catalog.lengths import image_tokens, lengths
from explorer.errors import BadInput, CouldNotRun
from explorer.estimator import tapes
from explorer.estimator.estimate import estimate
from explorer.estimator.largest import largest_fitting, largest_micro_batch
from explorer.estimator.work import with_micro_batch
from explorer.measure.runner import probe
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import human

Axis = Literal["micro_batch", "sequence", "target_sequence"]
_LONGEST = 1 << 20
"""Tokens, of a model whose positions have no end."""


def largest(setup: Setup, axis: Axis, on_progress: tapes.Progress | None = None, stop: threading.Event | None = None) -> int | None:
    """The largest n such that every smaller one fits too; one below the least where none does, None where no capacity is known. Raises BadInput for an axis that the model lacks."""
    if axis == "micro_batch":
        return largest_micro_batch(setup, on_progress, stop)
    least, most = bounds(setup, axis)
    return largest_fitting(setup, lambda s, n: with_value(s, axis, n), least, most, on_progress, stop)


def bounds(setup: Setup, axis: Axis) -> tuple[int, int]:
    """(shortest, longest) that the model takes, as catalog/lengths.py has it: the loss of a language model needs two tokens, an image its own among the text."""
    model = find_model(setup.model)
    if axis not in model.axes:
        raise BadInput(axis, f"is no length of {model.name}; it has {' and '.join(model.axes) or 'none'}")
    if axis == "target_sequence":
        return 1, model.target_sequence_limit or _LONGEST
    least = 2 if model.task in ("causal", "masked", "image_text") else 1
    tokens = image_tokens(model, lengths(setup, model).patches or 0)
    return max(least, tokens + 2 if tokens else 0), model.sequence_limit or _LONGEST


def with_value(setup: Setup, axis: Axis, n: int) -> Setup:
    """The same job with another micro-batch or length."""
    return with_micro_batch(setup, n) if axis == "micro_batch" else setup.replace(**{axis: n})


# --- a family

@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A model of the catalog in the place of the job's own."""

    model: str
    parameters: int
    profile: Profile | None = None
    why: str = ""
    """Why there is no estimate, where that is."""

    @property
    def answer(self) -> str | None:
        """The verdict's answer."""
        return self.profile.verdict.answer if self.profile is not None else None


def family(setup: Setup, on_progress: tapes.Progress | None = None) -> tuple[Member, ...]:
    """Every model of the catalog that is of the job's family, smallest first, each estimated with this setup: its lengths, its card, its config.

    The family of a config that is not the catalog's is the first there of its model type.
    """
    own = find_model(setup.model)
    families = {model.family: None for model in models() if model.model_type == own.model_type}
    name = own.family if own.source == "catalog" else next(iter(families), None)
    members = sorted((m for m in models() if m.family == name), key=lambda m: m.parameters or 0)
    return tuple(_member(setup.replace(model=m.name), m.parameters or 0, on_progress) for m in members)


def _member(setup: Setup, parameters: int, on_progress: tapes.Progress | None) -> Member:
    try:
        return Member(model=str(setup.model), parameters=parameters, profile=estimate(setup, largest=False, on_progress=on_progress))
    except (BadInput, CouldNotRun) as error:
        return Member(model=str(setup.model), parameters=parameters, why=f"{error}")


def largest_model(members: tuple[Member, ...]) -> str | None:
    """The largest member that fits; None where none does, or no capacity is known."""
    return next((m.model for m in reversed(members) if m.answer == "fits"), None)


# --- a proof

@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What two probes said of an n: that it fits, and that one more does not. `beyond` is None where the model takes no more."""

    axis: Axis
    n: int
    at: Profile
    beyond: Profile | None

    @property
    def holds(self) -> bool | None:
        """Whether n ran and n + 1 did not; None where they ran without a limit, on the CPU accelerator, and so say nothing of a card."""
        answers = [p.verdict.answer for p in (self.at, self.beyond) if p is not None]
        if None in answers:
            return None
        return answers == ["fits", "does not fit"] or answers == ["fits"]

    @property
    def text(self) -> str:
        """What came of it, in words."""
        name = self.axis.replace("_", " ")
        took = f"{name} {self.n:,} took {human(self.at.peak.allocated_bytes)}" + (f", {self.n + 1:,} {human(self.beyond.peak.allocated_bytes)}" if self.beyond is not None else f"; the model takes no more than {self.n:,}")
        if self.holds is None:
            return f"Nothing is proven: both ran on DeepSpeed's CPU accelerator, where no GPU's memory ends. {took[0].upper()}{took[1:]}."
        if self.holds:
            return f"Proven by a real step: {name} {self.n:,} ran" + (f", {self.n + 1:,} ran out of memory in {self.beyond.verdict.failure.phase}." if self.beyond is not None else f", and the model takes no more than {self.n:,}.")
        if self.at.verdict.answer != "fits":
            return f"Not so: {name} {self.n:,} ran out of memory in {self.at.verdict.failure.phase}."
        return f"{name[0].upper()}{name[1:]} {self.n:,} ran, and {self.n + 1:,} too: the estimate keeps a margin for fragmentation, and this run did not need it. {took[0].upper()}{took[1:]}."

    def to_json(self) -> dict[str, Any]:
        """`check --prove`'s part of the answer (docs/contract.md)."""
        return {"axis": self.axis, "n": self.n, "holds": self.holds, "peak_allocated_bytes": self.at.peak.allocated_bytes, "beyond_peak_allocated_bytes": None if self.beyond is None else self.beyond.peak.allocated_bytes, "text": self.text}


def prove(setup: Setup, axis: Axis, n: int, run: Callable[[Setup], Profile] = probe) -> Proof:
    """Real steps at n and at n + 1, one after the other. Raises as `probe` does, and BadInput for an n that the model does not take.

    A step that runs out of memory is an answer. `run`: what takes a step; the probe unless a caller has its own way to it.
    """
    if n < 1:
        raise BadInput(axis, f"is {n}: nothing fits, so there is nothing to run")
    at = run(with_value(setup, axis, n))
    most = None if axis == "micro_batch" else bounds(setup, axis)[1]
    beyond = None if n == most else run(with_value(setup, axis, n + 1))
    return Proof(axis=axis, n=n, at=at, beyond=beyond)


def to_json(setup: Setup, on_progress: tapes.Progress | None = None) -> dict[str, Any]:
    """`check --largest`'s part of the answer (docs/contract.md)."""
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for axis in ("micro_batch", *(a for a in find_model(setup.model).axes if a != "image_size")):
        try:
            found[axis] = largest(setup, axis, on_progress)
        except CouldNotRun as error:
            found[axis], missing[axis] = None, f"{error}"
    members = family(setup, on_progress)
    listed = [{"model": m.model, "parameters": m.parameters, "verdict": m.answer, "peak_allocated_bytes": m.profile.peak.allocated_bytes if m.profile else None} for m in members]
    missing |= {m.model: m.why for m in members if m.why}
    return {**found, "model": largest_model(members), "family": listed, "missing": missing}
