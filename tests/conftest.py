"""What all tests share: the package on the path, and caches and records of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(autouse=True)
def _own_records(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own measurements."""
    monkeypatch.setenv("EXPLORER_DATA", str(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict) -> dict:
    """The system's Chromium for pytest-playwright."""
    from tests.browser.server import FLAGS, chromium_path

    if chromium_path() is None:
        pytest.skip("no Chromium on this machine")
    return {**browser_type_launch_args, "executable_path": chromium_path(), "args": FLAGS}
