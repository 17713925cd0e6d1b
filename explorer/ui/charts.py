"""Profiles to rows, and the Altair charts that show them. No widgets, no state.

    against_card(estimated, measured, card="A100-80GB")     one stacked bar each, against the card's capacity
    by_phase(estimated, measured)                           what lives at the peak of each phase, first step and steady
    sweep([("micro_batch 8", measured), …])                 one stacked bar a job, against the capacity

All return an `alt.Chart` to restyle at will. The page builds the same specs once, without rows, and sends rows only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from explorer.profile import BETWEEN, CATEGORIES, PhaseMemory, Profile
from explorer.ui.texts import text
from explorer.units import GiB, MiB, human

if TYPE_CHECKING:
    import altair as alt

COLOURS: dict[str, str] = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#E69F00",
    "activations": "#009E73",
    "gathered": "#CC79A7",
    "comm_buffers": "#F0E442",
    "temporary": "#D55E00",
    "unexplained": "#999999",
}
"""Okabe and Ito's colours, which people with any colour vision tell apart; one a category, everywhere."""
DARK_INK = {"gradients", "optimizer", "gathered", "comm_buffers", "unexplained", "activations"}
"""Categories whose colour carries dark text; the others carry white."""
STEP = ("forward", "backward", "step")
MOMENTS = tuple(("first", phase) for phase in ("init", *STEP)) + tuple(("steady", phase) for phase in (*STEP, *BETWEEN))
"""(step, phase), in the order in which they happen; what jobs do between steps comes last."""

Rows = list[dict[str, Any]]


class Unit(NamedTuple):
    """What the numbers of one picture or table count: GiB, or MiB where all are small."""

    name: str
    bytes: int

    def of(self, n_bytes: int) -> float:
        """Bytes in this unit."""
        return n_bytes / self.bytes

    def short(self, n_bytes: int) -> str:
        """Bytes in this unit, with the digits a person reads: 0.85, 12.3, 140."""
        size = self.of(n_bytes)
        return f"{size:.0f}" if abs(size) >= 100 and self.name == "MiB" else f"{size:.1f}" if abs(size) >= 10 else f"{size:.2f}"


def unit_for(largest_bytes: int) -> Unit:
    """The unit for numbers up to this one."""
    return Unit("GiB", GiB) if largest_bytes >= GiB else Unit("MiB", MiB)


def card_rows(estimated: Profile | None, measured: Profile | None = None, *, card: str | None = None) -> Rows:
    """One row a category and source, stacked from `start` to `end`, with the source and its total in `bar`; and one for the capacity."""
    shown = _present(estimated, measured)
    capacity = next((p.verdict.capacity_bytes for _, p in shown if p.verdict.capacity_bytes), None)
    unit = unit_for(max([p.peak.allocated_bytes for _, p in shown] + [capacity or 0]))
    rows: Rows = []
    for source, profile in shown:
        who = text(f"source.{source}")
        rows += _stack(profile.at_peak, unit, source=source, who=who, bar=f"{who}|{human(profile.peak.allocated_bytes)}")
    if capacity and rows:
        label = text("chart.capacity", card=card or text("chart.a_card"), size=human(capacity))
        rows.append({"kind": "capacity", "end": unit.of(capacity), "label": label})
    return _with_unit(rows, unit)


def sweep_rows(jobs: Sequence[tuple[str, Profile]]) -> Rows:
    """One row a category and job, stacked; and one for the capacity, where all jobs have the same."""
    capacities = {profile.verdict.capacity_bytes for _, profile in jobs}
    capacity = capacities.pop() if len(capacities) == 1 else None
    unit = unit_for(max([profile.peak.allocated_bytes for _, profile in jobs] + [capacity or 0]))
    rows: Rows = []
    for label, profile in jobs:
        size = human(profile.peak.allocated_bytes)
        failed = text("chart.out_of_memory", size=size) if profile.verdict.failure else size
        rows += _stack(profile.at_peak, unit, source=profile.source, who=label, bar=f"{label}|{failed}")
    if capacity and rows:
        rows.append({"kind": "capacity", "end": unit.of(capacity), "label": text("chart.capacity", card=text("chart.a_card"), size=human(capacity))})
    return _with_unit(rows, unit)


def phase_rows(estimated: Profile | None, measured: Profile | None = None) -> Rows:
    """One row a category, source and moment, stacked; and one a moment for what is reserved."""
    shown = _present(estimated, measured)
    unit = unit_for(max([p.peak.reserved_bytes for _, p in shown], default=0))
    rows: Rows = []
    for source, profile in shown:
        for step, phase in MOMENTS:
            memory = profile.phase(step, phase)
            if memory is not None:
                rows += _moment(memory, unit, source, step, phase)
    return _with_unit([*rows, *_heads({row["moment"] for row in rows})], unit) if rows else []


