"""A real step run beside the page: one at a time, in a thread that follows it. No widgets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import traitlets as T

from explorer.profile import Profile
from explorer.setup import Setup
from explorer.ui.background import Post
from explorer.ui.texts import in_words


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeStatus:
    """Where the probe stands."""

    state: Literal["idle", "running", "done", "failed", "cancelled"] = "idle"
    text: str = ""
    seconds: float = 0.0
    setup: Setup | None = None
    """What is run, or was last."""


class Probing(T.HasTraits):
    """`run` starts a step, `status` follows it, and `measured(setup, profile)` is called with what it took, before the status says that it is done."""

    status = T.Instance(ProbeStatus, args=())

    def __init__(self, post: Post, measured: Callable[[Setup, Profile], None]) -> None:
        super().__init__()
        self._post, self._measured = post, measured
        self._cancel = threading.Event()

    def run(self, setup: Setup) -> None:
        """Start a real step of this setup, unless one runs."""
        if self.status.state == "running":
            return
        self._cancel = threading.Event()
        self.status = ProbeStatus(state="running", setup=setup)
        threading.Thread(target=self._probe, args=(setup, self._cancel), name="probe", daemon=True).start()

    def cancel(self) -> None:
        """End the running step."""
        self._cancel.set()

    def _probe(self, setup: Setup, cancel: threading.Event) -> None:
        from explorer.measure.runner import probe

        begun, ended = time.monotonic(), threading.Event()
        threading.Thread(target=self._tick, args=(begun, ended), name="probe clock", daemon=True).start()
        try:
            result: Any = probe(setup, on_progress=self._progress, cancel=cancel)
        except Exception as error:
            result = error
        ended.set()
        seconds = time.monotonic() - begun
        self._post(lambda: self._end(setup, cancel.is_set(), result, seconds))

    def _tick(self, begun: float, ended: threading.Event) -> None:
        """Count the seconds while a step runs: a child that compiles says nothing for a minute."""
        while not ended.wait(1.0):
            self._progress(None, time.monotonic() - begun)

    def _progress(self, text: str | None, seconds: float) -> None:
        self._post(lambda: self._say(text, seconds))

    def _say(self, text: str | None, seconds: float) -> None:
        now = self.status
        if now.state == "running":
            self.status = replace(now, text=now.text if text is None else text, seconds=max(seconds, now.seconds))

    def _end(self, setup: Setup, cancelled: bool, result: Any, seconds: float) -> None:
        if isinstance(result, Profile):
            self._measured(setup, result)
            self.status = ProbeStatus(state="done", seconds=seconds, setup=setup)
        elif cancelled:
            self.status = ProbeStatus(state="cancelled", seconds=seconds, setup=setup)
        else:
            self.status = ProbeStatus(state="failed", text=in_words(result), seconds=seconds, setup=setup)
