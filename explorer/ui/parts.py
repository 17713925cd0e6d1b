"""The two small widgets that ipywidgets does not have: a count with a slider, and the page's tools."""

from __future__ import annotations

import anywidget
import traitlets as T

from explorer.ui.live_chart import STATIC, script


class Number(anywidget.AnyWidget):
    """A count as text, kept as typed, with a slider over `ladder`."""

    _esm = STATIC / "number.js"
    label = T.Unicode().tag(sync=True)
    value = T.Unicode().tag(sync=True)
    placeholder = T.Unicode().tag(sync=True)
    """The value that an empty field stands for."""
    ladder = T.List(T.Int()).tag(sync=True)
    """The slider's stops; fewer than two hide it."""
    unit = T.Unicode().tag(sync=True)
    notice = T.Unicode().tag(sync=True)
    wrong = T.Bool(False).tag(sync=True)
    disabled = T.Bool(False).tag(sync=True)


class Tools(anywidget.AnyWidget):
    """Copy buttons, the address that follows the page, dark and light; and names for controls that come without."""

    _esm = script("tools.js")
    words = T.Dict().tag(sync=True)
    query = T.Unicode().tag(sync=True)
    job = T.Unicode().tag(sync=True)
    config = T.Unicode().tag(sync=True)
    owns_page = T.Bool(False).tag(sync=True)
    """Whether the whole page is the explorer's (Voila), so that its address and theme are too."""
