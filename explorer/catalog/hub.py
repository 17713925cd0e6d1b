"""A hub id's config: asked of transformers in the worker, and only where an answer can be expected. Remote code is never run."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from functools import lru_cache
from pathlib import Path

from explorer.errors import BadInput, CouldNotRun, shown
from explorer.jsonfile import read_json

REACH_SECONDS = 3
WAIT_SECONDS = 40
"""The worker's start included; asking an answering hub takes one or two."""
_LONGEST = 200
_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def hub_config(name: str, way_out: str) -> str:
    """The config of a hub id, as JSON text. Raises BadInput("model", ...) ending in `way_out` where it is not to be had."""
    if len(name) > _LONGEST or not _ID.fullmatch(name):
        raise BadInput("model", f"is {shown(name)}, which is neither a catalog name, a folder with a config.json, nor a hub id; {way_out}")
    if _stored(name) is None:
        if offline():
            raise BadInput("model", f"{shown(name)} is not in the catalog, and the Hugging Face hub is switched off (HF_HUB_OFFLINE); {way_out}")
        if not _reachable(_endpoint(), int(time.monotonic() // 30)):
            raise BadInput("model", f"{shown(name)} is not in the catalog and the Hugging Face hub cannot be reached; {way_out}")
    return _asked(name, way_out)


def offline() -> bool:
    """Whether HF_HUB_OFFLINE says so, by huggingface_hub's own reading of it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def stored_config(name: str) -> str | None:
    """The config of a hub id in the hub's cache on this machine, as JSON text; None where it is not there or not sound."""
    path = _stored(name) if len(name) <= _LONGEST and _ID.fullmatch(name) else None
    try:
        config = None if path is None else read_json(path, "model")
    except BadInput:
        return None
    return json.dumps(config, sort_keys=True) if isinstance(config, dict) and "model_type" in config else None


def _stored(name: str) -> Path | None:
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / ("models--" + name.replace("/", "--"))
    return max(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime, default=None)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


@lru_cache(maxsize=4)
def _reachable(endpoint: str, half_minute: int) -> bool:
    """Whether a server answers there within REACH_SECONDS, whatever it says. Asked once in half a minute."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=REACH_SECONDS).close()
        except urllib.error.HTTPError:
            answered.set()
        except (OSError, ValueError):
            return
        answered.set()

    # In a thread of its own: looking a name up knows no time limit.
    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(REACH_SECONDS)
    return answered.is_set()


@lru_cache(maxsize=32)
def _asked(name: str, way_out: str) -> str:
    from explorer.measure.client import run_in_worker

    try:
        result = run_in_worker("explorer.workload:hub_config", {"name": name}, timeout_s=WAIT_SECONDS)
    except CouldNotRun as error:
        raise BadInput("model", f"{shown(name)} is not in the catalog, and asking the Hugging Face hub failed ({error}); {way_out}") from None
    except BadInput as error:
        raise BadInput("model", f"{str(error).removeprefix('model: ')}; {way_out}") from None
    return json.dumps(result["config"], sort_keys=True)
