"""Profiles to rows, and the Altair charts that show them. No widgets, no state.

    against_card(estimated, measured, card="A100-80GB")     one stacked bar each, against the card's capacity
    by_phase(estimated, measured)                           what lives at the peak of each phase, first step and steady

Both return an `alt.Chart` to restyle at will. The page builds the same specs once, without rows, and sends rows only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from explorer.profile import CATEGORIES, PhaseMemory, Profile
from explorer.ui.texts import text
from explorer.units import gib

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
MOMENTS: tuple[tuple[str, str], ...] = (("first", "init"), ("first", "forward"), ("first", "backward"), ("first", "step"), ("steady", "forward"), ("steady", "backward"), ("steady", "step"))
"""(step, phase), in the order in which they happen."""

Rows = list[dict[str, Any]]


def card_rows(estimated: Profile | None, measured: Profile | None = None, *, card: str | None = None) -> Rows:
    """One row a category and source, stacked: `start`, `end` and `gib` in GiB; and one row for the capacity."""
    rows: Rows = []
    for source, profile in _present(estimated, measured):
        bar = text(f"source.{source}")
        rows += _stack(profile.at_peak, source=source, bar=bar)
        rows.append({"kind": "total", "source": source, "bar": bar, "end": gib(profile.peak.allocated_bytes), "label": f"{_short(gib(profile.peak.allocated_bytes))} {text('chart.gib')}"})
    capacity = next((p.verdict.capacity_bytes for _, p in _present(estimated, measured) if p.verdict.capacity_bytes), None)
    if capacity and rows:
        rows.append({"kind": "capacity", "end": gib(capacity), "label": _capacity_label(capacity, card)})
    return rows


def phase_rows(estimated: Profile | None, measured: Profile | None = None) -> Rows:
    """One row a category, source and moment, stacked, in GiB; and one a moment for its reserved peak and its total."""
    rows: Rows = []
    for source, profile in _present(estimated, measured):
        for step, phase in MOMENTS:
            memory = profile.phase(step, phase)
            if memory is not None:
                rows += _moment(memory, source, step, phase)
    heads = [{"kind": "head", "moment": moment, "label": text(f"chart.phase.{moment.split()[0]}")} for moment in ("first init", "steady forward")]
    return [*rows, *heads] if rows else []


def _present(estimated: Profile | None, measured: Profile | None) -> Iterable[tuple[str, Profile]]:
    return [(source, profile) for source, profile in (("estimated", estimated), ("measured", measured)) if profile is not None]


def _moment(memory: PhaseMemory, source: str, step: str, phase: str) -> Rows:
    where = {"source": source, "who": text(f"source.{source}"), "moment": f"{step} {phase}", "step": text(f"step.{step}")}
    parts = memory.at_peak or {"unexplained": memory.peak_allocated_bytes}
    rows = _stack(parts, **where)
    if not memory.at_peak:
        for row in rows:
            row["label"] = text("category.total")
    total = {"kind": "total", **where, "end": gib(memory.peak_allocated_bytes), "label": _short(gib(memory.peak_allocated_bytes))}
    reserved = {"kind": "reserved", **where, "end": gib(memory.peak_reserved_bytes), "gib": _short(gib(memory.peak_reserved_bytes))}
    return [*rows, total, reserved]


def _stack(parts: Mapping[str, int], **common: Any) -> Rows:
    rows: Rows = []
    below = 0
    for category in CATEGORIES:
        size = parts.get(category, 0)
        if size:
            rows.append({"kind": "part", **common, "category": category, "label": text(f"category.{category}"), "start": gib(below), "end": gib(below + size), "gib": _short(gib(size))})
            below += size
    return rows


def _short(size_gib: float) -> str:
    return f"{size_gib:.1f}" if abs(size_gib) >= 10 else f"{size_gib:.2f}"


def _capacity_label(capacity_bytes: int, card: str | None) -> str:
    return text("chart.capacity", card=card or text("chart.a_card"), gib=_short(gib(capacity_bytes)))


_GIB = f"datum.label + (datum.index == 1 ? ' {text('chart.gib')}' : '')"
"""The unit once, at the last tick."""

# -- Altair -----------------------------------------------------------------------------------------------------------


def against_card(estimated: Profile | None, measured: Profile | None = None, *, card: str | None = None) -> alt.LayerChart:
    """The bytes at the allocated peak by category, estimated and measured, against the card's capacity."""
    import altair as alt

    return card_spec(alt.Data(values=card_rows(estimated, measured, card=card)))


def by_phase(estimated: Profile | None, measured: Profile | None = None) -> alt.LayerChart:
    """The bytes at the allocated peak of each phase by category, of the first step and of a steady one."""
    import altair as alt

    return phase_spec(alt.Data(values=phase_rows(estimated, measured)))


