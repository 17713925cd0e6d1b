"""The controls in the sidebar, each bound to a trait of the state, with its notice beside it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets as W

from explorer.errors import BadInput
from explorer.ui import fields
from explorer.ui.parts import Number
from explorer.ui.state import ExplorerState
from explorer.ui.texts import complaint, text
from explorer.units import gib

_STAGE3 = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size")
_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
"""DeepSpeed's own values, shown where nothing is given (runtime/zero/config.py)."""
_SIZES = tuple(d * 10**p for p in range(5, 10) for d in (1, 2, 5))


def ladder(last: int) -> list[int]:
    """1 to `last`, eight stops and then four a doubling: fine where small counts matter."""
    stops = list(range(1, 9)) + [n << k for k in range(1, 40) for n in (5, 6, 7, 8)]
    return [n for n in stops if n < last] + [last]


def doublings(first: int, last: int) -> list[int]:
    """Powers of two and their halves between, up to and including `last`."""
    stops = sorted({first << k for k in range(40)} | {first * 3 << k for k in range(40)})
    return [n for n in stops if n < last] + [last]


class Controls:
    """All controls by name in `by_name`, grouped for the page in `box`."""

    def __init__(self, state: ExplorerState) -> None:
        self.state = state
        self.by_name: dict[str, W.Widget] = {}
        self._notices: dict[str, W.HTML] = {}
        self.box = W.VBox([self._group(name, parts) for name, parts in self._groups()] + self._advanced())
        self.box.add_class("ex-side")
        state.observe(lambda _: self._show_problem(), ["problem", "stage"])
        state.observe(lambda _: self._show_lengths(), "lengths")
        self._show_lengths()
        self._show_problem()

    def _groups(self) -> list[tuple[str, Sequence[W.Widget]]]:
        lengths = [self._number(name) for name in ("sequence", "target_sequence", "image_size")]
        offload = [self._segments(name) for name in ("stage", "offload_optimizer", "offload_param")]
        model = [self._model(), self._config_text(), self._number("micro_batch", ladder(1024)), *lengths]
        return [
            ("model", [*model, self._segments("precision"), self._switch("gradient_checkpointing"), self._segments("attention")]),
            ("deepspeed", [*offload, self._number("gradient_accumulation_steps", doublings(1, 128)), self._dropdown("optimizer")]),
            ("hardware", [self._card(), self._number("world_size", doublings(1, 1024))]),
        ]

    def _advanced(self) -> list[W.Widget]:
        sizes = [self._number(name, list(_SIZES)) for name in _STAGE3]
        parts = [self._number("reduce_bucket_size", list(_SIZES)), self._segments("overlap_comm"), *sizes, self._nvme_path(), self._number("gpus_per_node", [1, 2, 4, 8, 16])]
        box = W.VBox(parts)
        box.add_class("ex-group")
        box.layout.display = "none"
        button = W.Button(description=text("group.advanced"), icon="chevron-right")
        button.add_class("ex-disclosure")

        def toggle(_: Any) -> None:
            opening = box.layout.display == "none"
            box.layout.display = None if opening else "none"
            button.icon = "chevron-down" if opening else "chevron-right"
            (button.add_class if opening else button.remove_class)("ex-open")

        button.on_click(toggle)
        return [button, box]

    def _group(self, name: str, parts: Sequence[W.Widget]) -> W.Widget:
        box = W.VBox([W.HTML(f"<h2>{escape(text(f'group.{name}'))}</h2>"), *parts])
        box.add_class("ex-group")
        return box

    # -- one builder a kind -----------------------------------------------------------------------------------------

    def _bind(self, name: str, widget: W.Widget) -> W.Widget:
        """Join a widget's value to the state's trait, both ways, and put its notice under it."""
        widget.tooltip = text(f"control.{name}")
        widget.value = getattr(self.state, name)
        widget.observe(lambda change: setattr(self.state, name, change["new"]), "value")
        self.state.observe(lambda change: setattr(widget, "value", change["new"]), name)
        return self._with_notice(name, widget)

    def _with_notice(self, name: str, widget: W.Widget) -> W.Widget:
        notice = self._notices[name] = W.HTML()
        notice.add_class("ex-notice-box")
        notice.layout.display = "none"
        self.by_name[name] = widget
        box = W.VBox([widget, notice])
        box.add_class("ex-field")
        return box

    def _segments(self, name: str) -> W.Widget:
        options = [(text(f"option.{o}") if f"option.{o}" in _texts() else o, o) for o in fields.FIELDS[name].options]
        widget = W.RadioButtons(options=options, description=text(f"control.{name}"))
        widget.add_class("ex-segments")
        return self._bind(name, widget)

    def _dropdown(self, name: str) -> W.Widget:
        return self._bind(name, W.Dropdown(options=fields.FIELDS[name].options, description=text(f"control.{name}")))

    def _switch(self, name: str) -> W.Widget:
        widget = W.Checkbox(description=text(f"control.{name}"), indent=False)
        widget.add_class("ex-switch")
        return self._bind(name, widget)

    def _model(self) -> W.Widget:
        from explorer.catalog import models

        options = [(_model_label(m), m.name) for m in models()] + [(text("control.model.custom"), fields.CUSTOM)]
        return self._bind("model", W.Dropdown(options=options, description=text("control.model")))

    def _card(self) -> W.Widget:
        from explorer.catalog import cards

        options = [(text("control.gpu.option", name=c.name, gib=f"{gib(c.total_bytes):.1f}"), c.name) for c in cards()] + [(text("control.gpu.none"), fields.NO_CARD)]
        return self._bind("gpu", W.Dropdown(options=options, description=text("control.gpu")))

    def _config_text(self) -> W.Widget:
        widget = W.Textarea(description=text("control.config_text"), placeholder=text("control.config_text.placeholder"), rows=6)
        widget.add_class("ex-paste")
        box = self._bind("config_text", widget)
        box.add_class("ex-config")
        self._show_when(box, "model", lambda model: model == fields.CUSTOM)
        return box

    def _nvme_path(self) -> W.Widget:
        box = self._bind("nvme_path", W.Text(description=text("control.nvme_path"), placeholder="/local_nvme"))
        return box

    def _show_when(self, box: W.Widget, name: str, shown: Any) -> None:
        def follow(_: Any = None) -> None:
            box.layout.display = None if shown(getattr(self.state, name)) else "none"

        self.state.observe(follow, name)
        follow()

    def _number(self, name: str, stops: list[int] | None = None) -> W.Widget:
        widget = Number(label=text(f"control.{name}"), ladder=stops or [], placeholder=fields.written(_DEFAULTS.get(name)))
        self.by_name[name] = widget

        def from_state(_: Any = None) -> None:
            value = getattr(self.state, name)
            if _as_count(widget.value) != value:
                widget.value = fields.written(value) if isinstance(value, int) else value or ""

        widget.observe(lambda change: setattr(self.state, name, _as_count(change["new"])), "value")
        self.state.observe(from_state, name)
        from_state()
        return widget

    # -- what follows the state ---------------------------------------------------------------------------------------

    def _show_lengths(self) -> None:
        lengths, model = self.state.lengths, self.state.shown_model
        if lengths is None or model is None:
            return
        for name in ("sequence", "target_sequence", "image_size"):
            widget = self.by_name[name]
            widget.layout.display = None if name in model.axes else "none"
            if name in model.axes:
                widget.ladder = _length_stops(name, model)
                widget.placeholder = fields.written(getattr(model, f"default_{name}") or getattr(lengths, name))

    def _show_problem(self) -> None:
        wrong, sentence = self._problem()
        for name, widget in self.by_name.items():
            off, reason = self._off(name)
            off = off and name != wrong  # what is wrong must stay within reach
            shown = sentence if name == wrong else reason
            if isinstance(widget, Number):
                widget.notice, widget.wrong, widget.disabled = shown, name == wrong, off
                continue
            notice = self._notices[name]
            notice.value = f'<p class="ex-notice" role="status">{escape(shown)}</p>' if shown else ""
            notice.layout.display = None if shown else "none"
            (widget.add_class if name == wrong else widget.remove_class)("ex-wrong")
            if hasattr(widget, "disabled"):
                widget.disabled = off

    def _problem(self) -> tuple[str, str]:
        if self.state.problem is None:
            return "", ""
        field, sentence = self.state.problem
        name = control_of(field)
        if name == "model" and self.state.model == fields.CUSTOM:
            name = "config_text"
        spoken = text("spoken.config_text") if name == "config_text" else text(f"control.{name}") if field in fields.FIELDS else field.removeprefix("deepspeed.")
        return name, complaint(spoken, sentence)

    def _off(self, name: str) -> tuple[bool, str]:
        """(whether DeepSpeed would ignore this control now, the reason to show under it)."""
        stage = self.state.stage
        if name in ("offload_param", "offload_optimizer") and not fields.offload_reaches(name, stage):
            return True, text(f"reason.{name}")
        if name in _STAGE3 and stage != "3":
            return True, text("reason.stage3") if name == _STAGE3[0] else ""
        return False, ""


