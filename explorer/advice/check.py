"""`python -m explorer check`: a consultation of files, and how it reads in a terminal. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from explorer.advice import largest, oom
from explorer.advice.consultation import Consultation, consult
from explorer.advice.message import Message
from explorer.dsconfig.read import Pasted, read
from explorer.errors import BadInput, CouldNotRun, one_line
from explorer.estimator import tapes
from explorer.jsonfile import LARGEST_BYTES
from explorer.measure.runner import probe
from explorer.setup import Setup
from explorer.units import human


def check(config: str | None, trainer: str | None, message: str | None, job: str | None, on_progress: tapes.Progress | None = None) -> Consultation:
    """The consultation of up to four files. Raises BadInput naming the one that cannot be read, or holds nothing of its kind."""
    if not (config or trainer or message or job):
        raise BadInput("", "nothing to check; name a --config, a --trainer, an --oom or a --job file")
    pasted = _together(_read(config, "config", "DeepSpeed config"), _read(trainer, "trainer", "TrainingArguments"))
    return consult(Setup.from_file(job) if job else None, pasted, oom.read(_text(message, "oom")) if message else Message(kind="none"), on_progress, batch_known=job is not None)


def _read(path: str | None, field: str, form: str) -> Pasted:
    if path is None:
        return Pasted(changes={})
    pasted = read(_text(path, field), form)
    if not pasted.forms:
        raise BadInput(field, f"{one_line(path, 200)} holds no {form}; give its JSON, or the text it stands in")
    return pasted


def _text(path: str, field: str) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise BadInput(field, f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > LARGEST_BYTES:
        raise BadInput(field, f"{path} is over 1 MiB; give the part that matters")
    return content.decode("utf-8-sig", errors="replace")


def _together(config: Pasted, trainer: Pasted) -> Pasted:
    """The arguments beside the config: they are the Trainer's that "auto" was assumed of."""
    changes = {**config.changes, **trainer.changes}
    if "trainer" in trainer.changes:
        coercions = tuple(f for f in config.coercions if f.id != "trainer-assumed")
    else:
        coercions = config.coercions
    return Pasted(changes=changes, forms=config.forms + trainer.forms, coercions=coercions + trainer.coercions, unread=config.unread + trainer.unread, launcher=trainer.launcher or config.launcher)


def sizes(consultation: Consultation, all_of_them: bool, prove: largest.Axis | None, on_progress: tapes.Progress | None = None) -> dict[str, Any]:
    """What `--largest` and `--prove` add to the answer; null where there is no job to ask of. What cannot be run is said there, and nothing else is lost for it."""
    setup = consultation.setup if consultation.error is None else None
    more: dict[str, Any] = {}
    if all_of_them:
        more["largest"] = None if setup is None else largest.to_json(setup, on_progress)
    if prove:
        more["proof"] = None if setup is None else _proof(setup, prove, on_progress)
    return more


def _proof(setup: Setup, axis: largest.Axis, on_progress: tapes.Progress | None) -> dict[str, Any]:
    try:
        n = largest.largest(setup, axis, on_progress)
        if n is None:
            raise BadInput("gpu", "is not given, nor capacity_gib: there is nothing to be the largest for")
        return largest.prove(setup, axis, n, partial(probe, on_progress=on_progress)).to_json()
    except (BadInput, CouldNotRun) as error:
        return {"axis": axis, "n": None, "holds": None, "peak_allocated_bytes": None, "beyond_peak_allocated_bytes": None, "text": f"Not run: {error}."}


_MOST_FIXES = 12


def report(consultation: Consultation, more: Mapping[str, Any]) -> str:
    """A consultation as a short text: what it is, why, what to change, and what `sizes` adds."""
    rows = [f"{r.severity:<8} {r.text}" for r in consultation.remarks]
    profile = consultation.profile
    if profile is not None:
        verdict = profile.verdict
        rows.append(f"estimate {human(profile.peak.allocated_bytes)} at the peak in {profile.peak.allocated_phase}" + (f": {verdict.answer}, {verdict.why}" if verdict.answer else ""))
    for fix in consultation.fixes[:_MOST_FIXES]:
        answer = "no help" if fix.scarce == "host" and not fix.lowers_host else fix.answer or "-"
        rows.append(f"{answer:<13} {fix.id}: {fix.text} Costs {fix.cost}.")
    rows += [f"largest {name.replace('_', ' ')} that fits: {value}" for name, value in (more.get("largest") or {}).items() if isinstance(value, int | str)]
    if more.get("proof"):
        rows.append(more["proof"]["text"])
    return "\n".join(rows) or "Nothing was found in it."
