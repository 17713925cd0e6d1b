"""The page's words and tables as HTML, from Profiles. Pure functions; everything shown is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from explorer.profile import CATEGORIES, Profile, Source
from explorer.setup import Setup
from explorer.ui.charts import COLOURS, Unit, unit_for
from explorer.ui.measurements import Measured
from explorer.ui.state import ExplorerState
from explorer.ui.texts import complaint, sentence, text
from explorer.units import human

_TONES = {"fits": "good", "tight": "warn", "does not fit": "bad"}


def tag(source: str) -> str:
    """The small word that says where a number comes from."""
    return f'<span class="ex-tag ex-{source}">{escape(text(f"source.{source}").lower())}</span>'


def head() -> str:
    """The page's title."""
    return f'<h1>{escape(text("title"))}</h1><p class="ex-lede">{escape(text("lede"))}</p>'


def amount(n_bytes: int) -> str:
    """A size for a figure: the number and a small unit."""
    number, unit = human(n_bytes).split()
    return f'{number}<span class="ex-unit">&#8239;{unit}</span>'


def when(step: str, phase: str) -> str:
    """ "backward, later steps"."""
    return text("figure.peak.when", phase=text(f"phase.{phase}"), step=text(f"step.{step}")) if phase != "init" else text("phase.init")


# -- the verdict ----------------------------------------------------------------------------------------------------------


def verdict(state: ExplorerState) -> str:
    """One sentence, and why."""
    if state.problem:
        field, said = state.problem
        last = text("verdict.last") if state.estimate else ""
        return _verdict("bad", text("verdict.problem"), f"{complaint(field.removeprefix('deepspeed.'), said)} {last}".strip())
    if state.obstacle:
        return _verdict("plain", text("verdict.obstacle"), state.obstacle)
    if state.estimate is None or state.busy:
        return _verdict("plain", text("verdict.recording" if state.busy else "verdict.waiting"), text("verdict.recording.why", now=state.busy) if state.busy else "")
    profile = state.estimate
    if profile.verdict.answer is None:
        return _verdict("plain", text("verdict.none", peak=human(profile.peak.allocated_bytes)), profile.verdict.why, tag("estimated"))
    headline = text(f"verdict.{profile.verdict.answer}", card=_card(state.setup, profile), headroom=human(profile.verdict.headroom_bytes or 0))
    return _verdict(_TONES[profile.verdict.answer], headline, profile.verdict.why, tag("estimated"))


def _verdict(tone: str, headline: str, why: str, mark: str = "") -> str:
    return f'<div class="ex-say ex-{tone}"><p class="ex-sentence">{escape(headline)} {mark}</p><p class="ex-why">{escape(sentence(why))}</p></div>'


def _card(setup: Setup | None, profile: Profile) -> str:
    if setup is not None and setup.gpu and setup.capacity_gib is None:
        return text("verdict.card", name=setup.gpu)
    return text("verdict.limit", gib=human(profile.verdict.capacity_bytes or 0))


# -- the figures ------------------------------------------------------------------------------------------------------------


def figures(state: ExplorerState) -> str:
    """The numbers a person came for, each with where it comes from."""
    profile = state.estimate
    if profile is None:
        return ""
    measured = state.measured.profile if state.measured else None
    parts = [
        _figure("peak", amount(profile.peak.allocated_bytes), when(profile.peak.allocated_step, profile.peak.allocated_phase), measured and human(measured.peak.allocated_bytes)),
        _headroom(profile),
        _largest(state),
        _figure("host", amount(_host(profile)), _per_node(profile, state.setup), measured and human(_host(measured))),
    ]
    of = state.setup.digest if state.setup and not state.stale else ""
    return f'<dl class="ex-figures" data-setup="{of}">{"".join(parts)}</dl>'


def _figure(key: str, value: str, note: str, measured: str | None = None) -> str:
    second = f'<dd class="ex-second">{escape(measured)} {tag("measured")}</dd>' if measured else ""
    return f'<div><dt>{escape(text(f"figure.{key}"))}</dt><dd class="ex-value">{value}</dd><dd class="ex-note">{tag("estimated")} {escape(note)}</dd>{second}</div>'


def _headroom(profile: Profile) -> str:
    room, capacity = profile.verdict.headroom_bytes, profile.verdict.capacity_bytes
    if room is None or capacity is None:
        return _figure("headroom", text("figure.largest.unknown"), "")
    return _figure("headroom" if room >= 0 else "over", amount(abs(room)), text("figure.headroom.of", capacity=human(capacity)))


