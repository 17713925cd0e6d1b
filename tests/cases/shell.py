"""`explorer check` and `explorer estimate` called in process, as a person has them at hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from explorer import cli


class Shell:
    """The command line; each call returns the answer, whose "code" is the exit code and "stderr" what was said there."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.capsys, self.monkeypatch = folder, capsys, monkeypatch

    def check(self, text: str = "", *options: str, **files: str) -> dict[str, Any]:
        """`check` of a text on standard input, or of files by their options' names."""
        paths = [word for name, content in files.items() for word in (f"--{name}", self.file(name, content))]
        self.monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return self.answer("check", *paths, *options)

    def estimate(self, content: str, *options: str, name: str = "job.json") -> dict[str, Any]:
        """`estimate` of a file with this content."""
        return self.answer("estimate", self.file(name, content), *options)

    def file(self, name: str, content: str) -> str:
        path = self.folder / name
        path.write_text(content, encoding="utf-8")
        return str(path)

    def answer(self, *words: str) -> dict[str, Any]:
        code = cli.main([*words, "--json"])
        out, err = self.capsys.readouterr()
        return {**json.loads(out), "code": code, "stderr": err}


def zero(answer: dict[str, Any]) -> dict[str, Any]:
    """The ZeRO section of the job as it was understood."""
    return answer["job"]["deepspeed"]["zero_optimization"]


def ids(answer: dict[str, Any]) -> list[str]:
    return [finding["id"] for finding in answer["findings"]]


def said(answer: dict[str, Any]) -> str:
    """Every finding's text."""
    return "\n".join(f"{finding['key']} {finding['text']}" for finding in answer["findings"])
