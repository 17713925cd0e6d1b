"""One explorer for the session, and a page of it that writes down everything that went wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.server import served

TINY = """{
  "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
  "vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4
}"""
"""A model small enough for a real step on any CPU."""


@pytest.fixture(scope="session")
def explorer_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an explorer with records of its own."""
    with served(EXPLORER_DATA=str(tmp_path_factory.mktemp("browser-data")), EXPLORER_LOCKS=str(tmp_path_factory.mktemp("browser-locks"))) as base:
        yield base


@pytest.fixture
def open_page(page, explorer_server):
    """`open_page(query="")`: the page, ready for use; `page.problems` has page errors and requests that left the machine."""
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(f"error: {error}"))
    page.on("request", lambda request: request.url.startswith((explorer_server, "data:", "blob:", "ws:")) or page.problems.append(f"outside: {request.url}"))
    page.set_viewport_size({"width": 1280, "height": 900})
    page.set_default_timeout(30_000)

    def opened(query: str = "", chart: bool = True):
        page.goto(f"{explorer_server}/?{query}" if query else explorer_server)
        page.locator(".vega-embed svg path[aria-label*='Estimated']" if chart else ".ex-sentence").first.wait_for(timeout=180_000, state="attached")
        return page

    yield opened
    assert page.problems == []
