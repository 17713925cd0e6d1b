"""Host memory of this process over a run. No torch."""

from __future__ import annotations

import os
import threading


class HostWatch:
    """Resident memory of this process over the run, less what it had before the model."""

    def __init__(self) -> None:
        self.base = self.peak = 0
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

    def finish(self) -> tuple[int, int]:
        """(resident now, most so far), beyond the base."""
        self._stop.set()
        now = self.look()
        return now, max(0, self.peak - self.base)

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.look()

    @staticmethod
    def _resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
