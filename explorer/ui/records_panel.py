"""The panel of what was measured before: a list that is read once it is opened, and two records side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from html import escape
from typing import Any

import anywidget
import ipywidgets as W
import traitlets as T

from explorer.errors import shown
from explorer.profile import CATEGORIES
from explorer.ui.charts import COLOURS, unit_for
from explorer.ui.live_chart import script
from explorer.ui.panels import difference, number
from explorer.ui.recordings import Recordings, describe
from explorer.ui.state import ExplorerState
from explorer.ui.texts import text

_WORDS = ("title", "hint", "compare", "job", "where", "peak", "estimate", "memory", "yours", "is_shown", "open", "download", "remove", "sure", "load", "none")


class RecordsTable(anywidget.AnyWidget):
    """The list, its buttons and its file field. What a person does comes as messages {act, name}."""

    _esm = script("records.js")
    words = T.Dict().tag(sync=True)
    rows = T.List(T.Dict()).tag(sync=True)
    estimates = T.Dict().tag(sync=True)
    chosen = T.List(T.Unicode()).tag(sync=True)
    said = T.Unicode().tag(sync=True)
    failed = T.Bool(False).tag(sync=True)


class RecordsPanel:
    """The panel, in `box`; what it does is `recordings`."""

    def __init__(self, state: ExplorerState) -> None:
        self.recordings = Recordings(state)
        self._state = state
        self._button = W.Button(icon="chevron-right")
        self._button.add_class("ex-disclosure")
        self._button.on_click(lambda _: self._toggle())
        self._body = W.VBox()
        self._body.layout.display = "none"
        self.table: RecordsTable | None = None
        self.box = W.VBox([self._button, self._body])
        self.box.add_class("ex-panel")
        self.box.add_class("ex-before")
        state.observe(lambda _: self._count(), "measured")
        self._count()

    def _count(self) -> None:
        self._button.description = text("records.title.n", n=len(self._state.measurements))

    def _toggle(self) -> None:
        opening = not self.recordings.listed
        if opening and self.table is None:
            self._build()
        self.recordings.open_list(opening)
        self._body.layout.display = None if opening else "none"
        self._button.icon = "chevron-down" if opening else "chevron-right"
        (self._button.add_class if opening else self._button.remove_class)("ex-open")

    def _build(self) -> None:
        recordings = self.recordings
        self.table = RecordsTable(words={key: text(f"records.{key}") for key in _WORDS})
        self._compared = W.HTML()
        self._body.children = (self.table, self._compared)
        self.table.on_msg(lambda _, message, buffers: self._act(message, buffers))
        self.table.observe(lambda change: setattr(recordings, "chosen", tuple(change["new"])), "chosen")
        recordings.observe(lambda _: self._show_rows(), "rows")
        recordings.observe(lambda _: self._show_chosen(), ["chosen", "comparison"])
        recordings.observe(lambda _: self._tell(), ["said", "failed"])
        recordings.observe(lambda change: setattr(self.table, "estimates", change["new"]), "estimates")

    def _act(self, message: dict[str, Any], buffers: list[Any]) -> None:
        recordings, act, name = self.recordings, message.get("act"), str(message.get("name"))
        if act == "open":
            recordings.open(name)
            if not recordings.failed:
                self.table.send({"opened": name})
        elif act == "remove":
            recordings.remove(name)
        elif act == "load" and buffers:
            recordings.load(bytes(buffers[0]), name)
        elif act == "refuse":
            recordings.refuse(name, int(message.get("n_bytes", 0)))
        elif act == "download" and (content := recordings.content(name)) is not None:
            self.table.send({"download": f"{name}.json", "content": content})

    def _show_rows(self) -> None:
        self.table.rows = [asdict(row) for row in self.recordings.rows]

    def _show_chosen(self) -> None:
        self.table.chosen = list(self.recordings.chosen)
        self._compared.value = side_by_side(self.recordings.comparison)

    def _tell(self) -> None:
        with self.table.hold_sync():
            self.table.said, self.table.failed = self.recordings.said, self.recordings.failed


def side_by_side(found: Any) -> str:
    """Two records as a table of categories and what differs in their jobs and machines, as HTML; "" for None."""
    if found is None:
        return ""
    pair = (found.first, found.second)
    unit = unit_for(max(record.profile.peak.allocated_bytes for record in pair))
    rows = [(_category(c), [record.profile.at_peak.get(c, 0) for record in pair]) for c in CATEGORIES if any(record.profile.at_peak.get(c) for record in pair)]
    sums = [(escape(text(f"table.{key}")), [getattr(record.profile.peak, name) for record in pair]) for key, name in (("total", "allocated_bytes"), ("reserved", "reserved_bytes"))]
    heads = "".join(f'<th scope="col" class="ex-num">{escape(text(f"compare.{key}", unit=unit.name))}</th>' for key in ("first", "second", "difference"))
    return (
        f'<div class="ex-side-by-side"><h2>{escape(text("compare.title"))}</h2>{_who(pair)}'
        f'<table class="ex-table"><caption class="ex-hidden">{escape(text("compare.caption"))}</caption><thead><tr><th scope="col">{escape(text("table.category"))}</th>{heads}</tr></thead>'
        f"<tbody>{_sizes(rows, unit)}</tbody><tfoot>{_sizes(sums, unit)}</tfoot></table>{_changes('setting', found.setups)}{_changes('machine', found.environments)}</div>"
    )


def _who(pair: Iterable[Any]) -> str:
    """Which is A and which is B, and whether one of them ended early."""
    lines = []
    for letter, record in zip("AB", pair, strict=True):
        row = describe(record)
        failed = f' {escape(text("compare.failed", letter=letter))}' if record.profile.verdict.failure else ""
        lines.append(f'<p class="ex-dim"><b>{letter}</b> {escape(f"{row.model} · {row.words} · {row.where}, {row.date}.")}{failed}</p>')
    return "".join(lines)


def _category(category: str) -> str:
    return f'<span class="ex-swatch" style="background:{COLOURS[category]}"></span>{escape(text(f"category.{category}"))}'


def _sizes(rows: Iterable[tuple[str, list[int]]], unit: Any) -> str:
    cells = (
        (name, "".join(f'<td class="ex-num">{number(size, unit)}</td>' for size in sizes) + f'<td class="ex-num ex-diff">{difference(sizes[1] - sizes[0], unit)}</td>') for name, sizes in rows
    )
    return "".join(f'<tr><th scope="row">{name}</th>{numbers}</tr>' for name, numbers in cells)


def _changes(key: str, changes: Iterable[Any]) -> str:
    """Key by key; for the jobs also that there is none."""
    lines = [f'<tr><th scope="row"><code>{escape(c.key)}</code></th><td>{_value(c.first)}</td><td>{_value(c.second)}</td></tr>' for c in changes]
    if not lines:
        return f'<p class="ex-dim">{escape(text("compare.same"))}</p>' if key == "setting" else ""
    heads = f'<th scope="col">{escape(text(f"compare.{key}"))}</th><th scope="col">{text("compare.a")}</th><th scope="col">{text("compare.b")}</th>'
    return f'<table class="ex-table ex-changes"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _value(value: Any) -> str:
    return f'<span class="ex-dim">{escape(text("compare.absent"))}</span>' if value is None else f"<code>{escape(shown(value, 120))}</code>"
