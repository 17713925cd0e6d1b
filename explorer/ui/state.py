"""What the page knows: one trait per control, and what follows from them. No widgets, no browser, no kernel needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import traitlets as T

from explorer.errors import BadInput
from explorer.profile import Difference, Profile, Source, difference
from explorer.setup import Setup
from explorer.ui import address, fields
from explorer.ui.background import Latest, Post
from explorer.ui.measurements import Measured, Measurements
from explorer.ui.probing import ProbeStatus, Probing
from explorer.ui.texts import in_words

log = logging.getLogger(__name__)

TYPING_PAUSE_S = 0.4
"""How long a typed name or path rests before anything looks it up."""
LARGEST_PAUSE_S = 0.3
"""How long the page rests before the largest micro-batch is sought: it takes many estimates."""


def _count(**kwargs: Any) -> T.Union:
    """A count as a number, or as typed: what was typed stays, right or wrong."""
    return T.Union([T.Int(), T.Unicode()], **kwargs)


class ExplorerState(T.HasTraits):
    """The page without its widgets. Set a control's trait; `setup`, `problem`, `estimate`, `measured` and `comparison` follow."""

    model = T.Unicode()
    config_text = T.Unicode()
    micro_batch = _count()
    sequence = _count(allow_none=True)
    target_sequence = _count(allow_none=True)
    image_size = _count(allow_none=True)
    precision = T.Unicode()
    stage = T.Unicode()
    offload_optimizer = T.Unicode()
    offload_param = T.Unicode()
    gradient_accumulation_steps = _count()
    gradient_checkpointing = T.Bool()
    attention = T.Unicode()
    optimizer = T.Unicode()
    world_size = _count()
    gpu = T.Unicode()
    reduce_bucket_size = _count(allow_none=True)
    overlap_comm = T.Unicode()
    stage3_prefetch_bucket_size = _count(allow_none=True)
    stage3_param_persistence_threshold = _count(allow_none=True)
    stage3_max_live_parameters = _count(allow_none=True)
    stage3_max_reuse_distance = _count(allow_none=True)
    sub_group_size = _count(allow_none=True)
    nvme_path = T.Unicode()
    gpus_per_node = _count()

    setup = T.Instance(Setup, allow_none=True, help="The job the controls say; None while one of them is wrong.")
    problem = T.Tuple(allow_none=True, default_value=None, help="(control or key, sentence) of the first thing that is wrong.")
    lengths = T.Any(None, help="The catalog's Lengths with the model's defaults filled, of the last right setup.")
    shown_model = T.Any(None, help="The catalog's Model that `lengths` is of.")
    estimate = T.Instance(Profile, allow_none=True, help="The last estimate; `stale` while it is not of `setup`.")
    stale = T.Bool(False)
    obstacle = T.Unicode("", help="Why there is no estimate although the input is right.")
    busy = T.Unicode("", help="What is being worked out, when that takes longer than a moment.")
    largest = T.Int(None, allow_none=True, help="The largest micro-batch that fits; None if there is none or it is not known.")
    largest_known = T.Bool(False)
    sources = T.Tuple(help="What the estimated peak is made of, each part with its origin; empty until that is worked out.")
    measured = T.Instance(Measured, allow_none=True)
    comparison = T.Instance(Difference, allow_none=True)
    probe_status = T.Instance(ProbeStatus, args=())
    probe_obstacle = T.Unicode("", help="Why this setup cannot be probed here; empty where it can.")
    notices = T.Tuple(help="Sentences about the address the page was opened with.")
    query = T.Unicode("", help="The address's query that brings this state back.")

    def __init__(self, setup: Setup | None = None, *, post: Post | None = None) -> None:
        super().__init__()
        self._post: Post = post or (lambda call: call())
        self._estimates = Latest("estimate", lambda: self._post)
        self._largests = Latest("largest micro-batch", lambda: self._post)
        self._origins = Latest("sources", lambda: self._post)
        self.measurements = Measurements()
        self._probing = Probing(self.post, self._probed)
        T.dlink((self._probing, "status"), (self, "probe_status"))
        self._stop = threading.Event()
        self._together = False
        self._base = setup or fields.default_setup()
        self.observe(self._control_changed, list(fields.FIELDS))
        self.from_setup(self._base)

    # -- controls -> setup ------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Every control's value as it stands."""
        return {name: getattr(self, name) for name in fields.FIELDS}

    def update(self, **values: Any) -> None:
        """Set several controls at once, with one new estimate."""
        with self._one_change():
            for name, value in values.items():
                setattr(self, name, value)

    def from_setup(self, setup: Setup) -> None:
        """Show this job. Raises BadInput where DeepSpeed would refuse it."""
        values = fields.read(setup)
        self._base = setup
        self.update(**values)

    def from_query(self, query: str) -> None:
        """Show what an address says; what it says wrongly is left out, with a notice."""
        setup, values, notices = address.read(query)
        try:
            start = fields.read(setup) if setup else {}
        except BadInput as error:
            setup, start, notices = None, {}, [*notices, f"The job in this address is refused: {error}"]
        self._base = setup or self._base
        self.notices = tuple(notices)
        self.update(**{**start, **values})

    def post(self, call: Callable[[], None]) -> None:
        """Run this call where traits may be set: in the kernel's loop."""
        self._post(call)

    def bookmark(self) -> Callable[[], None]:
        """What puts every control back to where it stands now."""
        base, values = self._base, self.values()

        def back() -> None:
            self._base = base
            self.update(**values)

        return back

    def to_query(self) -> str:
        """The address's query that brings this state back, without "?"."""
        return address.write(self._base, self.values(), self.setup)

    @contextmanager
    def _one_change(self) -> Iterator[None]:
        self._together = True
        try:
            yield
        finally:
            self._together = False
            self._derive()

    def _control_changed(self, change: dict[str, Any]) -> None:
        if self._together:
            return
        if change["name"] in ("model", "config_text"):
            with self._one_change():
                self.sequence = self.target_sequence = self.image_size = None
            return
        self._derive()

    def _derive(self) -> None:
        try:
            setup = fields.write(self._base, self.values())
            self._check(setup)
        except BadInput as error:
            self._refuse(error)
            return
        if setup == self.setup and not self.stale:
            self.problem = None
            return
        with self.hold_trait_notifications():  # who watches sees the change whole
            self.problem, self.setup, self.stale, self.largest_known = None, setup, True, False
            self.query = self.to_query()
            self._show_measured()
        self._start_estimate(setup)

    def _check(self, setup: Setup) -> None:
        """What can be checked in a moment: everything, for a catalog model or a config."""
        from explorer import catalog, dsconfig

        dsconfig.resolve(setup)
        if setup.gpu is not None:
            catalog.find_card(setup.gpu)
        if _known(setup):
            self._show_lengths(_lengths(setup))

    def _show_lengths(self, found: tuple[Any, Any] | None) -> None:
        if found:
            self.shown_model, self.lengths = found

    def _refuse(self, error: BadInput) -> None:
        self._estimates.drop()
        self._stop_largest()
        sentence = str(error).removeprefix(f"{error.field}: ") if error.field else str(error)
        with self.hold_trait_notifications():
            self.busy, self.obstacle = "", ""
            self.setup, self.stale, self.measured, self.comparison = None, True, None, None
            self.problem = (error.field, sentence)
            self.query = self.to_query()

    # -- the estimate -----------------------------------------------------------------------------------------------

    def wait_estimate(self, timeout_s: float = 30.0) -> None:
        """Block until the estimate is worked out (for a notebook cell or a test)."""
        self._estimates.wait(timeout_s)

    def wait_largest(self, timeout_s: float = 30.0) -> None:
        """Block until the largest micro-batch is worked out."""
        self._largests.wait(timeout_s)

    def _start_estimate(self, setup: Setup) -> None:
        from explorer.estimator.estimate import estimate

        self._stop_largest()

        def progress(text: str, seconds: float) -> None:
            self._post(lambda: self._say_busy(setup, text))

        self._estimates.submit(
            lambda: _estimated(estimate, setup, progress, self.measurements),
            lambda result: self._estimated(setup, result),
            delay_s=0.0 if _known(setup) else TYPING_PAUSE_S,
        )

    def _say_busy(self, setup: Setup, text: str) -> None:
        if self.stale and setup == self.setup:
            self.busy = text

    def _estimated(self, setup: Setup, result: Any) -> None:
        if setup != self.setup:  # overtaken while it ran
            self.estimate = self.estimate if isinstance(result, Exception) else result[0]
            return
        self.busy = ""
        if isinstance(result, BadInput):
            self._refuse(result)
            return
        if isinstance(result, Exception):
            self.obstacle = in_words(result)
            return
        profile, reason, lengths, measured = result
        with self.hold_trait_notifications():
            self.obstacle, self.stale, self.estimate = "", False, profile
            self._show_lengths(lengths)
            self.probe_obstacle, self.measured = reason, measured
            self.largest, self.largest_known = profile.largest_micro_batch, profile.largest_micro_batch is not None
            self.sources = ()
            self._compare()
        self._origins.submit(lambda: _sources(setup), lambda result: self._sources_found(setup, result), delay_s=LARGEST_PAUSE_S)
        if not self.largest_known and profile.verdict.answer is not None:
            self._start_largest(setup)

    def _start_largest(self, setup: Setup) -> None:
        from explorer.estimator.largest import largest_micro_batch

        stop = self._stop = threading.Event()
        self._largests.submit(lambda: largest_micro_batch(setup, stop=stop), lambda result: self._largest_found(setup, result), delay_s=LARGEST_PAUSE_S)

    def _sources_found(self, setup: Setup, result: Any) -> None:
        if setup == self.setup and not isinstance(result, Exception):
            self.sources = result

    def wait_sources(self, timeout_s: float = 30.0) -> None:
        """Block until the origins are worked out."""
        self._origins.wait(timeout_s)

    def _stop_largest(self) -> None:
        """Give way to the estimate: two threads would halve each other's speed."""
        self._largests.drop()
        self._origins.drop()
        self._stop.set()

    def _largest_found(self, setup: Setup, result: Any) -> None:
        if setup != self.setup:
            return
        if isinstance(result, Exception):
            log.warning("the largest micro-batch could not be found: %s", result)
            result = None
        self.largest, self.largest_known = result, True

    # -- the measurement --------------------------------------------------------------------------------------------

    def run_probe(self) -> None:
        """Start a real step of the setup shown, unless one runs. `probe_status` follows it, `measured` is its result."""
        if self.setup is not None:
            self._probing.run(self.setup)

    def cancel_probe(self) -> None:
        """End the running probe."""
        self._probing.cancel()

    def _probed(self, setup: Setup, profile: Profile) -> None:
        self.measurements.add(setup, profile)
        self._show_measured()

    def show_measured(self, measured: Measured) -> None:
        """Move every control to this measurement's job and show it. Raises BadInput where DeepSpeed would refuse the job."""
        self.measurements.put_first(measured)
        self.from_setup(measured.setup)
        self._show_measured()

    def records_changed(self) -> None:
        """Records have come or gone: what is measured of the setup shown may be another."""
        self.measurements.forget()
        self._show_measured()

    def _show_measured(self) -> None:
        known = self.setup is not None and _known(self.setup)  # a path or a hub id is looked up in the thread only
        self.measured = self.measurements.find(self.setup) if known else None
        self._compare()

    def _compare(self) -> None:
        shown = self.measured is not None and self.estimate is not None and not self.stale
        self.comparison = difference(self.measured.profile, self.estimate) if shown else None


def _known(setup: Setup) -> bool:
    """Whether the model is at hand: in the catalog, or a config; not a path or a hub id."""
    return not isinstance(setup.model, str) or fields.read_model_name(setup.model) is not None


def _estimated(estimate: Callable[..., Profile], setup: Setup, progress: Callable[[str, float], None], measurements: Measurements) -> tuple[Profile, str, Any, Measured | None]:
    """(the estimate, why no probe can run, the lengths, the measurement): all that may take more than a moment."""
    from explorer.measure.runner import why_not

    profile = estimate(setup, largest=False, on_progress=progress)
    return profile, why_not(setup) or "", None if _known(setup) else _lengths(setup), measurements.find(setup)


def _lengths(setup: Setup) -> tuple[Any, Any]:
    """(the catalog's Model, its lengths in this setup)."""
    from explorer import catalog

    model = catalog.find_model(setup.model)
    return model, catalog.lengths(setup, model)


def _sources(setup: Setup) -> tuple[Source, ...]:
    from explorer.estimator.estimate import estimate

    return estimate(setup, largest=False, sources=True).sources
