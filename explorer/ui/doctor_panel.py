"""The doctor's panel: a box that takes whatever a person has, and below it what is wrong and what to change."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets as T

from explorer.ui import doctor_html
from explorer.ui.consulting import Consulting
from explorer.ui.live_chart import script
from explorer.ui.state import ExplorerState
from explorer.ui.texts import text
from explorer.units import human

_WORDS = ("title", "label", "placeholder", "out", "copy")


class DoctorView(anywidget.AnyWidget):
    """The text goes out, HTML comes in. What a person presses comes as messages {act, name}."""

    _esm = script("doctor.js")
    words = T.Dict().tag(sync=True)
    text = T.Unicode().tag(sync=True, echo_update=False)
    """What is pasted, up to 1 MiB; an echo of it would only burden the line."""
    too_large = T.Int(0).tag(sync=True)
    """Characters of a text that is not sent; 0 where it is."""
    said = T.Unicode().tag(sync=True)
    heard = T.Unicode().tag(sync=True)
    """The answer in two sentences, for who cannot see it arrive."""
    wrong = T.Bool(False).tag(sync=True)
    busy = T.Bool(False).tag(sync=True)
    reading = T.Unicode().tag(sync=True)
    advice = T.Unicode().tag(sync=True)
    more = T.Unicode().tag(sync=True)
    files = T.Unicode().tag(sync=True)
    files_open = T.Bool(False).tag(sync=True)


class DoctorPanel:
    """The panel, in `view`; what it does is `consulting`."""

    def __init__(self, state: ExplorerState, has_accelerator: bool) -> None:
        self.consulting = Consulting(state)
        self._has_accelerator = has_accelerator
        self.view = DoctorView(words={key: text(f"doctor.{key}") for key in _WORDS} | {"copied": text("share.copied")})
        self.view.on_msg(lambda _, message, __: self._act(message))
        consulting = self.consulting
        for name in ("text", "files_open"):
            self.view.observe(lambda change: setattr(consulting, change["name"], change["new"]), name)
        self.view.observe(lambda _: self._refuse(), "too_large")
        consulting.observe(lambda change: setattr(self.view, "text", change["new"]), "text")
        consulting.observe(lambda _: self._show_reading(), ["busy", "problem", "pasted", "moves", "undone"])
        consulting.observe(lambda _: self._show_advice(), ["pasted", "advice", "outdated", "in_use"])
        consulting.observe(lambda _: self._show_files(), "files")
        state.observe(lambda _: self._show_advice(), ["probe_status", "probe_obstacle", "measured"])

    def _refuse(self) -> None:
        if self.view.too_large:
            self.consulting.refuse(text("doctor.too_large", size=human(self.view.too_large)))
        elif not self.view.text:
            self.consulting.refuse("")

    def _act(self, message: dict[str, Any]) -> None:
        act, name = message.get("act"), str(message.get("name", ""))
        if act in ("use", "undo"):
            getattr(self.consulting, act)()
        elif act in ("apply", "probe"):
            getattr(self.consulting, act)(name)

    def _show_reading(self) -> None:
        view, consulting = self.view, self.consulting
        with view.hold_sync():
            view.said, view.wrong, view.busy = doctor_html.said(consulting), bool(consulting.problem), bool(consulting.busy)
            if not consulting.busy:
                view.reading = doctor_html.reading(consulting)

    def _show_advice(self) -> None:
        with self.view.hold_sync():
            self.view.advice = doctor_html.advice(self.consulting, self._has_accelerator)
            self.view.heard = doctor_html.heard(self.consulting)
            self.view.more = doctor_html.more(self.consulting)

    def _show_files(self) -> None:
        self.view.files = doctor_html.files(self.consulting.files)
