"""The page: `Explorer()` in a notebook, and what Voila serves."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import ipywidgets as W

from explorer.profile import Profile
from explorer.setup import Setup
from explorer.ui import charts, panels
from explorer.ui.background import Mailbox
from explorer.ui.controls import Controls
from explorer.ui.doctor_panel import DoctorPanel
from explorer.ui.live_chart import STATIC, LiveChart, VegaRuntime, spec
from explorer.ui.parts import Tools
from explorer.ui.records_panel import RecordsPanel
from explorer.ui.state import ExplorerState
from explorer.ui.texts import text


class Explorer(W.VBox):
    """The interactive page. `explorer.state` has a trait for every control and for what follows from them.

    `Explorer(setup)` opens on that job; `explorer.setup`, `explorer.estimate` and `explorer.measured` are what it shows.
    """

    def __init__(self, setup: Setup | None = None, *, owns_page: bool | None = None) -> None:
        self._mail = Mailbox(_running_loop())
        self.state = ExplorerState(setup, post=self._mail.post)
        self._owns_page = "VOILA_PREHEAT" in os.environ if owns_page is None else owns_page
        self._build()
        super().__init__(self._parts)
        self.add_class("ex-root")
        self.add_class("ex-page" if self._owns_page else "ex-cell")
        self._follow()

    @property
    def setup(self) -> Setup | None:
        """The job the controls say, None while one of them is wrong."""
        return self.state.setup

    @property
    def estimate(self) -> Profile | None:
        """The estimate shown."""
        return self.state.estimate

    @property
    def measured(self) -> Profile | None:
        """The measurement shown, None where this setup has none."""
        return self.state.measured.profile if self.state.measured else None

    def open_at(self, query: str) -> Explorer:
        """Show what a page address says (the part after "?"), and return self."""
        if query:
            self.state.from_query(query)
        return self

    def wait(self, timeout_s: float = 30.0) -> Explorer:
        """Block until the estimate is shown, and return self."""
        self.state.wait_estimate(timeout_s)
        self._mail.drain()
        return self

    # -- building -----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self._verdict, self._figures, self._table = W.HTML(), W.HTML(), W.HTML()
        self._origins = W.HTML()
        self._where, self._notes, self._job, self._notice, self._phase_note = W.HTML(), W.HTML(), W.HTML(), W.HTML(), W.HTML()
        self._runtime = VegaRuntime()
        self._card_chart, self._phase_chart = LiveChart(spec=spec("card_spec")), LiveChart(spec=spec("phase_spec"))
        self._tools = Tools(words={key: text(f"share.{key}") for key in ("link", "job", "config", "theme", "copied")}, owns_page=self._owns_page)
        self.controls = Controls(self.state)
        head = _classed(W.HBox([_classed(W.HTML(panels.head()), "ex-title"), self._tools]), "ex-head")
        picture = _classed(W.VBox([self._card_chart, self._figures]), "ex-picture")
        phases = _classed(W.VBox([W.HTML(f"<h2>{text('chart.phase.title')}</h2>"), self._phase_note, self._phase_chart]), "ex-panel")
        self.records = RecordsPanel(self.state)
        probe = self._probe()
        self.doctor = DoctorPanel(self.state, has_accelerator=self._accelerator is not None)
        details = _classed(W.VBox([probe, self.records.box, _classed(W.VBox([self._table, self._origins]), "ex-panel"), phases, _classed(self._notes, "ex-panel"), _classed(self._job, "ex-panel")]), "ex-details")
        style = _classed(W.HTML(f"<style>{(STATIC / 'style.css').read_text(encoding='utf-8')}</style>"), "ex-unseen")
        self._parts = (style, _classed(self._runtime, "ex-unseen"), head, _classed(W.VBox([self._notice, self._verdict]), "ex-verdict"), picture, self.doctor.view, self.controls.box, details)

    def _probe(self) -> W.Widget:
        from explorer.measure.runner import accelerator

        self._accelerator = accelerator()
        self._run = _classed(W.Button(description=text("probe.run"), button_style="primary"), "ex-run")
        self._cancel = _classed(W.Button(description=text("probe.cancel")), "ex-cancel")
        self._probe_words = W.HTML()
        self._run.on_click(lambda _: self.state.run_probe())
        self._cancel.on_click(lambda _: self.state.cancel_probe())
        buttons = _classed(W.HBox([self._run, self._cancel]), "ex-buttons")
        return _classed(W.VBox([W.HTML(f"<h2>{text('probe.title')}</h2>"), buttons, self._probe_words, self._where]), "ex-panel")

    # -- following the state --------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        state = self.state
        state.observe(lambda _: self._show_estimate(), ["estimate", "measured", "comparison"])
        state.observe(lambda _: self._show_verdict(), ["problem", "obstacle", "busy", "estimate", "stale"])
        state.observe(lambda _: self._show_figures(), ["estimate", "measured", "largest", "largest_known"])
        state.observe(lambda _: self._show_origins(), "sources")
        state.observe(lambda _: self._show_probe(), ["probe_status", "probe_obstacle", "setup", "measured"])
        state.observe(lambda _: self._show_job(), ["setup", "query"])
        state.observe(lambda _: self._show_notice(), "notices")
        for show in (self._show_estimate, self._show_verdict, self._show_figures, self._show_probe, self._show_job, self._show_notice):
            show()

    def _show_estimate(self) -> None:
        estimated, measured = self.estimate, self.measured
        setup = self.state.setup
        card = setup.gpu if setup and setup.capacity_gib is None else None
        self._card_chart.show(charts.card_rows(estimated, measured, card=card), text("chart.card.alt"))
        self._phase_chart.show(charts.phase_rows(estimated, measured), text("chart.phase.alt"))
        self._phase_note.value = f'<p class="ex-dim">{text("chart.phase.note.both" if measured else "chart.phase.note")}</p>'
        self._table.value = panels.breakdown(estimated, measured)
        self._where.value = panels.measurement(self.state)
        self._notes.value = panels.notes(estimated, measured)

    def _show_verdict(self) -> None:
        if self.state.stale and not (self.state.problem or self.state.obstacle or self.state.busy) and self.state.estimate is not None:
            return  # the next estimate is a few milliseconds away; the sentence changes then
        self._verdict.value = panels.verdict(self.state)

    def _show_figures(self) -> None:
        self._figures.value = panels.figures(self.state)

    def _show_origins(self) -> None:
        self._origins.value = panels.origins(self.state.sources)

    def _show_probe(self) -> None:
        state = self.state
        running = state.probe_status.state == "running"
        self._run.disabled = running or state.setup is None or bool(state.probe_obstacle) or self._accelerator is None
        self._run.description = text("probe.again" if state.measured else "probe.run")
        self._cancel.layout.display = None if running else "none"
        self._probe_words.value = panels.probe_words(state, self._accelerator)

    def _show_job(self) -> None:
        setup = self.state.setup
        self._tools.query = self.state.query
        if setup is None:
            return
        job = json.dumps(setup.to_job(), indent=2)
        with self._tools.hold_sync():
            self._tools.job, self._tools.config = job, _deepspeed_config(setup)
        self._job.value = panels.job_file(job, setup.digest)

    def _show_notice(self) -> None:
        self._notice.value = panels.notice(self.state.notices)


def _classed(widget: Any, name: str) -> Any:
    widget.add_class(name)
    return widget


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """The kernel's loop; None in a plain Python process."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _deepspeed_config(setup: Setup) -> str:
    from explorer.dsconfig import resolve

    return json.dumps(dict(resolve(setup).config), indent=2)
