"""Profiles to rows, and the specs that draw them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from explorer.profile import BETWEEN, CATEGORIES
from explorer.ui import charts, live_chart
from explorer.units import GiB, MiB
from tests.ui.conftest import CAPACITY, make_profile


def parts(rows, **where):
    return [r for r in rows if r["kind"] == "part" and all(r[k] == v for k, v in where.items())]


def test_rows_stack_in_the_fixed_order_up_to_the_peak():
    rows = parts(charts.card_rows(make_profile()))
    assert [r["category"] for r in rows] == ["parameters", "optimizer", "activations"]
    assert rows[0]["start"] == 0 and rows[-1]["end"] == 13
    assert all(a["end"] == b["start"] for a, b in zip(rows, rows[1:], strict=False))


def test_estimated_and_measured_stand_beside_each_other_with_the_capacity():
    rows = charts.card_rows(make_profile(), make_profile("measured"), card="A100-80GB")
    assert {r["bar"] for r in parts(rows)} == {"Estimated|13.0 GiB", "Measured|13.0 GiB"}
    (limit,) = [r for r in rows if r["kind"] == "capacity"]
    assert limit["end"] == CAPACITY / GiB and "A100-80GB" in limit["label"]


def test_without_a_capacity_there_is_no_line():
    assert all(r["kind"] != "capacity" for r in charts.card_rows(make_profile(answer=None)))


def test_small_jobs_count_in_mebibytes():
    small = make_profile(activations=MiB, answer=None)
    small = replace(small, at_peak={"activations": MiB}, peak=replace(small.peak, allocated_bytes=MiB, reserved_bytes=2 * MiB))
    assert {r["unit"] for r in charts.card_rows(small)} == {"MiB"}
    assert parts(charts.card_rows(small))[0]["size"] == "1.00 MiB"


def test_without_a_profile_there_are_no_rows():
    assert charts.card_rows(None) == [] and charts.phase_rows(None) == []


def test_each_phase_of_both_steps_has_its_parts_and_its_reserved_mark():
    rows = charts.phase_rows(make_profile())
    steps = [f"{s} {p}" for s, p in charts.MOMENTS if p not in BETWEEN]
    assert {r["moment"] for r in parts(rows)} == set(steps) and len(steps) == 7
    assert max(r["end"] for r in parts(rows, moment="steady backward")) == 13
    assert len([r for r in rows if r["kind"] == "reserved"]) == 7
    assert [r["moment"] for r in rows if r["kind"] == "head"] == [*steps[:4], "", *steps[4:]]


def test_an_evaluation_and_a_save_are_phases_that_the_chart_draws():
    import vl_convert

    profile = make_profile(between=True)
    assert {r["moment"] for r in parts(charts.phase_rows(profile))} >= {"steady eval", "steady save"}
    svg = vl_convert.vegalite_to_svg(charts.by_phase(profile).properties(width=700).to_dict())
    labels = re.findall(r">(init|forward|backward|step|eval|save)</text>", svg)
    assert labels == ["init", "forward", "backward", "step", "forward", "backward", "step", "eval", "save"]


def test_every_category_has_a_colour_and_its_own():
    assert list(charts.COLOURS) == list(CATEGORIES)
    assert len(set(charts.COLOURS.values())) == len(CATEGORIES)


@pytest.mark.parametrize("chart", [charts.against_card(make_profile(), make_profile("measured")), charts.by_phase(make_profile())], ids=["against_card", "by_phase"])
def test_a_chart_is_an_altair_chart_that_draws(chart):
    import vl_convert

    spec = chart.properties(width=500).to_dict()
    svg = vl_convert.vegalite_to_svg(spec)
    assert "Activations: 10.0 GiB" in svg and re.search(r"\d GiB<", svg) and "NaN" not in svg and "http" not in json.dumps(spec.get("data", {}))


@pytest.mark.parametrize("name", ["card_spec", "phase_spec"])
def test_the_page_s_spec_has_no_rows_and_comes_from_the_cache(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = live_chart.spec(name)
    assert "rows" in json.dumps(made) and not made.get("datasets")
    monkeypatch.setattr(charts, name, None)  # a second build would fail
    assert live_chart.spec(name) == made


def test_a_cache_that_cannot_be_written_still_gives_a_page(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert live_chart.cached("x", "key", ".txt", lambda: "built") == "built"


def test_rows_travel_as_columns():
    assert live_chart.columns([{"a": 1}, {"a": 2, "b": 3}]) == {"a": [1, 2], "b": [None, 3]}
