"""A Profile's figures, read off a stream and what the allocator made of it. No torch."""

from __future__ import annotations

import numpy as np

from explorer import timeline
from explorer.estimator import verdict
from explorer.estimator.stream import PROVENANCES, Stream
from explorer.estimator.usage import Usage
from explorer.profile import BETWEEN, CATEGORIES, Peak, PhaseMemory


def categories_at(stream: Stream, usage: Usage, position: int) -> dict[str, int]:
    """Category → bytes alive after `position` events; they sum to allocated."""
    events = stream.order[:position]
    alive = np.bincount(np.abs(events), weights=np.sign(events), minlength=len(stream.bytes) + 1)[1:].astype(bool)
    sums = np.bincount(stream.categories[alive], weights=usage.sizes[alive], minlength=len(CATEGORIES))
    return {name: int(sums[i]) for i, name in enumerate(CATEGORIES)}


def steps(stream: Stream, usage: Usage, limited: Usage) -> dict[str, tuple[PhaseMemory, ...]]:
    """Step → its phases in order; what is reserved is read from `limited`."""
    phases = {"first": ("init", "forward", "backward", "step"), "steady": ("forward", "backward", "step")}
    phases["steady"] += tuple(m.phase for m in stream.marks if m.phase in BETWEEN)
    return {step: tuple(_phase(stream, usage, limited, step, phase) for phase in phases[step]) for step in phases}


def _phase(stream: Stream, usage: Usage, limited: Usage, step: str, phase: str) -> PhaseMemory:
    """Each figure is its own maximum over the runs of the phase."""
    marks = [m for m in stream.marks if m.step == step and m.phase == phase]
    highest = max(marks, key=lambda m: usage.allocated[m.start : m.end + 1].max())
    at = highest.start + int(usage.allocated[highest.start : highest.end + 1].argmax())
    return PhaseMemory(
        phase=phase,
        end_allocated_bytes=max(int(usage.allocated[m.end]) for m in marks),
        peak_allocated_bytes=int(usage.allocated[at]),
        peak_reserved_bytes=max(int(limited.reserved[m.start : m.end + 1].max()) for m in marks),
        at_peak=categories_at(stream, usage, at),
    )


def peak(stream: Stream, usage: Usage, limited: Usage) -> Peak:
    """The most allocated, and the most reserved in `limited`, over everything."""
    allocated_at, reserved_at = int(usage.allocated.argmax()), int(limited.reserved.argmax())
    a = verdict.phase_at(stream.marks, max(0, allocated_at - 1))
    r = verdict.phase_at(stream.marks, max(0, reserved_at - 1))
    return Peak(
        allocated_bytes=int(usage.allocated[allocated_at]), allocated_phase=a.phase, allocated_step=a.step,
        reserved_bytes=int(limited.reserved[reserved_at]), reserved_phase=r.phase, reserved_step=r.step,
    )


def provenance(stream: Stream) -> dict[str, str]:
    """Category → where most of its bytes come from."""
    result = {}
    for i, name in enumerate(CATEGORIES):
        mine = stream.categories == i
        if mine.any():
            weights = np.bincount(stream.provenance[mine], weights=stream.bytes[mine], minlength=len(PROVENANCES))
            result[name] = PROVENANCES[int(weights.argmax())]
    return result


def curve(stream: Stream, usage: Usage) -> tuple[timeline.Curve, timeline.Phases]:
    """Allocated bytes over the steady step, and before it over what the job does between steps."""
    marks = [m for m in stream.marks if m.step == "steady"]
    start, end = marks[0].start, marks[-1].end
    return timeline.draw(usage.allocated[start : end + 1], [(m.phase, m.start - start) for m in marks])
