"""A job as people bring it to `estimate`: a job file, a DeepSpeed JSON or a recipe in its place, flags, or several of these. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from explorer.dsconfig import flags, tools
from explorer.dsconfig.arguments import NAMES
from explorer.dsconfig.assumed import assumed
from explorer.dsconfig.findings import Finding
from explorer.dsconfig.read import Pasted, form_of, read
from explorer.errors import BadInput
from explorer.jsonfile import LARGEST_BYTES, decode_json
from explorer.setup import Setup


class Job(NamedTuple):
    """A Setup and what was assumed on the way to it."""

    setup: Setup
    notes: tuple[str, ...] = ()
    world_known: bool = True
    """Whether anybody said how many GPUs there are."""


def of_flags(given: Mapping[str, Any]) -> Job:
    """The job of flags alone. Raises BadInput naming the flag."""
    if "model" not in given:
        raise BadInput("--model", "is missing; name a model, such as --model Qwen/Qwen2.5-7B, or a job file")
    return _whole({}, given, (), alone=True)


def of_file(content: bytes, given: Mapping[str, Any], name: str) -> Job:
    """The job of a file's content, which flags complete. Raises BadInput naming the field."""
    value = _value(content, name)
    if isinstance(value, Pasted):
        return _recipe(value, given, name)
    form = _form(value) if isinstance(value, dict) else ""
    if form:
        return _recipe(read(content.decode("utf-8-sig"), form), given, name)
    if not given or not isinstance(value, dict):
        return Job(Setup.from_job(value))
    filled = flags.fill(value, given, alone=False)
    return Job(Setup.from_job(filled.job), filled.notes)


_OF_A_JOB = frozenset(field.name for field in fields(Setup)) | {"schema"}


def _form(value: dict[str, Any]) -> str:
    """What stands in the place of a job file: "DeepSpeed config", "TrainingArguments"; "" for a job file."""
    form = form_of(value)
    if form == "DeepSpeed config" and "model" not in value:
        return form
    arguments = form == "TrainingArguments" and "micro_batch" not in value and value.keys() & (NAMES - _OF_A_JOB)
    return "TrainingArguments" if arguments or tools.of_arguments(value) is not None else ""


def _value(content: bytes, name: str) -> Any:
    """The JSON's value; what was read of a text that is none, a YAML recipe say."""
    try:
        return decode_json(content, "job", name)
    except BadInput:
        text = content.decode("utf-8-sig", errors="replace")
        if len(content) > LARGEST_BYTES or text.lstrip()[:1] in ("", "{", "["):
            raise
        pasted = read(text)
        if not pasted.forms:
            raise
        return pasted


def _recipe(pasted: Pasted, given: Mapping[str, Any], name: str) -> Job:
    if "model" not in pasted.changes and "model" not in given:
        raise BadInput("model", f"is missing: {name} is a {pasted.forms[0]}; add the model, such as --model Qwen/Qwen2.5-7B --micro-batch 4, or make a job file with it")
    return _whole(pasted.complete(), given, (*pasted.coercions, *pasted.unread), alone=False)


def _whole(changes: Mapping[str, Any], given: Mapping[str, Any], told: tuple[Finding, ...], alone: bool) -> Job:
    filled = flags.fill(changes, given, alone)
    setup = Setup.from_job({"micro_batch": 1, **filled.job})
    said = [f"{f.key} {f.text}".strip() for f in (*told, *assumed(setup, filled.job)) if f.id != "gpus-assumed"]
    return Job(setup, (*filled.notes, *said), "world_size" in filled.job)
