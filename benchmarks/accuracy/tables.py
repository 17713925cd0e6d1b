"""The tables, as Markdown: each figure with its bar and whether it is met."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.accuracy import figures, others, reports, rows
from benchmarks.accuracy.figures import Count, Figure, relative
from benchmarks.accuracy.rows import Pair, Row
from explorer.units import gib

HELD_OUT_BARS = {"median": 0.01, "worst": 0.05}


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns of numbers stand right."""
    cells = [tuple(line) for line in lines]
    numeric = [all(re.match(r"[+-]?\d|$|inf|n/a", line[i]) for line in cells) for i in range(len(header))]
    rule = "|".join("---:" if right and i else "---" for i, right in enumerate(numeric))
    return "\n".join([f"| {' | '.join(header)} |", f"|{rule}|", *(f"| {' | '.join(line)} |" for line in cells)])


def percent(fraction: float, digits: int = 2) -> str:
    """0.0123 → "1.23 %"."""
    return f"{fraction * 100:.{digits}f} %"


def bar_text(bars: Mapping[str, float]) -> str:
    """"median ≤ 0.5 %, worst ≤ 5 %"; a dash where no bar was set."""
    return ", ".join(f"{name} ≤ {most * 100:g} %" for name, most in bars.items()) or "–"


def met(figure: Figure | Count) -> str:
    """Whether its bars are met, and which are not."""
    if isinstance(figure, Figure) and not figure.bars:
        return ""
    if not (figure.errors if isinstance(figure, Figure) else figure.rows):
        return "no rows"
    return f"**no** ({', '.join(figure.missed)})" if figure.missed else "yes"


_FIGURE_HEADER = ("what", "rows", "median", "95th percentile", "worst", "worst row", "bar", "met")


def figure_line(f: Figure) -> tuple[str, ...]:
    """A line under _FIGURE_HEADER."""
    found = f.statistics
    return (f.name, str(len(f.errors)), *(percent(found[n]) if n in found else "" for n in ("median", "95th percentile", "worst")), f"`{f.worst_row}`" if f.statistics.get("worst", 0) >= 5e-5 else "", bar_text(f.bars), met(f))


def count_table(counts: Iterable[Count]) -> str:
    """Counts with their bars."""
    lines = [(c.name, str(c.rows), str(c.count), percent(c.share, 1), f"≤ {c.most * 100:g} %" if c.most else "0", met(c)) for c in counts]
    return table(("what", "of rows", "count", "share", "bar", "met"), lines)


# --- against the probe


def summary(pairs: Sequence[Pair]) -> tuple[list[Figure], list[Count]]:
    """Every figure with a bar, over the accuracy rows; held-out architectures and verdicts have their own."""
    chosen = rows.accuracy(pairs)
    barred = [f for f in figures.phases(chosen) if f.bars]
    return [figures.peak_allocated(chosen), *barred, figures.reserved(chosen), figures.host_pinned(chosen), figures.host_resident(chosen), figures.host_offloaded(chosen)], [figures.under_estimates(chosen)]


def accuracy_section(pairs: Sequence[Pair]) -> str:
    """Peak, phases, reserved, host, categories."""
    chosen = rows.accuracy(pairs)
    barred, counts = summary(pairs)
    others_ = [f for f in figures.phases(chosen) if not f.bars]
    parts = [f"{len(chosen)} jobs that ran to their end. Errors are of size, in per cent of what was measured.", table(_FIGURE_HEADER, map(figure_line, barred)), count_table(counts)]
    parts += ["Each category at the peak, in per cent of the peak (rows that recorded it):", table(_FIGURE_HEADER, map(figure_line, figures.categories(chosen)))]
    parts += ["The other readings, for which no bar was set:", table(_FIGURE_HEADER, map(figure_line, others_))]
    return "\n\n".join(parts)


def held_out_section(pairs: Sequence[Pair]) -> str:
    """Architectures that nobody looked at while the rules were written."""
    chosen = rows.held_out(pairs)
    if not chosen:
        return "No rows yet."
    lines = [figures.peak_allocated(chosen, "peak allocated", HELD_OUT_BARS)]
    lines += [figures.peak_allocated(group, str(family), {}) for family, group in figures.grouped(chosen, lambda p: p.family).items()]
    return table(_FIGURE_HEADER, map(figure_line, lines))


# --- verdicts


_BANDS = ((0.0, 0.97), (0.97, 1.0), (1.0, 1.04), (1.04, 1.08), (1.08, 1.15), (1.15, 1.30 + 1e-9), (1.30 + 1e-9, float("inf")))


