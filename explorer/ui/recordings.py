"""The records as the page lists them: opened, compared, taken in, given out, removed. No widgets; files are read once the list is opened."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import traitlets as T

from explorer.errors import BadInput, CouldNotRun
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.ui import fields
from explorer.ui.background import Latest
from explorer.ui.measurements import Measured, kept_records
from explorer.ui.state import ExplorerState
from explorer.ui.texts import sentence, text
from explorer.units import human

log = logging.getLogger(__name__)

PAUSE_S = 0.05
"""Between two estimates of the list, so that the page's own are not held up by many records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One record in the list; everything as text."""

    name: str
    model: str
    words: str
    """The settings that matter, in a few words."""
    where: str
    date: str
    peak: str
    """The measured peak; "" where the run ran out of memory."""
    own: bool
    shown: bool
    """Whether the page shows this measurement now."""


class Recordings(T.HasTraits):
    """The list of records and what a person does with it."""

    listed = T.Bool(False, help="Whether the list is open; until then no file is read for it.")
    rows = T.Tuple(help="A Row for each record, the user's own before those that ship.")
    estimates = T.Dict(help="Name → how far the estimate of that record's job is from it, as text; filled one by one.")
    chosen = T.Tuple(help="Names of the records to compare, two at most.")
    comparison = T.Any(None, help="The Comparison of the two that are chosen.")
    said = T.Unicode("", help="What became of the last thing done.")
    failed = T.Bool(False, help="Whether `said` is of something that could not be done.")

    def __init__(self, state: ExplorerState) -> None:
        super().__init__()
        self.state = state
        self._estimates = Latest("estimates of the records", lambda: state.post)
        self._records: Sequence[Any] = ()
        self.observe(lambda _: self._compare(), "chosen")
        state.observe(lambda _: self._mark(), "measured")
        state.observe(lambda change: change["new"].state == "done" and self._list(), "probe_status")

    def open_list(self, is_open: bool = True) -> None:
        """Read the records and list them, say which files are left out, and begin to estimate the jobs; or stop that."""
        self.listed = is_open
        if not is_open:
            self._estimates.drop()
            return
        self._list()
        if left_out := _records().unreadable():
            more = text("records.left_out", n=len(left_out) - 1) if len(left_out) > 1 else ""
            self.failed, self.said = True, sentence(left_out[0]) + more

    # -- what a person does with a record -----------------------------------------------------------------------------

    def open(self, name: str) -> None:
        """Move the page's controls to this record's job and show its measurement."""

        def work() -> str:
            record = _records().get(name)
            self.state.show_measured(Measured.of(record))
            if self.state.problem:
                raise BadInput(*self.state.problem)
            return text("records.opened", model=_model(record.setup), date=record.recorded_at[:10])

        self._tell(work)

    def load(self, content: bytes, name: str) -> None:
        """Keep a record that a person brings as a file's content."""

        def work() -> str:
            record = _records().keep(content, name)
            self._changed()
            return text("records.loaded", model=_model(record.setup), words=_words(record.setup))

        self._tell(work)

    def remove(self, name: str) -> None:
        """Remove one of the user's own records."""

        def work() -> str:
            record = _records().remove(name)
            self.chosen = tuple(n for n in self.chosen if n != name)
            self._changed()
            return text("records.removed", model=_model(record.setup), words=_words(record.setup))

        self._tell(work)

    def content(self, name: str) -> str | None:
        """The record's file as it is; None, with the reason said, where it has gone."""
        found: list[str] = []

        def work() -> str:
            found.append(_records().content(_records().get(name)).decode("utf-8-sig"))
            return ""

        self._tell(work)
        return found[0] if found else None

    def refuse(self, name: str, n_bytes: int) -> None:
        """Say that a file is too large to be a record; its content was not even asked for."""
        self.failed, self.said = True, text("records.too_large", name=name[:80], size=human(n_bytes))

    def _tell(self, work: Callable[[], str]) -> None:
        """Do it, and say what became of it."""
        try:
            said, failed = work(), False
        except (BadInput, CouldNotRun) as error:
            said, failed = sentence(str(error).removeprefix("record: ")), True
        with self.hold_trait_notifications():
            self.said, self.failed = said, failed

    def _changed(self) -> None:
        self.state.records_changed()
        self._list()

    # -- the list -------------------------------------------------------------------------------------------------------

    def _list(self) -> None:
        """Read the records; those whose estimate is not known yet get it, one after the other."""
        if not self.listed:
            return
        before = {record.name: record.profile for record in self._records}
        self._records = kept_records()
        self.estimates = {r.name: self.estimates[r.name] for r in self._records if r.name in self.estimates and before.get(r.name) == r.profile}
        self.rows = tuple(describe(record, self.state.measured) for record in self._records)
        self.chosen = tuple(name for name in self.chosen if name in {row.name for row in self.rows})
        self._estimate()

    def _mark(self) -> None:
        """Another measurement is shown, or none: the list is the same."""
        shown = self.state.measured
        self.rows = tuple(replace(row, shown=_is(record, shown)) for row, record in zip(self.rows, self._records, strict=True))

    def _compare(self) -> None:
        from explorer.measure.comparison import compare

        try:
            self.comparison = compare(*(_records().get(name) for name in self.chosen)) if len(self.chosen) == 2 else None
        except BadInput as error:
            self.comparison, self.failed, self.said = None, True, sentence(str(error))

    def _estimate(self) -> None:
        record = next((r for r in self._records if r.name not in self.estimates and _at_hand(r.setup)), None)
        if record is not None:
            self._estimates.submit(lambda: _nearness(record.profile, record.setup), lambda result: self._estimated(record.name, result), delay_s=PAUSE_S)

    def _estimated(self, name: str, result: Any) -> None:
        if isinstance(result, Exception):
            log.info("no estimate for the record %s: %s", name, result)
        self.estimates = {**self.estimates, name: "" if isinstance(result, Exception) else result}
        self._estimate()

    def wait(self, timeout_s: float = 30.0) -> None:
        """Block until every estimate is worked out (for a test)."""
        self._estimates.wait(timeout_s)


