"""Find the tape of a setup: shipped with the package, cached on disk, or recorded now by a worker."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from explorer.catalog import Card, Lengths, Model
from explorer.estimator.tape import Key, Tape
from explorer.setup import Setup

SHIPPED = Path(__file__).parent.parent / "catalog" / "tapes"
FORMAT = 4
"""Of a tape's JSON; a cached tape of another is not read."""

Progress = Callable[[str, float], None]


def key(setup: Setup, precision: str, model: Model, lengths: Lengths, card: Card | None) -> Key:
    """The key of the tape this setup needs."""
    window = model.config.get("sliding_window")
    beyond = isinstance(window, int) and model.config.get("use_sliding_window") is not False and (lengths.sequence or 0) > window
    return Key(
        model=model.key,
        dtype=precision,
        attention=setup.attention,
        generation=_generation(setup, precision, card),
        checkpointing=_checkpointing(setup),
        padding=setup.padding or lengths.pads,
        use_cache=setup.use_cache,
        trainable=setup.trainable,
        lora="" if setup.lora is None else json.dumps(setup.lora, sort_keys=True, default=dict),
        one_sample=lengths.micro_batch == 1,
        beyond_window=beyond,
    )


def _generation(setup: Setup, precision: str, card: Card | None) -> str:
    """Attention kernels differ by generation only in 16 bit, and only where attention is fused."""
    if setup.attention == "eager" or (precision == "fp32" and setup.attention == "sdpa"):
        return "any"
    return card.attention_generation if card is not None else "hopper"


def _checkpointing(setup: Setup) -> str:
    asked = setup.gradient_checkpointing
    if asked is False:
        return "none"
    return "reentrant" if asked is not True and asked.get("use_reentrant", False) else "non_reentrant"


def find(setup: Setup, wanted: Key, model: Model, on_progress: Progress | None = None) -> Tape:
    """The tape under a key. Raises CouldNotRun where it must be recorded and cannot be."""
    tape = _shipped(model.key).get(wanted.text) or _cached(wanted.text)
    return tape if tape is not None else _record(setup, wanted, model, on_progress)


@lru_cache(maxsize=64)
def _shipped(model_key: str) -> dict[str, Tape]:
    path = SHIPPED / f"{model_key}.json.gz"
    if not path.exists():
        return {}
    data = json.loads(gzip.decompress(path.read_bytes()))
    tapes = [Tape.from_json(t) for t in data["tapes"]]
    return {text: tapes[i] for text, i in data["keys"].items()}


def cache_folder() -> Path:
    """Where recorded tapes are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "deepspeed-memory-explorer" / "tapes"


def _path(text: str) -> Path:
    import hashlib

    from explorer import __version__

    return cache_folder() / f"{hashlib.sha256(f'{FORMAT} {__version__} {text}'.encode()).hexdigest()[:24]}.json.gz"


@lru_cache(maxsize=64)
def _read(path: Path, _changed: int) -> Tape | None:
    try:
        return Tape.from_json(json.loads(gzip.decompress(path.read_bytes())))
    except (OSError, ValueError, KeyError, EOFError):
        return None


def _cached(text: str) -> Tape | None:
    path = _path(text)
    return _read(path, path.stat().st_mtime_ns) if path.exists() else None


def _record(setup: Setup, wanted: Key, model: Model, on_progress: Progress | None) -> Tape:
    from dataclasses import asdict

    from explorer.measure.client import run_in_worker

    data = run_in_worker("explorer.estimator.recorder:record", {"job": setup.to_job(), "key": asdict(wanted), "factory": model.factory and model.factory[:2]}, on_progress=on_progress, timeout_s=120)
    path = _path(wanted.text)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(gzip.compress(json.dumps(data).encode(), 6))
    part.replace(path)
    return Tape.from_json(data)