def verdict_section(pairs: Sequence[Pair], by_name: Mapping[str, Row]) -> str:
    """Verdicts that a run under a limit confirmed or refuted."""
    judged = figures.judged(rows.limited(pairs), by_name)
    if not judged:
        return "No rows yet."
    wrong = [f"`{v.name}` ({v.wrong}{f', at {v.ratio:.2f} × the peak' if v.ratio else ''})" for v in judged if v.wrong]
    parts = [
        f"{len(judged)} runs under a limit, {len(figures.in_range(judged))} of them between {figures.LIMITS[0]:g} and {figures.LIMITS[1]:.2f} times the measured peak allocated, or at a limit whose multiple nobody knows because no run without one ended.",
        count_table(figures.verdict_counts(judged)), _bands(judged),
    ]
    return "\n\n".join([*parts, *([f"Wrong: {', '.join(wrong)}."] if wrong else [])])


def _bands(judged: Sequence[figures.Judged]) -> str:
    lines = []
    for low, high in (*_BANDS, (None, None)):
        inside = [v for v in judged if (v.ratio is None if low is None else v.ratio is not None and low <= v.ratio < high)]
        name = "unknown" if low is None else f"{low:.2f} to {high:.2f}" if high < 10 else f"above {low:.2f}"
        if inside:
            lines.append((name, str(len(inside)), str(sum(v.ran for v in inside)), *(str(sum(v.answer == a for v in inside)) for a in ("fits", "tight", "does not fit"))))
    return table(("limit ÷ peak", "runs", "ran", "called fits", "tight", "does not fit"), lines)


def largest_section(pairs: Sequence[Pair]) -> str:
    """Runs at the largest micro-batch."""
    chosen = rows.largest_batches(pairs)
    if not chosen:
        return "No rows yet."
    failed = Count(name="ran out of memory within today's answer", count=len(figures.largest_that_failed(chosen)), rows=len(chosen), most=0.0)
    lines = [(f"`{p.row.name}`", str(p.row.setup["micro_batch"]), "no" if p.row.failed else "yes", str(p.largest), percent(relative(p.profile.peak.allocated_bytes, p.row.peak["allocated_bytes"])) if not p.row.failed else "") for p in chosen]
    return "\n\n".join([count_table([failed]), table(("job", "micro-batch run", "ran", "today's answer", "error of the peak"), lines)])


# --- by what the jobs are


def group_section(pairs: Sequence[Pair]) -> str:
    """Peak allocated by architecture, and by stage, offload and precision."""
    chosen = rows.accuracy(pairs)
    by_family = [figures.peak_allocated(group, str(name), {}) for name, group in figures.grouped(chosen, lambda p: p.family).items()]
    by_mode = [((*mode,), figures.peak_allocated(group, "", {})) for mode, group in figures.grouped(chosen, lambda p: p.mode).items()]
    return "\n\n".join([
        table(("architecture", "rows", "median", "worst"), [_short(f.name, f) for f in by_family]),
        table(("stage", "offloaded", "precision", "rows", "median", "worst"), [(*mode, *_short("", f)[1:]) for mode, f in by_mode]),
    ])


def _short(name: str, f: Figure) -> tuple[str, str, str, str]:
    return name, str(len(f.errors)), percent(f.statistics["median"]), percent(f.statistics["worst"])


def worst_section(pairs: Sequence[Pair]) -> str:
    """The ten rows that are farthest off, any kind of row that ran."""
    chosen = [*rows.accuracy(pairs), *rows.held_out(pairs)]
    return table(("job", "model", "measured", "estimated", "error", "the peak stands in"), [_worst_line(p) for p in figures.worst(chosen)])


def _worst_line(p: Pair) -> tuple[str, ...]:
    ours, theirs = p.profile.peak, p.row.peak
    moments = [f"{phase}, {step} step" for phase, step in ((theirs["allocated_phase"], theirs["allocated_step"]), (ours.allocated_phase, ours.allocated_step))]
    where = moments[0] if moments[0] == moments[1] else f"{moments[0]}; estimated: {moments[1]}"
    model = p.row.setup["model"]
    return (
        f"`{p.row.name}`", model if isinstance(model, str) else str(model.get("model_type")), f"{gib(theirs['allocated_bytes']):.2f} GiB", f"{gib(ours.allocated_bytes):.2f} GiB",
        f"{relative(ours.allocated_bytes, theirs['allocated_bytes']) * 100:+.2f} %", where,
    )


# --- others


