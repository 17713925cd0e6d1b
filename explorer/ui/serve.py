"""`python -m explorer dashboard`: the page, served by Voila on this machine alone.

Voila's own options all pass through, and win over ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
TEMPLATES = PACKAGE / "share" / "jupyter"
_EXTENSIONS = ["@jupyter-widgets/jupyterlab-manager", "@voila-dashboards/widgets-manager8", "anywidget"]
DEFAULTS = {
    "Voila": {"ip": "127.0.0.1", "port": 8866, "log_level": "WARN"},
    "VoilaConfiguration": {"template": "explorer", "extension_allowlist": _EXTENSIONS, "preheat_kernel": True, "default_pool_size": 1},
    "MappingKernelManager": {"cull_idle_timeout": 600, "cull_interval": 60},
}
"""A page that is left does not end its kernel (Voila issue 1458), so kernels are culled after ten idle minutes."""


def notebook() -> Path:
    """The page's notebook: in the wheel, or beside the package in a checkout. Raises FileNotFoundError."""
    for folder in (PACKAGE / "_notebooks", PACKAGE.parent / "notebooks"):
        if (folder / "explorer.ipynb").is_file():
            return folder / "explorer.ipynb"
    raise FileNotFoundError("explorer.ipynb is missing from this installation")


def serve(argv: Sequence[str] = ()) -> None:
    """Serve the page until interrupted, and print its address. `argv`: `--port=N`, `--no-browser` and any other option of Voila."""
    os.environ["JUPYTER_PATH"] = os.pathsep.join(p for p in (str(TEMPLATES), os.environ.get("JUPYTER_PATH", "")) if p)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")) if p)
    _warm()
    from traitlets.config import Config

    _application().launch_instance([str(notebook()), *argv], config=Config(DEFAULTS))


def _warm() -> None:
    """Build what kernels read from the cache, so that no visitor waits for it."""
    from explorer.ui.live_chart import spec, vega_bundle

    vega_bundle()
    for name in ("card_spec", "phase_spec"):
        spec(name)


def _application() -> type:
    """Voila, which says its address once it listens (not the one asked for: that port may be taken)."""
    from explorer.ui.visit import quick_jsonschema

    with quick_jsonschema():
        from voila.app import Voila

    class Page(Voila):
        def listen(self) -> None:
            app_listen = self.app.listen

            def listen(port: int, *args: object, **kwargs: object) -> object:
                server = app_listen(port, *args, **kwargs)
                print(f"The explorer is at http://{self.ip or 'localhost'}:{port}{self.base_url}\nStop it with Ctrl+C.", file=sys.stderr, flush=True)
                return server

            self.app.listen = listen
            super().listen()

    return Page
