"""The page's state: what follows from a control, and that slow work neither blocks nor arrives late."""

from __future__ import annotations

import threading
import time

import pytest

from explorer.errors import BadInput, CouldNotRun
from explorer.profile import CATEGORIES
from explorer.ui.measurements import Measured
from explorer.ui.state import ExplorerState
from explorer.units import GiB
from tests.ui.conftest import make_profile


@pytest.fixture
def state(bench) -> ExplorerState:
    made = ExplorerState()
    settle(made)
    return made


def settle(state: ExplorerState) -> None:
    state.wait_estimate()
    state.wait_largest()


def until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)


def test_the_page_opens_with_an_estimate_and_a_largest_batch(state):
    assert state.problem is None and state.obstacle == "" and not state.stale
    assert state.estimate.at_peak["activations"] == 8 * GiB
    assert (state.largest, state.largest_known) == (200, True)
    assert state.lengths.sequence == 77


def test_a_control_changes_the_estimate(state):
    state.micro_batch = "128"
    settle(state)
    assert state.setup.micro_batch == 128
    assert state.estimate.at_peak["activations"] == 16 * GiB


@pytest.mark.parametrize(
    ("name", "typed", "field"),
    [
        ("micro_batch", "many", "micro_batch"),
        ("micro_batch", "-1", "micro_batch"),
        ("micro_batch", "", "micro_batch"),
        ("micro_batch", "1e15", "micro_batch"),
        ("sequence", "78", "sequence"),
        ("image_size", "225", "image_size"),
        ("world_size", "0", "world_size"),
        ("gpu", "Voodoo 2", "gpu"),
        ("reduce_bucket_size", "0", "reduce_bucket_size"),
        ("precision", "fp7", "precision"),
    ],
)
def test_bad_input_names_the_control_and_stays(state, name, typed, field):
    setattr(state, name, typed)
    assert state.problem[0] == field
    assert getattr(state, name) == typed
    assert state.setup is None and state.estimate is not None and state.stale
    setattr(state, name, {"micro_batch": 64, "world_size": 1, "gpu": "A100-80GB", "precision": "fp16"}.get(name))
    settle(state)
    assert state.problem is None and not state.stale


def test_parameter_offload_waits_for_stage_three(state):
    state.offload_param = "cpu"
    assert "offload_param" not in state.setup.deepspeed["zero_optimization"]
    state.stage = "3"
    assert state.setup.deepspeed["zero_optimization"]["offload_param"] == {"device": "cpu"}


def test_another_model_brings_its_own_lengths(state):
    state.sequence = "50"
    state.model = "gpt2"
    settle(state)
    assert state.sequence is None and state.lengths.sequence == 1024


def test_without_a_card_there_is_no_verdict_and_no_largest_batch(state):
    state.gpu = "none"
    settle(state)
    assert state.estimate.verdict.answer is None and not state.largest_known


def test_of_many_moves_few_are_worked_out_and_the_newest_is_shown_last(bench):
    running, seen = threading.Event(), []

    def slow(setup):
        if setup.micro_batch != 64:
            running.wait(5)
        return make_profile(activations=setup.micro_batch * GiB)

    bench.estimate = slow
    state = ExplorerState()
    settle(state)
    state.observe(lambda change: seen.append(change["new"].at_peak["activations"] // GiB), "estimate")
    begun = time.monotonic()
    for n in range(2, 40):
        state.micro_batch = n
    assert time.monotonic() - begun < 2, "a control waited for an estimate"
    running.set()
    settle(state)
    assert seen[-1] == 39 and not state.stale
    assert seen == sorted(seen) and len(seen) <= 3


def test_a_slow_estimate_says_what_it_does(bench):
    release = threading.Event()
    bench.estimate = lambda setup: (release.wait(5), make_profile())[1]
    state = ExplorerState()
    until(lambda: state.busy == "tracing gpt2")
    assert state.estimate is None
    release.set()
    settle(state)
    assert state.busy == "" and state.estimate is not None


@pytest.mark.parametrize(
    ("error", "problem", "obstacle"),
    [(BadInput("model.hidden_size", "is odd"), ("model.hidden_size", "is odd"), ""), (CouldNotRun("torch is missing"), None, "torch is missing")],
)
def test_an_estimate_that_cannot_be_says_why(bench, error, problem, obstacle):
    def fail(setup):
        raise error

    bench.estimate = fail
    state = ExplorerState()
    settle(state)
    assert state.problem == problem and state.obstacle == obstacle


def test_a_fault_of_ours_is_called_one(bench):
    bench.estimate = lambda setup: 1 / 0
    state = ExplorerState()
    settle(state)
    assert "ZeroDivisionError" in state.obstacle and "fault of the explorer" in state.obstacle


def test_a_probe_ends_with_a_measurement_and_its_difference(state, bench):
    texts = []

    def probe(setup, on_progress, cancel):
        on_progress("building the model", 1.0)
        return make_profile("measured", activations=8 * GiB + 1000)

    bench.probe = probe
    state.observe(lambda change: texts.append(change["new"].text), "probe_status")
    state.run_probe()
    until(lambda: state.probe_status.state == "done")
    assert "building the model" in texts
    assert state.measured.profile.source == "measured"
    assert state.comparison.by_category["activations"] == 1000
    assert sum(state.comparison.by_category[c] for c in CATEGORIES) == state.comparison.peak_allocated_bytes


def test_a_measurement_belongs_to_its_setup_alone(state):
    state.run_probe()
    until(lambda: state.probe_status.state == "done")
    state.micro_batch = 32
    settle(state)
    assert state.measured is None and state.comparison is None
    state.micro_batch = 64
    settle(state)
    assert isinstance(state.measured, Measured) and state.comparison is not None


def test_a_probe_can_be_cancelled(state, bench):
    def probe(setup, on_progress, cancel):
        assert cancel.wait(5)
        raise CouldNotRun("cancelled")

    bench.probe = probe
    state.run_probe()
    state.run_probe()  # a second press starts nothing
    state.cancel_probe()
    until(lambda: state.probe_status.state == "cancelled")
    assert state.measured is None


def test_a_probe_that_cannot_run_says_why(state, bench):
    def probe(setup, on_progress, cancel):
        raise CouldNotRun("the child was killed: the host ran out of memory")

    bench.probe = probe
    state.run_probe()
    until(lambda: state.probe_status.state == "failed")
    assert "host ran out of memory" in state.probe_status.text


def test_a_recorded_measurement_shows_at_once_with_its_date(bench):
    from types import SimpleNamespace

    from explorer.ui.fields import default_setup

    bench.records = [SimpleNamespace(setup=default_setup(), profile=make_profile("measured"), recorded_at="2026-11-30T10:00:00")]
    state = ExplorerState()
    settle(state)
    assert state.measured.recorded_at.startswith("2026-11-30") and state.comparison is not None


def test_a_measurement_is_found_by_what_the_setup_means(bench):
    from types import SimpleNamespace

    from explorer.ui.fields import default_setup

    explicit = default_setup().replace(sequence=77, image_size=224, gpu=None).with_deepspeed("gradient_accumulation_steps", 1)
    bench.records = [SimpleNamespace(setup=explicit, profile=make_profile("measured"), recorded_at="2026-11-30T10:00:00")]
    state = ExplorerState()
    settle(state)
    assert state.measured is not None
    state.gradient_checkpointing = True
    assert state.measured is None


def test_no_torch_and_no_widgets_are_imported_for_the_state(root):
    import subprocess
    import sys

    code = "import sys, explorer.ui.state; bad = {'torch', 'transformers', 'deepspeed', 'ipywidgets', 'altair', 'anywidget'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
