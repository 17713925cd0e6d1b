"""Vega-Lite views that take new rows without being rebuilt, and need no network.

Vega (900 kB) reaches a page once, in the invisible `VegaRuntime`; each `LiveChart` waits for it there. The bundle and the specs are made once
per version, by vl-convert and Altair, into a cache on disk, so that a kernel pays for neither import.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anywidget
import traitlets as T

from explorer.ui.visit import quick_jsonschema

STATIC = Path(__file__).parent / "static"


def script(name: str) -> str:
    """A widget's script, after what it shares with others: a widget's module cannot import another."""
    return "".join((STATIC / file).read_text(encoding="utf-8") for file in ("browser.js", name))


def cache_folder() -> Path:
    """Where this user's built parts lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspeed-memory-explorer"


def cached(name: str, key: str, suffix: str, build: Callable[[], str]) -> str:
    """The text built for this key, from the cache or now. A cache that cannot be written costs time, not the page."""
    path = cache_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}{suffix}"
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        pass
    built = build()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(built, encoding="utf-8")
        part.replace(path)
    except OSError:
        pass
    return built


def vega_bundle() -> str:
    """Vega, Vega-Lite and vega-embed in one module (vl-convert, 1.3 s the first time)."""
    glue = (STATIC / "vega.js").read_text(encoding="utf-8")

    def build() -> str:
        import vl_convert

        return vl_convert.javascript_bundle(glue)

    return cached("vega", _version("vl-convert-python") + glue, ".js", build)


def spec(name: str) -> dict[str, Any]:
    """The Vega-Lite spec that `charts.<name>` draws, with its rows left to the page (Altair, 1.5 s the first time)."""
    here = Path(__file__).parent
    key = _version("altair") + "".join((here / part).read_text(encoding="utf-8") for part in ("charts.py", "texts.py"))

    def build() -> str:
        with quick_jsonschema():
            import altair as alt

        from explorer.ui import charts

        made = getattr(charts, name)(alt.NamedData("rows")).to_dict()
        made.get("datasets", {}).pop("rows", None)
        return json.dumps(made)

    return json.loads(cached(f"spec-{name}", key, ".json", build))


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def columns(rows: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns: half the bytes on the wire."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


class VegaRuntime(anywidget.AnyWidget):
    """Brings Vega to the page. Shows nothing."""

    _esm = T.Unicode().tag(sync=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(_esm=vega_bundle(), **kwargs)


class LiveChart(anywidget.AnyWidget):
    """One Vega-Lite spec whose data set `rows` follows `show(rows)`."""

    _esm = STATIC / "chart.js"
    spec = T.Dict().tag(sync=True)
    columns = T.Dict().tag(sync=True)
    description = T.Unicode("").tag(sync=True)
    """What a screen reader says of the whole chart; each bar has its own label."""
    version = T.Int(0).tag(sync=True)
    """Counts the shows, so that a test knows which one it sees."""

    def show(self, rows: Iterable[dict[str, Any]], description: str = "") -> None:
        """Draw these rows."""
        made = columns(rows)
        if made == self.columns and description == self.description:
            return
        with self.hold_sync():
            self.version += 1
            self.columns, self.description = made, description
