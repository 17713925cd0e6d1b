"""From what a run read to a Profile: phases, categories at the peak, host, verdict. No torch."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from explorer import timeline
from explorer.measure import history
from explorer.measure.history import Blocks, Mark
from explorer.measure.meter import Reading
from explorer.profile import CATEGORIES, Failure, Host, Peak, PhaseMemory, Profile, Verdict
from explorer.units import GiB, KiB, MiB, human

_UNITS = {"bytes": 1, "B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}


def summarize(work: Any) -> Profile:
    """The Profile of a finished (or interrupted) `run.Run`."""
    meter = work.meter
    events = history.place(meter.events(), meter.marks)
    found = history.blocks(events)
    history.name_blocks(found, meter.marks, len(events), _cut_short(work, found, len(events)), meter.gathers)
    if meter.device == "cpu":
        _device_only(found)
    return replace(_Summary(work, found, meter.marks, len(events)).profile(), requested_peak=meter.requested_peak())


def _cut_short(work: Any, found: Blocks, n_events: int) -> int | None:
    """Events before memory ran out: Python frees a step's tensors as the error unwinds, so it is the highest point of that phase."""
    if work.failure is None:
        return None
    begins = [m.position for m in work.meter.marks if m.label == f"{work.failure[0]} begins" and m.position >= 0] or [0]
    return history.highest(found, begins[-1], n_events)


def _device_only(found: Blocks) -> None:
    """On the CPU accelerator device and host are one memory: blocks the engine keeps for the host are not the device's."""
    found.size[np.array([c == "host" for c in found.category], dtype=bool)] = 0


class _Span(NamedTuple):
    """The highest point of a phase."""

    at: int
    """Events before it."""
    peak: int
    unexplained: int


