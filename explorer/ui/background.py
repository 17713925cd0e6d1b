"""Work off the main thread where only the newest request counts."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]
"""Runs a function where widgets may be touched: `loop.call_soon_threadsafe` in a kernel, a plain call elsewhere."""


class Mailbox:
    """Brings calls from threads to the kernel's loop, in order; `drain` runs them at once where the loop cannot (a cell that waits)."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()

    def post(self, call: Callable[[], None]) -> None:
        """Run this call soon, in the loop's thread; here and now where there is no loop."""
        if self._loop is None or self._loop.is_closed():
            call()
            return
        self._calls.append(call)
        self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Run what has been posted and not yet run."""
        while self._calls:
            self._calls.popleft()()


class Latest:
    """One thread that runs the newest job it was given. A job overtaken before it starts never runs; one overtaken while it runs is still
    reported (a dragged slider shows something), and always before the newer one."""

    def __init__(self, name: str, post: Callable[[], Post]) -> None:
        self._name = name
        self._post = post
        self._changed = threading.Condition()
        self._job: tuple[int, Callable[[], Any], Callable[[Any], None], float] | None = None
        self._number = 0
        self._dropped = 0
        self._running = False
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None], *, delay_s: float = 0.0) -> None:
        """Run `work()` in the thread, then `done(result or exception)` through post, unless something newer came before it began."""
        with self._changed:
            self._number += 1
            self._job = (self._number, work, done, delay_s)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def drop(self) -> None:
        """Forget what waits and the report of what runs."""
        with self._changed:
            self._dropped = self._number
            self._job = None
            self._changed.notify_all()

    def wait(self, timeout_s: float = 30.0) -> bool:
        """Block until nothing waits or runs (for tests and for a notebook cell that wants the answer now)."""
        with self._changed:
            return self._changed.wait_for(lambda: self._job is None and not self._running, timeout_s)

    def _run(self) -> None:
        while True:
            number, work, done = self._take()
            try:
                result = work()
            except Exception as error:  # reported to `done`, which knows which errors are for people
                result = error
            self._post()(lambda number=number, done=done, result=result: self._report(number, done, result))
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def _take(self) -> tuple[int, Callable[[], Any], Callable[[Any], None]]:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._job is not None)
                number, work, done, delay_s = self._job
                if delay_s and self._changed.wait_for(lambda number=number: self._job is None or self._job[0] != number, delay_s):
                    continue
                self._job, self._running = None, True
                return number, work, done

    def _report(self, number: int, done: Callable[[Any], None], result: Any) -> None:
        if number <= self._dropped:
            return
        try:
            done(result)
        except Exception:
            log.exception("%s could not report", self._name)
