"""Profile: what memory did, by category and by phase. The estimator and the probe both return one.

Words (docs/architecture.md): *allocated* counts blocks handed out by PyTorch's caching allocator, *reserved* what it holds
of the device, *outside* what the process holds beyond PyTorch. Categories sum to allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Category = Literal["parameters", "gradients", "optimizer", "activations", "gathered", "comm_buffers", "temporary", "unexplained"]
Phase = Literal["init", "forward", "backward", "step", "eval", "save"]
Step = Literal["first", "steady"]
Answer = Literal["fits", "tight", "does not fit"]

CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "activations", "gathered", "comm_buffers", "temporary", "unexplained")
PHASES: tuple[Phase, ...] = ("init", "forward", "backward", "step", "eval", "save")
BETWEEN: tuple[Phase, ...] = ("eval", "save")
"""Phases between steps, in the order in which the Trainer comes to them."""
SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseMemory:
    """One phase of one step. All sizes in bytes; a phase that runs once per micro-batch has each field's own maximum."""

    phase: Phase
    end_allocated_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    at_peak: Mapping[str, int] = field(default_factory=dict)
    """Category → bytes at this phase's allocated peak; empty where the source does not know. Not part of the JSON answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The maxima over everything, init included, each with its own phase and step."""

    allocated_bytes: int
    allocated_phase: Phase
    allocated_step: Step
    reserved_bytes: int
    reserved_phase: Phase
    reserved_step: Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Host memory. All sizes in bytes, of one process unless the name says node."""

    pinned_bytes: int = 0
    pageable_bytes: int = 0
    resident_bytes: int = 0
    peak_bytes: int = 0
    per_node_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The request that ran out of memory, with the text PyTorch prints for it."""

    phase: Phase
    step: Step
    requested_bytes: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the job fits the capacity. `answer` is None where no capacity is known."""

    answer: Answer | None
    capacity_bytes: int | None = None
    headroom_bytes: int | None = None
    """Capacity less peak allocated; negative where it does not fit."""
    failure: Failure | None = None
    why: str = ""
    retries: float | None = None
    """Flushes of PyTorch's whole cache (`num_alloc_retries`) in each steady step; None where there is no limit, where memory runs out, and where nobody counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Bytes alive at the allocated peak that one maker accounts for."""

    category: Category
    name: str
    """A DeepSpeed buffer's name, or a module's, with "*" for the number of a layer."""
    n_bytes: int
    provenance: str
    origin: str
    """DeepSpeed's file and function, or what was traced or assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What memory did in one job, and where the numbers come from."""

    source: Literal["estimated", "measured"]
    parameters: int
    trainable_parameters: int
    peak: Peak
    steps: Mapping[str, tuple[PhaseMemory, ...]]
    """"first" has init, forward, backward, step; "steady" the last three, and eval and save where the job has them."""
    at_peak: Mapping[str, int]
    """Category → bytes at the allocated peak; every category of CATEGORIES, summing to `peak.allocated_bytes`."""
    host: Host
    outside_pytorch_bytes: int
    verdict: Verdict
    largest_micro_batch: int | None = None
    method: str = "deepspeed"
    """What the job trains with: "deepspeed", "fsdp" or "ddp" (`Setup.method`)."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Category → "derived" (a DeepSpeed rule) | "traced" (the model) | "assumed" (a stated constant) | "measured"."""
    warmup_steps: int | None = None
    measured_on: str | None = None
    """"cuda", "cpu" (DeepSpeed's CPU accelerator), or None for an estimate."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timeline: tuple[tuple[int, int], ...] = ()
    """(bytes moved, allocated bytes) over the steady step (timeline.py), a few hundred points with the peak exact. Not part of the JSON answer."""
    timeline_phases: tuple[tuple[str, int], ...] = ()
    """(phase, bytes moved before it), each run of a phase in order."""
    requested_peak: tuple[int, int] | None = None
    """The most bytes requested at any moment of a probe on CUDA: as PyTorch counted them, and as its allocator's history adds up."""
    sources: tuple[Source, ...] = ()
    """What the allocated peak is made of, where an estimate was asked for it; in the JSON answer only then."""

    def phase(self, step: str, phase: str) -> PhaseMemory | None:
        """That phase of that step, or None where the run did not reach it."""
        return next((p for p in self.steps.get(step, ()) if p.phase == phase), None)

    def to_json(self) -> dict[str, Any]:
        """The answer of the command-line contract (docs/contract.md), as plain JSON values."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "method": self.method,
            "parameters": self.parameters,
            "trainable_parameters": self.trainable_parameters,
            "peak": {name: getattr(self.peak, name) for name in Peak.__slots__},
            "steps": {step: [{name: getattr(p, name) for name in PhaseMemory.__slots__ if name != "at_peak"} for p in phases] for step, phases in self.steps.items()},
            "at_peak": {category: int(self.at_peak.get(category, 0)) for category in CATEGORIES},
            "host": {name: getattr(self.host, name) for name in Host.__slots__},
            "outside_pytorch_bytes": self.outside_pytorch_bytes,
            "verdict": _verdict_json(self.verdict),
            "largest_micro_batch": self.largest_micro_batch,
            "provenance": dict(self.provenance),
            "warmup_steps": self.warmup_steps,
            "measured_on": self.measured_on,
            "environment": dict(self.environment),
            "notes": list(self.notes),
            **({"sources": [{name: getattr(s, name) for name in Source.__slots__} for s in self.sources]} if self.sources else {}),
        }

    def to_record(self) -> dict[str, Any]:
        """`to_json` plus what a picture needs: categories by phase and the timeline."""
        categories = {step: {p.phase: dict(p.at_peak) for p in phases} for step, phases in self.steps.items()}
        return {**self.to_json(), "phase_categories": categories, "timeline": [list(point) for point in self.timeline], "timeline_phases": [list(phase) for phase in self.timeline_phases], "requested_peak": self.requested_peak and list(self.requested_peak)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        """The Profile of an answer or of a record; KeyError or TypeError where it is neither."""
        categories = data.get("phase_categories", {})
        steps = {
            step: tuple(PhaseMemory(**p, at_peak=categories.get(step, {}).get(p["phase"], {})) for p in phases)
            for step, phases in data["steps"].items()
        }
        verdict = dict(data["verdict"])
        failure = verdict.pop("failure")
        known = {name: data[name] for name in ("source", "parameters", "trainable_parameters", "at_peak", "outside_pytorch_bytes", "largest_micro_batch", "provenance", "warmup_steps", "measured_on", "environment")}
        return cls(
            **known,
            method=data.get("method", "deepspeed"),
            peak=Peak(**data["peak"]),
            steps=steps,
            host=Host(**data["host"]),
            verdict=Verdict(**verdict, failure=Failure(**failure) if failure else None),
            notes=tuple(data["notes"]),
            timeline=tuple((int(x), int(y)) for x, y in data.get("timeline", ())),
            timeline_phases=tuple((str(phase), int(x)) for phase, x in data.get("timeline_phases", ())),
            requested_peak=tuple(data["requested_peak"]) if data.get("requested_peak") else None,
            sources=tuple(Source(**s) for s in data.get("sources", ())),
        )


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    failure = verdict.failure
    return {
        "answer": verdict.answer,
        "capacity_bytes": verdict.capacity_bytes,
        "headroom_bytes": verdict.headroom_bytes,
        "failure": None if failure is None else {name: getattr(failure, name) for name in Failure.__slots__},
        "why": verdict.why,
        "retries": verdict.retries,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Measured less estimated, in bytes."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    by_category: Mapping[str, int]

    @property
    def worst_category(self) -> str:
        """The category that differs most."""
        return max(self.by_category, key=lambda c: abs(self.by_category[c]))


def difference(measured: Profile, estimated: Profile) -> Difference:
    """What the measurement has beyond the estimate, category by category."""
    return Difference(
        peak_allocated_bytes=measured.peak.allocated_bytes - estimated.peak.allocated_bytes,
        peak_reserved_bytes=measured.peak.reserved_bytes - estimated.peak.reserved_bytes,
        by_category={c: measured.at_peak.get(c, 0) - estimated.at_peak.get(c, 0) for c in CATEGORIES},
    )