class _Summary:
    def __init__(self, work: Any, found: Blocks, marks: list[Mark], n_events: int) -> None:
        self.work, self.found, self.marks, self.n_events = work, found, marks, n_events
        self.cuda = work.meter.device == "cuda"
        applied = [s for s in work.steps if s.applied]
        self.first = applied[0] if applied else (work.steps[0] if work.steps else None)
        after = work.steps[work.steps.index(self.first) + 1 :] if self.first else []
        self.steady = applied[-1] if len(applied) > 1 else after[-1] if applied and after else None

    def profile(self) -> Profile:
        """Everything read, as a Profile."""
        work = self.work
        curve, runs = self._timeline()
        steps = {"first": self._step("first", self.first, init=True), "steady": self._step("steady", self.steady)}
        peak = _peak(steps)
        highest = next(p for p in steps[peak.allocated_step] if p.phase == peak.allocated_phase)
        resident, most = work.meter.host.last, work.meter.host.most
        pinned = work.meter.pinned_bytes()
        processes = min(work.setup.world_size, work.setup.gpus_per_node)
        return Profile(
            source="measured",
            parameters=work.parameters, trainable_parameters=work.trainable,
            peak=peak, steps=steps, at_peak=highest.at_peak,
            host=Host(pinned_bytes=pinned, pageable_bytes=max(0, resident - pinned), resident_bytes=resident, peak_bytes=most, per_node_bytes=most * processes),
            outside_pytorch_bytes=work.meter.outside_bytes(),
            verdict=self._verdict(peak),
            provenance=dict.fromkeys(CATEGORIES, "measured"),
            warmup_steps=max(0, len(work.steps) - 1),
            measured_on=work.meter.device,
            environment=self._environment(),
            notes=self._notes(),
            timeline=curve, timeline_phases=runs,
        )

    def _step(self, name: str, reading: Any, init: bool = False) -> tuple[PhaseMemory, ...]:
        phases = []
        if init:
            phases.append(self._phase("init", [self.work.init] if self.work.init else [self._interrupted("init")]))
        for phase in ("forward", "backward", "step"):
            if reading is not None and phase in reading.phases:
                phases.append(self._phase(phase, reading.phases[phase]))
        failure = self.work.failure
        if failure and failure[1] == name and failure[0] != "init":
            phases = [p for p in phases if p.phase != failure[0]]
            phases.append(self._phase(failure[0], [self._interrupted(failure[0])]))
        return tuple(phases)

    def _interrupted(self, phase: str) -> Any:
        """The reading of a phase that ran out of memory."""
        meter = self.work.meter
        begins = [i for i, m in enumerate(self.marks) if m.label == f"{phase} begins"] or [0]
        reading = meter._read(begins[-1])
        return Reading(reading.end, reading.peak, reading.reserved, begins[-1], len(self.marks) - 1)

    def _phase(self, phase: str, readings: list[Any]) -> PhaseMemory:
        """Each figure is its own maximum over the micro-batches.

        Peak and categories are the history's, without the blocks of the probe's own marks. What PyTorch's counter had beyond the history, those
        blocks included, is unexplained.
        """
        span = max((self._span(reading) for reading in readings), key=lambda span: span.peak + span.unexplained)
        categories = history.categories_at(self.found, span.at)
        if not self.cuda:
            ends = [sum(history.categories_at(self.found, self._position(r.last_mark, self.n_events)).values()) for r in readings]
            return PhaseMemory(phase=phase, end_allocated_bytes=max(ends), peak_allocated_bytes=span.peak, peak_reserved_bytes=span.peak, at_peak=categories)
        categories["unexplained"] = span.unexplained
        return PhaseMemory(phase=phase, end_allocated_bytes=max(r.end for r in readings), peak_allocated_bytes=span.peak + span.unexplained, peak_reserved_bytes=max(r.reserved for r in readings), at_peak=categories)

    def _span(self, reading: Any) -> _Span:
        begin, end = self._position(reading.first_mark, 0), self._position(reading.last_mark, self.n_events)
        at = history.highest(self.found, begin, end)
        inside = self.marks[reading.first_mark + 1 : reading.last_mark]
        seen = history.highest_with_marks(self.found, inside, begin, end)
        return _Span(at, sum(history.categories_at(self.found, at).values()), reading.peak - seen if self.cuda else 0)

    def _position(self, mark: int, default: int) -> int:
        position = self.marks[mark].position if mark < len(self.marks) else -1
        return position if position >= 0 else default

    def _verdict(self, peak: Peak) -> Verdict:
        work = self.work
        capacity = work.capacity or work.meter.total_bytes()
        if work.failure:
            phase, step, text = work.failure
            return Verdict(answer="does not fit", capacity_bytes=capacity, headroom_bytes=None if capacity is None else capacity - peak.allocated_bytes, failure=Failure(phase=phase, step=step, requested_bytes=_requested(text), text=text), why=f"PyTorch ran out of memory in {phase} of the {step} step")
        if capacity is None:
            return Verdict(answer=None, why="measured on the CPU accelerator, which has no GPU's capacity")
        return Verdict(answer="fits", capacity_bytes=capacity, headroom_bytes=capacity - peak.allocated_bytes, why=f"the step ran within {human(capacity)}")

    def _environment(self) -> dict[str, str | None]:
        import deepspeed
        import torch
        import transformers

        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "deepspeed": deepspeed.__version__}
        return {**versions, **self.work.environment(), **self.work.meter.environment(), "date": datetime.now(UTC).isoformat(timespec="seconds")}

    def _notes(self) -> tuple[str, ...]:
        notes = list(self.work.notes)
        if not self.cuda:
            notes.insert(0, "measured on DeepSpeed's CPU accelerator: the sizes of the real tensors, without the GPU allocator's rounding, kernels' scratch or cuBLAS's workspace")
        skipped = sum(1 for s in self.work.steps if not s.applied)
        if skipped:
            notes.append(f"{skipped} step{'s were' if skipped > 1 else ' was'} skipped for overflow")
        return tuple(notes)

    def _timeline(self) -> tuple[timeline.Curve, timeline.Phases]:
        """Of the steady step, where there was one."""
        reading = self.steady or self.first
        if reading is None:
            return (), ()
        runs = sorted((r.first_mark, phase) for phase, readings in reading.phases.items() for r in readings)
        begin = self._position(reading.first_mark, 0)
        end = self._position(max(0, reading.last_mark - 1), self.n_events)
        return timeline.draw(history.level(self.found, begin, end), [(phase, self._position(mark, begin) - begin) for mark, phase in runs])


def _peak(steps: dict[str, tuple[PhaseMemory, ...]]) -> Peak:
    everything = [(step, phase) for step, phases in steps.items() for phase in phases]
    a_step, a = max(everything, key=lambda x: x[1].peak_allocated_bytes)
    r_step, r = max(everything, key=lambda x: x[1].peak_reserved_bytes)
    return Peak(allocated_bytes=a.peak_allocated_bytes, allocated_phase=a.phase, allocated_step=a_step, reserved_bytes=r.peak_reserved_bytes, reserved_phase=r.phase, reserved_step=r_step)


def _requested(text: str) -> int:
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|B|KiB|MiB|GiB)", text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0