def control_of(field: str) -> str:
    """The control that a BadInput's field is about; "" where none is."""
    parts = field.removeprefix("deepspeed.").removeprefix("zero_optimization.").split(".")
    known = {"fp16": "precision", "bf16": "precision", "capacity_gib": "gpu"}
    name = known.get(parts[0], parts[0])
    return name if name in fields.FIELDS else ""


def _texts() -> dict[str, str]:
    from explorer.ui.texts import ENGLISH

    return ENGLISH


def _as_count(typed: str) -> int | str | None:
    """The number that a text is, the text itself where it is none, None where it is empty."""
    if not typed.strip():
        return None
    try:
        return fields.count(typed, "", -(1 << 62))
    except BadInput:
        return typed


def _model_label(model: Any) -> str:
    return f"{model.name} · {_millions(model.parameters)}" if model.parameters else model.name


def _millions(n: int) -> str:
    return f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.0f} M"


def _length_stops(name: str, model: Any) -> list[int]:
    if name == "image_size":
        patch = model.patch_size or 32
        default = model.default_image_size or 224
        step = patch * max(1, round(default / 8 / patch))
        return sorted({n for n in range(step, 2 * default + 1, step)} | {default})
    limit = getattr(model, f"{name}_limit") or 131_072
    return doublings(16, limit) if limit > 16 else [limit]
