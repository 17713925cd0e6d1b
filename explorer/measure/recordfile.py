"""A record as a file's content: made, and read back from whoever brings it. What is not a sound record of ours is refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from explorer.errors import BadInput, one_line, shown
from explorer.jsonfile import LARGEST_BYTES, decode_json
from explorer.profile import CATEGORIES, PHASES, Profile
from explorer.profile import SCHEMA as ANSWER_SCHEMA
from explorer.setup import SCHEMA as JOB_SCHEMA
from explorer.setup import Setup
from explorer.units import MiB

SCHEMA = 1
_STEPS = ("first", "steady")
_MOST_POINTS = 10_000
_LARGEST = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One measured job."""

    setup: Setup
    profile: Profile
    recorded_at: str
    """ISO 8601, UTC."""
    path: Path | None = None
    shipped: bool = False

    @property
    def name(self) -> str:
        """What it is called in a list; "" before it is a file."""
        return self.path.stem if self.path else ""


def to_json(setup: Setup, profile: Profile, recorded_at: str) -> dict[str, Any]:
    """A record's content."""
    return {"schema": SCHEMA, "kind": "record", "recorded_at": recorded_at, "setup": setup.to_job(), "profile": profile.to_record()}


def read(content: bytes, name: str) -> Record:
    """The record in a file's content. Raises BadInput in one sentence, beginning with the file's name, for a broken, foreign or newer one."""
    name = one_line(name, 200)
    if len(content) > LARGEST_BYTES:
        raise BadInput("record", f"{name} is too large to be a record (over 1 MiB)")
    try:
        data = decode_json(content, "record", name)
    except BadInput as error:
        said = str(error).removeprefix("record: ").removeprefix(f"{name} ")
        raise BadInput("record", f"{name} {said}" + ("; where it was cut short, copy it again" if "JSON" in said else "")) from None
    if not isinstance(data, dict) or data.get("kind") != "record":
        raise BadInput("record", f"{name} is not a record of this program; give a file that it wrote or that was downloaded from its page")
    _check_schema("", data, SCHEMA, name)
    _check_schema(" of its job", data.get("setup"), JOB_SCHEMA, name)
    _check_schema(" of its answer", data.get("profile"), ANSWER_SCHEMA, name)
    try:
        setup, profile = Setup.from_job(data["setup"]), Profile.from_json(data["profile"])
        _check(profile)
        return Record(setup=setup, profile=profile, recorded_at=datetime.fromisoformat(data["recorded_at"]).isoformat(timespec="seconds"))
    except BadInput as error:
        raise BadInput("record", f"{name} is damaged, or its job is one of a newer version: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError):
        raise BadInput("record", f"{name} is damaged or not a record of this program; copy it again from where it was made") from None


def _check_schema(part: str, data: Any, known: int, name: str) -> None:
    """A newer form may have what this version would pass over, so it is refused; an absent one is 1, as in a job."""
    schema = data.get("schema", known) if isinstance(data, dict) else known
    if type(schema) is not int or schema < 1:
        raise BadInput("record", f"{name} is damaged: the schema{part} is {shown(schema)}; copy it again from where it was made")
    if schema > known:
        raise BadInput("record", f"{name} was written by a newer version (schema {shown(schema)}{part}); this one reads schema {known}; update this one")


def _check(profile: Profile) -> None:
    """Everything that a page or a table takes for granted. ValueError or TypeError where it is not so."""
    peak, verdict = profile.peak, profile.verdict
    _among(("measured",), profile.source)
    _among((None, "cuda", "cpu"), profile.measured_on)
    _among((None, "fits", "tight", "does not fit"), verdict.answer)
    _among(PHASES, peak.allocated_phase, peak.reserved_phase, *([verdict.failure.phase] if verdict.failure else []))
    _among(_STEPS, peak.allocated_step, peak.reserved_step, *profile.steps, *([verdict.failure.step] if verdict.failure else []))
    _counts(profile.parameters, profile.trainable_parameters, profile.outside_pytorch_bytes, peak.allocated_bytes, peak.reserved_bytes, *asdict(profile.host).values())
    _counts(*(n for n in (verdict.capacity_bytes, profile.largest_micro_batch, profile.warmup_steps, verdict.failure and verdict.failure.requested_bytes) if n is not None))
    _integers([] if verdict.headroom_bytes is None else [verdict.headroom_bytes])
    for phases in profile.steps.values():
        for phase in phases:
            _among(PHASES, phase.phase)
            _counts(phase.end_allocated_bytes, phase.peak_allocated_bytes, phase.peak_reserved_bytes)
            _categories(phase.at_peak)
    _categories(profile.at_peak)
    if abs(sum(profile.at_peak.values()) - peak.allocated_bytes) > MiB:
        raise ValueError("categories that do not add up")
    if max(len(profile.timeline), len(profile.timeline_phases)) > _MOST_POINTS:
        raise ValueError("a timeline too long to draw")
    _texts([*profile.notes, verdict.why, *([verdict.failure.text] if verdict.failure else []), *profile.provenance.values(), *(v for v in profile.environment.values() if v is not None)])


def _among(known: Iterable[Any], *values: Any) -> None:
    if not all(value in tuple(known) for value in values):
        raise ValueError("a word that is none of those known")


def _integers(values: Iterable[Any]) -> None:
    if not all(isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST for value in values):
        raise TypeError("a size that is no whole number, or none of a memory")


def _counts(*values: Any) -> None:
    _integers(values)
    if min(values, default=0) < 0:
        raise ValueError("a size below zero")


def _categories(sizes: Mapping[str, Any]) -> None:
    """`unexplained` is what is left, and may be below zero."""
    _among(CATEGORIES, *sizes)
    _integers(sizes.values())


def _texts(values: Iterable[Any]) -> None:
    if not all(isinstance(value, str) for value in values):
        raise TypeError("a note that is no text")
