"""Results that are kept: one small JSON file each, written atomically; those measured on an H200 ship with the package."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from explorer.errors import BadInput
from explorer.jsonfile import read_json
from explorer.profile import Profile
from explorer.setup import Setup

SCHEMA = 1
SHIPPED = Path(__file__).parent.parent / "records"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One measured job."""

    setup: Setup
    profile: Profile
    recorded_at: str
    """ISO 8601, UTC."""
    path: Path | None = None
    shipped: bool = False


def folder() -> Path:
    """The user's records."""
    override = os.environ.get("EXPLORER_DATA")
    base = Path(override) if override else Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share")) / "deepspeed-memory-explorer"
    return base / "records"


def to_json(setup: Setup, profile: Profile, recorded_at: str) -> dict:
    """A record's content."""
    return {"schema": SCHEMA, "kind": "record", "recorded_at": recorded_at, "setup": setup.to_job(), "profile": profile.to_record()}


def save(setup: Setup, profile: Profile) -> Path:
    """Write a record; a later one of the same setup takes its place."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    path = folder() / f"{digest(setup)}.json"
    _write(path, to_json(setup, profile, now))
    return path


def _write(path: Path, content: dict) -> None:
    """The whole file or none: it appears under its name once it is complete. What writers left that were killed is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for part in path.parent.glob("*.part"):
        pid = part.stem.rpartition(".")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            part.unlink(missing_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(content), encoding="utf-8")
    part.replace(path)


def load(path: str | Path) -> Record:
    """The record in a file. Raises BadInput in one sentence for a broken, foreign or newer one."""
    path = Path(path)
    data = read_json(path, "record")
    if not isinstance(data, dict) or data.get("kind") != "record":
        raise BadInput("record", f"{path.name} is not a record of this program")
    if data.get("schema") != SCHEMA:
        raise BadInput("record", f"{path.name} was written by a newer version (schema {data.get('schema')}); this one reads schema {SCHEMA}")
    try:
        setup, profile = Setup.from_job(data["setup"]), Profile.from_json(data["profile"])
        return Record(setup=setup, profile=profile, recorded_at=str(data["recorded_at"]), path=path, shipped=path.parent == SHIPPED)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise BadInput("record", f"{path.name} is damaged or not a record of this program") from None


def digest(setup: Setup) -> str:
    """One name for setups that are the same to measure: which card's limit and which host are asked for is part of it."""
    return setup.digest


def find(setup: Setup) -> Record | None:
    """The user's record of this setup, else the shipped one."""
    for record in all():
        if record.setup == setup:
            return record
    return None


def all() -> list[Record]:  # noqa: A001 (records.all() reads as it should)
    """Every readable record, the user's before the shipped ones, newest first."""
    own = sorted(_readable(folder()), key=lambda r: r.recorded_at, reverse=True)
    return own + list(_shipped())


@lru_cache(maxsize=1)
def _shipped() -> tuple[Record, ...]:
    return tuple(sorted(_readable(SHIPPED), key=lambda r: r.path.name))


def _readable(where: Path) -> Iterator[Record]:
    for path in where.glob("*.json") if where.is_dir() else ():
        try:
            yield load(path)
        except BadInput:
            continue
