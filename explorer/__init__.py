"""Where the GPU memory goes when you train with DeepSpeed, and what to change.

    from explorer import Setup, estimate, probe, Explorer

`Setup` says what is trained and on what; `estimate(setup)` and `probe(setup)` both return a `Profile`; `Explorer()` is the
interactive page. Everything is imported when it is first used, so `import explorer` costs nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Setup": "explorer.setup",
    "BadInput": "explorer.errors",
    "CouldNotRun": "explorer.errors",
    "Profile": "explorer.profile",
    "difference": "explorer.profile",
    "estimate": "explorer.estimator.estimate",
    "probe": "explorer.measure.runner",
    "Explorer": "explorer.ui.dashboard",
}

__all__ = ["BadInput", "CouldNotRun", "Explorer", "Profile", "Setup", "difference", "estimate", "probe"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'explorer' has no attribute {name!r}")