def others_section(pairs: Sequence[Pair]) -> str:
    """What other tools say of the rows that they speak of."""
    chosen = [*rows.accuracy(pairs), *rows.held_out(pairs)]
    lines = [_other_line(line) for line in others.side_by_side(chosen)]
    parts = [table(("tool", "against", "rows", "said ÷ measured, median", "lowest to highest", "worst", "ours, median", "ours, worst"), lines)]
    parts.append(f"DeepSpeed has no such function for stages 0 and 1: {sum(p.mode[0] in '01' for p in chosen)} of these {len(chosen)} rows.")
    if absent := others.not_installed():
        parts.append(f"Not asked, because not installed here: {', '.join(absent)}.")
    missing = others.without_facts(chosen)
    if missing:
        parts.append(f"No tool was asked of {', '.join(missing)}: `python -m benchmarks.accuracy.facts` has not been run since.")
    return "\n\n".join(parts)


def _other_line(line: others.Line) -> tuple[str, ...]:
    if not line.said:
        return (line.tool, line.of, "0", "n/a", "", "", "", "")
    at = line.worst
    return (
        line.tool, line.of, str(len(line.said)), f"{statistics.median(line.said):.2f}", f"{min(line.said):.2f} to {max(line.said):.2f}", f"{line.said[at]:.2f} (`{line.names[at]}`)",
        f"{statistics.median(line.ours):.3f}", f"{max(line.ours, key=others.farness):.3f}",
    )


def reports_section() -> str:
    """What others published; notes are lettered, sources numbered."""
    found = reports.readings()
    notes = list(dict.fromkeys((r.why, r.source) for r in found))
    sources = list(dict.fromkeys(r.source for r in found))
    lines, before = [], None
    for r in found:
        note = chr(ord("a") + notes.index((r.why, r.source)))
        lines.append(("" if r.id == before else r.what, r.reading, f"{gib(r.reported_bytes):.2f} GiB", *_ours(r), "" if r.id == before else note))
        before = r.id
    said = [f"- {chr(ord('a') + i)}: {why} [{sources.index(source) + 1}]" for i, (why, source) in enumerate(notes)]
    return "\n\n".join([table(("job", "reading", "published", "estimated", "error", "note"), lines), "\n".join(said), "\n".join(f"{i}. {source}." for i, source in enumerate(sources, 1))])


def _ours(r: reports.Reading) -> tuple[str, str]:
    if r.ours_bytes is None:
        return "no estimate", ""
    low, high = (f"{gib(n):.2f}" for n in r.ours_bytes)
    return (f"{low} GiB", f"{r.error * 100:+.1f} %") if low == high else (f"{low} to {high} GiB", f"{r.error * 100:+.1f} %" if r.error else "within")


# --- all


def environments(pairs: Iterable[Pair]) -> str:
    """Which versions the rows were measured with, and when."""
    seen: dict[str, list[str]] = {}
    for p in pairs:
        e = p.row.environment
        seen.setdefault(f"{e.get('gpu')}, torch {e.get('torch')}, transformers {e.get('transformers')}, DeepSpeed {e.get('deepspeed')}", []).append(str(e.get("date", ""))[:10])
    return "\n".join(f"- {name}: {len(dates)} rows, {min(dates)} to {max(dates)}" for name, dates in seen.items())


def missed_bars(pairs: Sequence[Pair], by_name: Mapping[str, Row]) -> list[str]:
    """The name of every figure that is above its bar."""
    barred, counts = summary(pairs)
    judged = figures.judged(rows.limited(pairs), by_name)
    largest = rows.largest_batches(pairs)
    everything = [
        *barred, *counts, *figures.categories(rows.accuracy(pairs)), figures.peak_allocated(rows.held_out(pairs), "held-out architectures", HELD_OUT_BARS), *figures.verdict_counts(judged),
        Count(name="largest micro-batch", count=len(figures.largest_that_failed(largest)), rows=len(largest), most=0.0),
    ]
    return [f"{f.name} ({', '.join(f.missed)})" for f in everything if f.missed]


def document(pairs: Sequence[Pair]) -> str:
    """All tables under their headings."""
    by_name = {p.row.name: p.row for p in pairs}
    sections = {
        "Against the probe": accuracy_section(pairs),
        "Held-out architectures": held_out_section(pairs),
        "Verdicts": verdict_section(pairs, by_name),
        "Largest micro-batch": largest_section(pairs),
        "By architecture and by mode (peak allocated)": group_section(pairs),
        "The ten worst rows": worst_section(pairs),
        "Beside other tools": others_section(pairs),
        "Beside published measurements": reports_section(),
    }
    without = rows.without_estimate(pairs)
    head = [f"{len(pairs)} rows:", environments(pairs)]
    if without:
        head.append("Without an estimate: " + "; ".join(f"`{p.row.name}` ({p.error})" for p in without) + ".")
    missed = missed_bars(pairs, by_name)
    head.append(f"Bars not met: {'; '.join(missed)}." if missed else "Every bar that has rows is met.")
    return "\n\n".join([*head, *(f"### {title}\n\n{text}" for title, text in sections.items())])