def _largest(state: ExplorerState) -> str:
    if state.estimate.verdict.answer is None:
        return _figure("largest", text("figure.largest.unknown"), "")
    if not state.largest_known:
        return _figure("largest", text("figure.largest.wait"), "")
    return _figure("largest", f"{state.largest:,}" if state.largest else text("figure.largest.none"), "")


def _host(profile: Profile) -> int:
    return profile.host.peak_bytes or profile.host.resident_bytes


def _per_node(profile: Profile, setup: Setup | None) -> str:
    n = min(setup.world_size, setup.gpus_per_node) if setup else 1
    return "" if n == 1 else text("figure.host.node", node=human(profile.host.per_node_bytes), n=n)


# -- category by category ---------------------------------------------------------------------------------------------------


def breakdown(estimated: Profile | None, measured: Profile | None) -> str:
    """The table of categories: the key to the charts' colours, the numbers, and the difference."""
    shown = [(s, p) for s, p in (("estimated", estimated), ("measured", measured)) if p is not None]
    if not shown:
        return ""
    largest = max((size for _, p in shown for size in p.at_peak.values()), default=1) or 1
    unit = unit_for(max(p.peak.allocated_bytes for _, p in shown))
    rows = "".join(_row(c, shown, largest, unit) for c in CATEGORIES if any(p.at_peak.get(c) for _, p in shown))
    heads = "".join(f'<th scope="col" class="ex-num">{escape(text(f"table.{source}", unit=unit.name))}</th>' for source, _ in shown)
    last = f'<th scope="col" class="ex-num">{escape(text("table.difference"))}</th>' if len(shown) == 2 else ""
    return (
        f'<h2>{escape(text("table.title"))}</h2><table class="ex-table ex-breakdown"><caption class="ex-hidden">{escape(text("table.caption"))}</caption>'
        f'<thead><tr><th scope="col">{escape(text("table.category"))}</th><th aria-hidden="true" class="ex-bars"></th>{heads}{last}</tr></thead>'
        f"<tbody>{rows}</tbody><tfoot>{_sum('total', 'allocated_bytes', shown, unit)}{_sum('reserved', 'reserved_bytes', shown, unit)}</tfoot></table>"
    )


def origins(sources: Sequence[Source]) -> str:
    """What the estimated peak is made of and where each part comes from, folded away."""
    if not sources:
        return ""
    rows = "".join(
        f'<tr><th scope="row"><span class="ex-swatch" style="background:{COLOURS[s.category]}"></span><code>{escape(s.name)}</code></th>'
        f'<td class="ex-num">{escape(human(s.n_bytes))}</td><td>{escape(text(f"origin.{s.provenance}"))}{_where(s)}</td></tr>'
        for s in sources[:_MOST_ORIGINS]
    )
    rest = sources[_MOST_ORIGINS:]
    more = f'<p class="ex-dim">{escape(text("origins.rest", n=len(rest), size=human(sum(s.n_bytes for s in rest))))}</p>' if rest else ""
    heads = "".join(f'<th scope="col"{" class=ex-num" if key == "size" else ""}>{escape(text(f"origins.{key}"))}</th>' for key in ("part", "size", "kind"))
    return f'<details class="ex-fold ex-origins"><summary>{escape(text("origins.title"))}</summary><table class="ex-table"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{more}</details>'


_MOST_ORIGINS = 40


def _where(source: Source) -> str:
    """What a trace is of need not be said at every row."""
    return "" if source.provenance == "traced" else f"<small>{escape(source.origin)}</small>"


def _row(category: str, shown: list[tuple[str, Profile]], largest: int, unit: Unit) -> str:
    sizes = [p.at_peak.get(category, 0) for _, p in shown]
    bars = "".join(f'<i class="ex-{source}" style="width:{100 * size / largest:.2f}%;background:{COLOURS[category]}"></i>' for (source, _), size in zip(shown, sizes, strict=True))
    return (
        f'<tr data-category="{category}"><th scope="row"><span class="ex-swatch" style="background:{COLOURS[category]}"></span>{escape(text(f"category.{category}"))}'
        f'<small>{escape(text(f"about.{category}"))}</small></th><td class="ex-bars" aria-hidden="true">{bars}</td>{_cells(sizes, unit)}</tr>'
    )


def _sum(key: str, attribute: str, shown: list[tuple[str, Profile]], unit: Unit) -> str:
    sizes = [getattr(p.peak, attribute) for _, p in shown]
    return f'<tr><th scope="row">{escape(text(f"table.{key}"))}</th><td class="ex-bars"></td>{_cells(sizes, unit)}</tr>'