def _heads(present: set[str]) -> Rows:
    """A row for each moment on the axis, with the step's name at its first, and an empty place between the steps."""
    rows: Rows = []
    for step in ("first", "steady"):
        here = [f"{s} {phase}" for s, phase in MOMENTS if s == step and (phase not in BETWEEN or f"{s} {phase}" in present)]
        rows += [{"kind": "head", "moment": m, "label": "" if i else text(f"chart.phase.{step}")} for i, m in enumerate(here)]
    rows.insert(len(STEP) + 1, {"kind": "head", "moment": "", "label": ""})
    return rows


def _present(estimated: Profile | None, measured: Profile | None) -> list[tuple[str, Profile]]:
    return [(source, profile) for source, profile in (("estimated", estimated), ("measured", measured)) if profile is not None]


def _moment(memory: PhaseMemory, unit: Unit, source: str, step: str, phase: str) -> Rows:
    where = {"source": source, "who": text(f"source.{source}"), "moment": f"{step} {phase}", "step": text(f"step.{step}")}
    rows = _stack(memory.at_peak or {"unexplained": memory.peak_allocated_bytes}, unit, **where)
    if not memory.at_peak:
        for row in rows:
            row["label"] = text("category.total")
    size = memory.peak_reserved_bytes
    return [*rows, {"kind": "reserved", **where, "end": unit.of(size), "size": f"{unit.short(size)} {unit.name}"}]


def _stack(parts: Mapping[str, int], unit: Unit, **common: Any) -> Rows:
    rows: Rows = []
    below = 0
    for category in CATEGORIES:
        size = parts.get(category, 0)
        if size:
            row = {"kind": "part", **common, "category": category, "label": text(f"category.{category}"), "start": unit.of(below), "end": unit.of(below + size)}
            rows.append({**row, "size": f"{unit.short(size)} {unit.name}"})
            below += size
    return rows


def _with_unit(rows: Rows, unit: Unit) -> Rows:
    return [{**row, "unit": unit.name} for row in rows]


_TICK = "datum.label + (datum.index == 1 && length(data('rows')) ? ' ' + data('rows')[0].unit : '')"
"""The unit once, at the last tick."""

# -- Altair -----------------------------------------------------------------------------------------------------------


def against_card(estimated: Profile | None, measured: Profile | None = None, *, card: str | None = None) -> alt.LayerChart:
    """The bytes at the allocated peak by category, estimated and measured, against the card's capacity."""
    import altair as alt

    return card_spec(alt.InlineData(name="rows", values=card_rows(estimated, measured, card=card)))


def by_phase(estimated: Profile | None, measured: Profile | None = None) -> alt.LayerChart:
    """The bytes at the allocated peak of each phase by category, of the first step and of a steady one."""
    import altair as alt

    return phase_spec(alt.InlineData(name="rows", values=phase_rows(estimated, measured)))


def sweep(jobs: Sequence[tuple[str, Profile]]) -> alt.LayerChart:
    """The bytes at the allocated peak of each job by category, against the capacity that they share."""
    import altair as alt

    chart = card_spec(alt.InlineData(name="rows", values=sweep_rows(jobs)), legend=True)
    return chart.properties(width=640, height=alt.Step(44)).configure_axisY(labelLimit=420)


def card_spec(data: Any, *, legend: bool = False) -> alt.LayerChart:
    """`against_card` for any data, such as `alt.NamedData("rows")`. `legend`: for a picture that nobody can point at."""
    import altair as alt

    base = alt.Chart(data)
    x = alt.X("start:Q", title=None, axis=alt.Axis(grid=True, tickCount=6, domain=False, ticks=False, labelExpr=_TICK, labelPadding=6), scale=alt.Scale(nice=False, zero=True))
    y_axis = alt.Axis(domain=False, ticks=False, labelPadding=12, labelFontSize=13, labelLineHeight=18, labelExpr="split(datum.value, '|')", labelBaseline="line-bottom", labelOffset=-1)
    y = alt.Y("bar:N", title=None, sort=None, axis=y_axis, scale=alt.Scale(paddingInner=0.35, paddingOuter=0.3))
    parts = base.transform_filter("datum.kind == 'part'")
    tips = [alt.Tooltip("who:N", title=" "), alt.Tooltip("label:N", title=text("chart.category")), alt.Tooltip("size:N", title=text("chart.size"))]
    bars = (
        parts.transform_calculate(spoken="datum.who + ', ' + datum.label + ': ' + datum.size")
        .mark_bar(height={"band": 1}, strokeWidth=1)
        .encode(x=x, x2="end:Q", y=y, color=_colour(legend), tooltip=tips, description=alt.Description("spoken:N"))
    )
    wide = "(datum.end - datum.start) / domain('x')[1] * width > 8 * length(datum.label) + 10"
    ink = alt.condition(alt.FieldOneOfPredicate(field="category", oneOf=sorted(DARK_INK)), alt.value("#0b1a16"), alt.value("#ffffff"))
    names = (
        parts.transform_calculate(middle="(datum.start + datum.end) / 2")
        .mark_text(fontSize=12, fontWeight=600, aria=False)
        .encode(x="middle:Q", y=y, text="label:N", color=ink, opacity=alt.condition(wide, alt.value(1), alt.value(0)))
        .properties(name="inside")
    )
    capacity = base.transform_filter("datum.kind == 'capacity'")
    line = capacity.mark_rule(strokeWidth=2, strokeDash=[6, 3]).encode(x="end:Q", description="label:N").properties(name="limit")
    left = "datum.end / domain('x')[1] * width < min(240, width / 2)"  # too near the left edge to write before the line
    side, away = alt.ExprRef(f"{left} ? 'left' : 'right'"), alt.ExprRef(f"{left} ? 6 : -6")
    label = capacity.mark_text(align=side, dx=away, y=-8, fontSize=12, fontWeight=600).encode(x="end:Q", text="label:N").properties(name="limitlabel")
    return _dressed(alt.layer(bars, names, line, label).properties(width="container", height=alt.Step(60)))