def _records() -> Any:
    from explorer.measure import records

    return records


def describe(record: Any, shown: Measured | None = None) -> Row:
    """The record in words; `shown` is the measurement on the page."""
    profile = record.profile
    where = text("records.cpu") if profile.measured_on == "cpu" else (profile.environment.get("gpu") or "GPU").removeprefix("NVIDIA ")[:40]
    asked = record.setup.gpu if record.setup.capacity_gib is None else None  # a limit says more than the card it is of
    return Row(
        name=record.name,
        model=_model(record.setup),
        words=_words(record.setup) + ("" if asked in (None, where) else f" · {text('records.card', card=asked[:40])}"),
        where=where,
        date=record.recorded_at[:10],
        peak="" if profile.verdict.failure else human(profile.peak.allocated_bytes),
        own=not record.shipped,
        shown=_is(record, shown),
    )


def _is(record: Any, shown: Measured | None) -> bool:
    """Not by its date: what the page has just measured is dated twice, here and in the file."""
    return shown is not None and shown.profile == record.profile and shown.setup == record.setup


def _model(setup: Setup) -> str:
    name = setup.model if isinstance(setup.model, str) else text("records.config", kind=setup.model.get("model_type", "config"))
    return name[:80]


def _words(setup: Setup) -> str:
    """What a person would say to tell this job from the next."""
    parts = [text("records.batch", n=setup.micro_batch)]
    try:
        values = fields.read(setup)
    except BadInput:
        return parts[0]
    parts += [f"ZeRO-{values['stage']}", values["precision"]]
    parts += [text(f"records.{name}", device=text(f"option.{values[name]}")) for name in ("offload_optimizer", "offload_param") if values[name] != "none"]
    parts += [text("records.checkpointing")] if values["gradient_checkpointing"] else []
    parts += [text("records.accumulation", n=values["gradient_accumulation_steps"])] if values["gradient_accumulation_steps"] > 1 else []
    parts += [text("records.lora")] if setup.lora is not None else []
    parts += [text("records.trainer")] if setup.trainer is not None else []
    parts += [text("records.rank", rank=setup.rank, n=setup.world_size)] if setup.world_size > 1 else []
    parts += [text("records.limit", gib=f"{setup.capacity_gib:g}")] if setup.capacity_gib is not None else []
    return " · ".join(parts)


def _at_hand(setup: Setup) -> bool:
    """Whether the model is in the catalog: its tapes ship, so an estimate takes a moment."""
    return isinstance(setup.model, str) and fields.read_model_name(setup.model) is not None


def _nearness(measured: Profile, setup: Setup) -> str:
    """How far the estimate is from the measurement; of a run that ran out of memory, whether the estimate says so too."""
    from explorer.estimator.estimate import estimate

    estimated = estimate(setup, largest=False, on_progress=lambda *_: None)
    if measured.verdict.failure:
        return text(f"answer.{estimated.verdict.answer or 'none'}")
    off = estimated.peak.allocated_bytes / max(1, measured.peak.allocated_bytes) - 1
    if abs(off) < 0.00005:
        return text("records.near" if off else "records.same")
    return f"{'+' if off > 0 else '−'}{abs(off) * 100:.2f} %"
