"""Host memory of this process over a run. No torch."""

from __future__ import annotations

import os
import threading


class HostWatch:
    """Resident memory of this process over the run, less what it had before the model."""

    def __init__(self) -> None:
        self.base = self.peak = self.last = 0
        self._stop = threading.Event()

    def start(self) -> None:
        """Watch from here, every 50 ms."""
        self.base = self._resident()
        threading.Thread(target=self._watch, daemon=True).start()

    def look(self) -> int:
        """Resident bytes now, beyond the base."""
        now = self._resident()
        self.peak = max(self.peak, now)
        return max(0, now - self.base)

    def finish(self) -> None:
        """The run is over. What comes after, PyTorch's history read into Python say, is the probe's own and no part of the job."""
        if not self._stop.is_set():
            self.last = self.look()
            self._stop.set()

    @property
    def most(self) -> int:
        """The highest reading so far, beyond the base."""
        return max(0, self.peak - self.base)

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.look()

    @staticmethod
    def _resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