def phase_spec(data: Any) -> alt.LayerChart:
    """`by_phase` for any data."""
    import altair as alt

    base = alt.Chart(data)
    moments = [f"{step} {phase}" for step, phase in MOMENTS]
    moments.insert(len(STEP) + 1, "")  # a gap between the first step and the later ones
    short = "width < 460 ? {forward: 'fwd', backward: 'bwd'}[split(datum.value, ' ')[1]] || split(datum.value, ' ')[1] : split(datum.value, ' ')[1]"
    axis = alt.Axis(domain=False, ticks=False, labelAngle=0, labelPadding=8, labelExpr=short, labelOverlap=False)
    x = alt.X("moment:N", title=None, sort=moments, axis=axis, scale=alt.Scale(paddingInner=0.28, paddingOuter=0.1))
    offset = alt.XOffset("source:N", sort=["estimated", "measured"], scale=alt.Scale(paddingInner=0.06))
    y = alt.Y("start:Q", title=None, axis=alt.Axis(grid=True, tickCount=5, domain=False, ticks=False, labelExpr=_TICK), scale=alt.Scale(nice=False, zero=True))
    when = "datum.who + ', ' + datum.step + ', ' + split(datum.moment, ' ')[1] + ', '"
    tips = [alt.Tooltip("who:N", title=" "), alt.Tooltip("step:N", title=text("chart.step")), alt.Tooltip("label:N", title=text("chart.category")), alt.Tooltip("size:N", title=text("chart.size"))]
    bars = (
        base.transform_filter("datum.kind == 'part'")
        .transform_calculate(spoken=f"{when} + datum.label + ': ' + datum.size")
        .mark_bar(strokeWidth=1)
        .encode(x=x, xOffset=offset, y=y, y2="end:Q", color=_colour(), tooltip=tips, description=alt.Description("spoken:N"))
    )
    reserved = (
        base.transform_filter("datum.kind == 'reserved'")
        .transform_calculate(spoken=f"{when} + 'reserved: ' + datum.size")
        .mark_tick(thickness=2, orient="horizontal")
        .encode(x=x, xOffset=offset, y=alt.Y("end:Q"), tooltip=[alt.Tooltip("size:N", title=text("chart.reserved"))], description=alt.Description("spoken:N"))
        .properties(name="reserved")
    )
    heads = base.transform_filter("datum.kind == 'head'").mark_text(align="left", dx=-14, fontSize=12, fontWeight=600)
    heads = heads.encode(x=x, y=alt.value(-12), text="label:N").properties(name="head")
    return _dressed(alt.layer(bars, reserved, heads).properties(width="container", height=240))


def _colour(legend: bool = False) -> alt.Color:
    import altair as alt

    names = "{" + ", ".join(f"{category}: '{text(f'category.{category}')}'" for category in COLOURS) + "}[datum.value]"
    shown = alt.Legend(title=None, orient="bottom", labelExpr=names) if legend else None
    return alt.Color("category:N", scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())), legend=shown)


def _dressed(chart: alt.LayerChart) -> alt.LayerChart:
    font = "ui-sans-serif, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
    spaced = chart.configure(background="transparent", font=font, padding={"left": 2, "right": 8, "top": 22, "bottom": 4})
    return spaced.configure_view(stroke=None).configure_axis(labelFontSize=12, titleFontSize=12, titleFontWeight="normal")