def card_spec(data: Any) -> alt.LayerChart:
    """`against_card` for any data, such as `alt.NamedData("rows")`."""
    import altair as alt

    base = alt.Chart(data)
    x = alt.X("start:Q", title=None, axis=alt.Axis(grid=True, tickCount=6, domain=False, ticks=False, labelExpr=_GIB, labelPadding=6), scale=alt.Scale(nice=False, zero=True))
    y = alt.Y("bar:N", title=None, sort=[text("source.estimated"), text("source.measured")], axis=alt.Axis(domain=False, ticks=False, labelPadding=10, labelFontSize=13), scale=alt.Scale(paddingInner=0.35, paddingOuter=0.3))
    parts = base.transform_filter("datum.kind == 'part'")
    bars = parts.mark_bar(height={"band": 1}, strokeWidth=1).encode(
        x=x, x2="end:Q", y=y, color=_colour(), order=alt.Order("start:Q"), tooltip=[alt.Tooltip("bar:N", title=" "), alt.Tooltip("label:N", title=text("chart.category")), alt.Tooltip("gib:N", title=text("chart.gib"))],
        description=alt.Description("spoken:N"),
    ).transform_calculate(spoken="datum.bar + ', ' + datum.label + ': ' + datum.gib + ' GiB'")
    wide = "(datum.end - datum.start) / domain('x')[1] * width > 8 * length(datum.label) + 10"
    names = parts.transform_calculate(middle="(datum.start + datum.end) / 2").mark_text(fontSize=12, fontWeight=600, aria=False).encode(
        x="middle:Q", y=y, text="label:N", color=alt.condition(alt.FieldOneOfPredicate(field="category", oneOf=sorted(DARK_INK)), alt.value("#0b1a16"), alt.value("#ffffff")), opacity=alt.condition(wide, alt.value(1), alt.value(0))
    ).properties(name="inside")
    capacity = base.transform_filter("datum.kind == 'capacity'")
    totals = base.transform_filter("datum.kind == 'total'").mark_text(align="left", dx=8, fontSize=13, fontWeight=600, aria=False).encode(x="end:Q", y=y, text="label:N").properties(name="total")
    line = capacity.mark_rule(strokeWidth=2, strokeDash=[6, 3]).encode(x="end:Q", description="label:N").properties(name="limit")
    label = capacity.mark_text(align="right", dx=-6, y=-8, fontSize=12, fontWeight=600).encode(x="end:Q", text="label:N").properties(name="limitlabel")
    return _dressed(alt.layer(bars, names, totals, line, label).properties(width="container", height=alt.Step(60)))


def phase_spec(data: Any) -> alt.LayerChart:
    """`by_phase` for any data."""
    import altair as alt

    base = alt.Chart(data)
    moments = [f"{step} {phase}" for step, phase in MOMENTS]
    moments.insert(4, "")  # a gap between the first step and the later ones
    axis = alt.Axis(domain=False, ticks=False, labelAngle=0, labelPadding=8, labelExpr="width < 460 ? {forward: 'fwd', backward: 'bwd'}[split(datum.value, ' ')[1]] || split(datum.value, ' ')[1] : split(datum.value, ' ')[1]", labelOverlap=False)
    x = alt.X("moment:N", title=None, sort=moments, axis=axis, scale=alt.Scale(domain=moments, paddingInner=0.28, paddingOuter=0.1))
    offset = alt.XOffset("source:N", sort=["estimated", "measured"], scale=alt.Scale(paddingInner=0.06))
    y = alt.Y("start:Q", title=None, axis=alt.Axis(grid=True, tickCount=5, domain=False, ticks=False, labelExpr=_GIB), scale=alt.Scale(nice=False, zero=True))
    parts = base.transform_filter("datum.kind == 'part'")
    tips = [alt.Tooltip("who:N", title=" "), alt.Tooltip("step:N", title=text("chart.step")), alt.Tooltip("label:N", title=text("chart.category")), alt.Tooltip("gib:N", title=text("chart.gib"))]
    bars = parts.mark_bar(strokeWidth=1).encode(x=x, xOffset=offset, y=y, y2="end:Q", color=_colour(), tooltip=tips, description=alt.Description("spoken:N")).transform_calculate(
        spoken="datum.who + ', ' + datum.step + ', ' + split(datum.moment, ' ')[1] + ', ' + datum.label + ': ' + datum.gib + ' GiB'"
    )
    reserved = base.transform_filter("datum.kind == 'reserved'").mark_tick(thickness=2, orient="horizontal").encode(x=x, xOffset=offset, y=alt.Y("end:Q"), tooltip=[alt.Tooltip("gib:N", title=text("chart.reserved"))], description=alt.Description("spoken:N")).transform_calculate(
        spoken="datum.who + ', ' + datum.step + ', ' + split(datum.moment, ' ')[1] + ', reserved: ' + datum.gib + ' GiB'"
    ).properties(name="reserved")
    heads = base.transform_filter("datum.kind == 'head'").mark_text(align="left", dx=-14, fontSize=12, fontWeight=600).encode(x=x, y=alt.value(-12), text="label:N").properties(name="head")
    return _dressed(alt.layer(bars, reserved, heads).properties(width="container", height=240))


def _colour() -> alt.Color:
    import altair as alt

    return alt.Color("category:N", scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())), legend=None)


def _dressed(chart: alt.LayerChart) -> alt.LayerChart:
    font = "ui-sans-serif, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
    return chart.configure(background="transparent", font=font, padding={"left": 2, "right": 8, "top": 22, "bottom": 4}).configure_view(stroke=None).configure_axis(labelFontSize=12, titleFontSize=12, titleFontWeight="normal")
