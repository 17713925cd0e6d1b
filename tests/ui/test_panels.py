"""The page's words."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest

from explorer.profile import Failure, Verdict
from explorer.ui import panels, texts
from explorer.ui.dashboard import Explorer
from explorer.ui.measurements import Measured
from explorer.ui.state import ExplorerState
from explorer.units import GiB
from tests.ui.conftest import make_profile


@pytest.fixture
def state(bench) -> ExplorerState:
    made = ExplorerState()
    made.wait_estimate()
    made.wait_largest()
    return made


def shown(state: ExplorerState, profile) -> Measured:
    return Measured(setup=state.setup, profile=profile, recorded_at="2026-11-30T10:00:00")


def words(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


@pytest.mark.parametrize(("answer", "said"), [("fits", "Fits one A100-80GB, with 67.0 GiB to spare"), ("tight", "Tight on one A100-80GB"), ("does not fit", "Does not fit one A100-80GB")])
def test_the_verdict_is_a_sentence(state, answer, said):
    state.estimate = replace(state.estimate, verdict=replace(state.estimate.verdict, answer=answer))
    assert said in words(panels.verdict(state)) and "estimated" in panels.verdict(state)


def test_every_figure_says_where_it_comes_from(state):
    html = panels.figures(state)
    assert html.count("<dt>") == html.count(">estimated</span>") == 4
    state.measured = shown(state, make_profile("measured"))
    assert panels.figures(state).count(">measured</span>") == 2


def test_a_job_over_the_limit_says_by_how_much(state):
    state.estimate = replace(state.estimate, verdict=Verdict(answer="does not fit", capacity_bytes=GiB, headroom_bytes=-2 * GiB))
    assert "Over by 2.0 GiB" in words(panels.figures(state))


def test_the_table_has_the_difference_by_category():
    html = panels.breakdown(make_profile(), make_profile("measured", activations=11 * GiB))
    row = words(re.search(r'<tr data-category="activations">.*?</tr>', html, re.S).group())
    assert re.search(r"10\.00 11\.00 \+1\.00", row)
    assert "gathered" not in html, "a category that holds nothing is not a row"


def test_a_failed_run_shows_what_pytorch_said(state):
    failure = Failure(phase="backward", step="first", requested_bytes=1, text="CUDA out of memory. Tried to allocate <954> MiB")
    failed = replace(make_profile("measured"), verdict=Verdict(answer="does not fit", failure=failure))
    state.measured = shown(state, failed)
    assert "Tried to allocate &lt;954&gt; MiB" in panels.measurement(state)


HOSTILE = "<img src=x onerror=alert(1)>"


def test_nothing_a_person_typed_becomes_html(bench):
    bench.estimate = lambda setup: make_profile(notes=(HOSTILE,))
    page = Explorer()
    page.state.update(model="custom", config_text=HOSTILE, nvme_path=HOSTILE)
    page.state.from_query("optimizer=" + HOSTILE)
    page.wait()
    page.state.micro_batch = HOSTILE
    values = [w.value for w in _html_widgets(page)]
    assert not any("<img" in value for value in values)
    assert any("&lt;img" in value for value in values)


def _html_widgets(widget):
    import ipywidgets as W

    if isinstance(widget, W.HTML):
        yield widget
    for child in getattr(widget, "children", ()):
        yield from _html_widgets(child)


def test_every_text_of_a_category_phase_and_control_is_there():
    from explorer.profile import CATEGORIES, PHASES
    from explorer.ui.fields import FIELDS

    for key in [*(f"category.{c}" for c in CATEGORIES), *(f"about.{c}" for c in CATEGORIES), *(f"phase.{p}" for p in PHASES), *(f"control.{f}" for f in FIELDS)]:
        assert texts.text(key)


def test_an_unknown_text_is_an_error():
    with pytest.raises(KeyError):
        texts.text("no such text")


def test_every_part_of_the_peak_says_where_it_comes_from():
    from explorer.ui.state import ExplorerState

    state = ExplorerState()
    state.wait_estimate()
    state.wait_sources()
    assert sum(s.n_bytes for s in state.sources) == state.estimate.peak.allocated_bytes
    shown = panels.origins(state.sources)
    assert "runtime/zero/stage_1_and_2.py, setup_buckets" in shown and "traced from the model" in shown
    assert panels.origins(()) == ""
