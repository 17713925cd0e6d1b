"""A process that does not outlive the one that started it. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import signal

_DIE_WITH_PARENT = 1
"""Linux's PR_SET_PDEATHSIG."""


def die_with_parent() -> None:
    """Be killed when the process that started this one ends, however it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
