from __future__ import annotations

import pytest

from tests.cases.shell import Shell


@pytest.fixture
def shell(tmp_path, capsys, monkeypatch) -> Shell:
    return Shell(tmp_path, capsys, monkeypatch)
