"""From PyTorch's trace and counters to a Profile: peaks and categories agree to the byte, and the probe's own marks are not the job's."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from explorer.estimator.allocator import SIZE, Options
from explorer.measure.meter import Reading
from explorer.measure.meter_cuda import CudaMeter
from explorer.measure.run import StepReading
from explorer.measure.summary import summarize
from explorer.units import GiB, MiB
from tests.measure.jobs import LLAMA, job
from tests.measure.test_segments import Machine, requests

pytestmark = pytest.mark.usefixtures("needs_extra")


class Written(CudaMeter):
    """A meter of a GPU that is the allocator's model: a trace, and counters as PyTorch has them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.machine, self.sizes = Machine(Options(), self.rng), requests(self.rng)
        self.trace, self.before = self.machine.trace, {"segments": []}

    @property
    def now(self) -> int:
        return sum(block[SIZE] for block, _ in self.machine.live)

    def work(self, count: int) -> None:
        """Random allocations and frees, with a mark here and there."""
        for _ in range(count):
            if self.machine.live and self.rng.random() < 0.45:
                self.machine.request_free()
            else:
                self.machine.ask(next(self.sizes), 0)
            self.peak = max(self.peak, self.now)
            if self.rng.random() < 0.1:
                self.mark("gradient")

    def _mark_block(self, n_bytes: int) -> None:
        self.machine.ask(n_bytes, 0)
        self.peak = max(self.peak, self.now)
        block, requested = self.machine.live.pop()
        self.machine.pending.append((block, requested))
        address = self.machine.trace[-1]["addr"]
        self.machine.trace.append({"action": "free_requested", "addr": address, "size": n_bytes, "stream": 0})
        self.machine.complete_free(len(self.machine.pending) - 1)

    def _reset(self) -> None:
        self.peak = self.now

    def _read(self, first_mark: int) -> Reading:
        return Reading(self.now, self.peak, self.machine.allocator.reserved, first_mark, 0)

    def total_bytes(self) -> int:
        return 80 * GiB

    def outside_bytes(self) -> int:
        return 0

    def environment(self) -> dict:
        return {"gpu": "none"}


def measured(seed: int, hidden: int = 0):
    """A Profile of random work; `hidden`: bytes that the counters saw in the last phase and no trace has."""
    meter = Written(seed)
    meter.begin_init()
    meter.work(40)
    init, steps = meter.end_init(), []
    for _ in range(2):
        step = StepReading(first_mark=meter.here())
        for phase in ("forward", "backward", "step"):
            meter.begin(phase)
            meter.work(60)
            step.phases[phase] = [meter.end(phase)]
        step.last_mark = meter.here()
        steps.append(step)
    last = steps[-1].phases["step"]
    last[0] = last[0]._replace(peak=last[0].peak + hidden)
    run = SimpleNamespace(meter=meter, init=init, steps=steps, failure=None, setup=job(LLAMA, 2), parameters=1, trainable=1, capacity=None, notes=[], environment=lambda: {})
    return meter, steps, summarize(run)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_and_counters_agree_to_the_byte(seed):
    meter, steps, profile = measured(seed)
    assert any(block - asked > 100 for block, asked in zip(meter.machine.expected, (e["size"] for e in meter.trace if e["action"] == "alloc"), strict=True))
    for name, step in zip(("first", "steady"), steps, strict=True):
        for phase, (reading,) in step.phases.items():
            found = profile.phase(name, phase)
            assert found.at_peak["unexplained"] == 0
            assert sum(found.at_peak.values()) == found.peak_allocated_bytes
            assert 0 <= reading.peak - found.peak_allocated_bytes < 20_000  # a mark's own block, where one stood at the top
            assert found.end_allocated_bytes == reading.end
    assert profile.peak.allocated_bytes == sum(profile.at_peak.values())


def test_what_the_counter_saw_and_the_trace_has_not_is_unexplained():
    plain, other = measured(0)[2], measured(0, hidden=3 * MiB)[2]
    mine, theirs = other.phase("steady", "step"), plain.phase("steady", "step")
    assert mine.at_peak == {**theirs.at_peak, "unexplained": 3 * MiB}
    assert mine.peak_allocated_bytes == theirs.peak_allocated_bytes + 3 * MiB