def _cells(sizes: list[int], unit: Unit) -> str:
    cells = "".join(f'<td class="ex-num">{number(size, unit)}</td>' for size in sizes)
    return cells + (f'<td class="ex-num ex-diff">{difference(sizes[1] - sizes[0], unit)}</td>' if len(sizes) == 2 else "")


def number(n_bytes: int, unit: Unit) -> str:
    """A size in a table's unit, as HTML; what is there is never shown as 0."""
    return "&lt;0.01" if 0 < unit.of(n_bytes) < 0.005 else f"{unit.of(n_bytes):.2f}"


def difference(n_bytes: int, unit: Unit) -> str:
    """Measured less estimated, signed; 0 where two decimals show none."""
    size = f"{abs(unit.of(n_bytes)):.2f}"
    return "0" if size == "0.00" else ("+" if n_bytes > 0 else "&minus;") + size


# -- the measurement ----------------------------------------------------------------------------------------------------------


def measurement(state: ExplorerState) -> str:
    """Where the measurement shown was made, when, and how near the estimate is."""
    if state.measured is None:
        return ""
    profile = state.measured.profile
    where = text("measured.on.cpu") if profile.measured_on == "cpu" else text("measured.on.cuda", gpu=profile.environment.get("gpu") or "GPU")
    parts = [where + _date(state.measured) + ".", _outcome(profile), _nearness(state)]
    return f'<p class="ex-where">{tag("measured")} {escape(" ".join(p for p in parts if p))}</p>'


def _date(measured: Measured) -> str:
    return text("measured.when", date=measured.recorded_at[:10]) if measured.recorded_at else ""


def _outcome(profile: Profile) -> str:
    failure = profile.verdict.failure
    return f"{failure.text[:300]}" if failure else ""


def _nearness(state: ExplorerState) -> str:
    difference_, measured = state.comparison, state.measured.profile
    if difference_ is None or measured.verdict.failure:
        return ""
    off = -difference_.peak_allocated_bytes
    if off == 0:
        return text("measured.exact")
    share = 100 * abs(off) / max(1, measured.peak.allocated_bytes)
    percent = "less than 0.1" if share < 0.1 else f"{share:.1f}"
    return text("measured.worst", percent=percent, side=text("measured.high" if off > 0 else "measured.low"), category=text(f"category.{difference_.worst_category}").lower())


def probe_words(state: ExplorerState, accelerator: str | None) -> str:
    """What the probe button does here, how far it is, or why it is off."""
    status = state.probe_status
    if status.state == "running":
        seconds = text("probe.seconds", seconds=status.seconds)
        return f'<p class="ex-progress" role="status"><span class="ex-pulse"></span>{escape(status.text or text("probe.starting"))} <span class="ex-dim">{seconds}</span></p>'
    said = {"failed": text("probe.failed", text=status.text), "cancelled": text("probe.cancelled", seconds=status.seconds), "done": text("probe.done", seconds=status.seconds)}.get(status.state, "")
    about = sentence(state.probe_obstacle) or ("" if status.state == "done" else text(f"probe.{accelerator or 'none'}"))
    tone = "ex-alert" if status.state == "failed" else ""
    return f'<p class="{tone}" role="status">{escape(said)}</p><p>{escape(about)}</p>'


# -- the rest -----------------------------------------------------------------------------------------------------------------


def notes(estimated: Profile | None, measured: Profile | None) -> str:
    """What either side assumed or found."""
    return "".join(_notes(source, p) for source, p in (("estimated", estimated), ("measured", measured)) if p is not None and p.notes)


def _notes(source: str, profile: Profile) -> str:
    items = "".join(f"<li>{escape(sentence(note))}</li>" for note in profile.notes)
    return f'<h2>{escape(text(f"notes.{source}"))}</h2><ul class="ex-notes">{items}</ul>'


def notice(sentences: tuple[str, ...]) -> str:
    """Sentences about the address the page was opened with."""
    return "".join(f'<p class="ex-notice" role="status">{escape(s)}</p>' for s in sentences)


def job_file(job: str, digest: str) -> str:
    """The job file, folded away."""
    shown = f'<pre>{escape(job)}</pre><p class="ex-dim"><code>{escape(text("share.hint"))}</code></p>'
    return f'<details class="ex-fold ex-job" data-setup="{digest}"><summary>{escape(text("share.show"))}</summary>{shown}</details>'
