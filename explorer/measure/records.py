"""Results that are kept: one small JSON file each, written atomically; those measured on an H200 ship with the package."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from explorer.errors import BadInput, CouldNotRun, nearest, one_line, shown
from explorer.jsonfile import read_bytes
from explorer.measure.recordfile import Record, read, to_json
from explorer.profile import Profile
from explorer.setup import Setup

__all__ = ["SHIPPED", "Record", "all", "content", "find", "folder", "get", "keep", "load", "remove", "save", "to_json", "unreadable"]

SHIPPED = Path(__file__).parent.parent / "records"


def folder() -> Path:
    """The user's records."""
    override = os.environ.get("EXPLORER_DATA")
    base = Path(override) if override else Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share")) / "deepspeed-memory-explorer"
    return base / "records"


# -- writing --------------------------------------------------------------------------------------------------------------


def save(setup: Setup, profile: Profile) -> Path:
    """Write a record; a later one of the same setup takes its place."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    path = folder() / f"{digest(setup)}.json"
    _write(path, json.dumps(to_json(setup, profile, now)).encode())
    return path


def keep(content: bytes, name: str) -> Record:
    """Keep a record that somebody else made, given as a file's content; `name` is the file's.

    It is stored under a name of its own, so it takes no other's place, and the same content twice is one record. Raises BadInput in one
    sentence where it is no sound record, CouldNotRun where it cannot be written.
    """
    record = read(content, name)
    path = folder() / f"{digest(record.setup)}-{hashlib.sha256(content).hexdigest()[:8]}.json"
    try:
        _write(path, content)
    except OSError as error:
        raise CouldNotRun(f"{shown(name)} could not be kept: {path.parent} cannot be written to ({error.strerror}); EXPLORER_DATA names another folder") from None
    return load(path)


def remove(name: str) -> Record:
    """Remove one of the user's own records, and return what it was. Raises BadInput for one that ships."""
    record = get(name)
    if record.shipped:
        raise BadInput("record", f"{record.name} ships with the explorer and stays; only records of your own can be removed")
    try:
        record.path.unlink(missing_ok=True)
    except OSError as error:
        raise CouldNotRun(f"{record.name} could not be removed: {error.strerror}") from None
    return record


def _write(path: Path, content: bytes) -> None:
    """The whole file or none: it appears under its name once it is complete. What writers left that were killed is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for part in path.parent.glob("*.part"):
        pid = part.stem.rpartition(".")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            part.unlink(missing_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)


# -- reading --------------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Record:
    """The record in a file. Raises BadInput in one sentence for a broken, foreign or newer one."""
    path = Path(path)
    found = read(read_bytes(path, "record"), path.name)
    return Record(setup=found.setup, profile=found.profile, recorded_at=found.recorded_at, path=path, shipped=path.parent == SHIPPED)


def get(name: str) -> Record:
    """The record of that name, the user's before a shipped one. Raises BadInput where there is none."""
    known = {record.name: record for record in reversed(all())}
    if name not in known:
        raise BadInput("record", f"none is called {shown(name)}{nearest(name, known) or '; `python -m explorer records` lists them'}")
    return known[name]


def content(record: Record) -> bytes:
    """The record's file as it is. Raises BadInput where it has gone."""
    return read_bytes(record.path, "record")


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
    own = sorted(_sound(folder()), key=lambda r: r.recorded_at, reverse=True)
    return own + list(_shipped())


def unreadable() -> list[str]:
    """Why `all` leaves some of the user's files out: a sentence each, that says where the file is."""
    where = one_line(folder(), 200)
    return [f"left out of {where}: {str(found).removeprefix('record: ')}" for found in _read(folder()) if isinstance(found, BadInput)]


@lru_cache(maxsize=1)
def _shipped() -> tuple[Record, ...]:
    return tuple(sorted(_sound(SHIPPED), key=lambda r: r.path.name))


def _sound(where: Path) -> Iterator[Record]:
    return (found for found in _read(where) if isinstance(found, Record))


def _read(where: Path) -> Iterator[Record | BadInput]:
    """Each file's record, or why it is none; likewise of a folder that cannot be read."""
    try:
        paths = sorted(path for path in where.iterdir() if path.suffix == ".json")
    except (FileNotFoundError, NotADirectoryError):  # nothing was kept yet
        return
    except OSError as error:
        yield BadInput("record", f"everything, since the folder cannot be read ({error.strerror}); EXPLORER_DATA names another")
        return
    for path in paths:
        try:
            yield load(path)
        except BadInput as error:
            yield error
