"""One explorer on a free port, and the system's Chromium: for the browser tests and the benchmarks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


def chromium_path() -> str | None:
    """Where the system's Chromium is."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def chromium() -> Iterator[object]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def served(**environment: str) -> Iterator[str]:
    """The address of an explorer on a free port; ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "import sys; from explorer.ui.serve import serve; serve(sys.argv[1:])", "--no-browser", f"--port={port}"]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **environment})
        try:
            _wait(server, f"http://127.0.0.1:{port}/voila/static/voila.js", log)  # not "/": that would start a kernel
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(15)


def _wait(server: subprocess.Popen, address: str, log: object) -> None:
    for _ in range(240):
        if server.poll() is not None:
            log.seek(0)
            raise RuntimeError(f"the explorer stopped:\n{log.read()}")
        try:
            urllib.request.urlopen(address, timeout=1).close()
            return
        except OSError:
            time.sleep(0.25)
    raise RuntimeError("the explorer did not answer in a minute")
