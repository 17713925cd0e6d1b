"""`python -m explorer check`: a consultation of files, and how it reads in a terminal. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from explorer.advice import largest, oom
from explorer.advice.consultation import Consultation, consult
from explorer.advice.message import Message
from explorer.advice.remarks import Remark
from explorer.dsconfig import Finding, flags
from explorer.dsconfig.read import Pasted, form_of, read
from explorer.errors import BadInput, CouldNotRun, one_line
from explorer.estimator import tapes
from explorer.jsonfile import LARGEST_BYTES, decode_json, read_bytes
from explorer.measure.runner import probe
from explorer.setup import Setup
from explorer.units import human


def check(config: str | None, trainer: str | None, message: str | None, job: str | None, on_progress: tapes.Progress | None = None, options: Mapping[str, Any] | None = None) -> Consultation:
    """The consultation of up to four files, "-" for standard input; of all that stands there where no file is named.
    One that cannot be read, or holds nothing of its kind, is in `error`, whose field is the option's name.

    `options`: flags as they were typed (dsconfig/flags.py), which fill in what the files do not say.
    """
    said = Message(kind="none")
    try:
        typed = flags.read(options or {})
        given = [path for path in (config, trainer, message, job) if path is not None]
        whole = None if given else _pasted_whole()
        if not given and whole is None and "model" not in typed:
            raise BadInput("", "nothing to check; name a --config, a --trainer, an --oom or a --job file, or send a text to standard input")
        if given.count(_STDIN) > 1:
            raise BadInput("", "standard input can be one of the files only; name the others")
        if whole is not None:
            pasted, said = read(whole), oom.read(whole)
            return consult(None, _completed(pasted, typed, {}), said, on_progress)
        said = said if message is None else _message(message)
        pasted = _together(_read(config, "config", "DeepSpeed config"), _read(trainer, "trainer", "TrainingArguments"))
        written = {} if job is None else decode_json(_content(job, "job"), "job", _name(job))
        if _is_config(written):
            pasted, job, written = _together(_config(written), pasted), None, {}
        base = None if job is None else Setup.from_job(written)
        pasted = pasted.beside_config() if base is not None and base.deepspeed else pasted
        pasted = _completed(pasted, typed, written)
    except BadInput as refused:
        return Consultation(message=said, pasted=Pasted(changes={}), remarks=(Remark(id="refused", severity="problem", key=refused.field, text=f"{refused}"),), error=refused)
    return consult(base, pasted, said, on_progress, batch_known=job is not None, gpus_known="world_size" in written)


def _is_config(value: Any) -> bool:
    """Whether what was given as a job is a DeepSpeed config."""
    return isinstance(value, dict) and "model" not in value and form_of(value) == "DeepSpeed config"


def _config(value: dict[str, Any]) -> Pasted:
    return read(json.dumps(value), "DeepSpeed config")


def _completed(pasted: Pasted, typed: Mapping[str, Any], job: Any) -> Pasted:
    """With the flags' fields, but for those that the job file has."""
    if not typed:
        return pasted
    known = {**(job if isinstance(job, dict) else {}), **pasted.changes}
    alone = not known.keys() & {"model", "micro_batch", "deepspeed", "trainer"}
    filled = flags.fill(known, typed, alone)
    added = {k: v for k, v in filled.job.items() if k in pasted.changes or known.get(k) != v}
    told = tuple(Finding(id="flags", key="", text=note) for note in filled.notes if not note.startswith("--micro-batch is not"))
    if alone:
        added.pop("micro_batch", None) if "micro_batch" not in typed else None
    return replace(pasted, changes=added, unread=pasted.unread + told)


def _pasted_whole() -> str | None:
    """All of standard input, where something is sent there; None from a terminal, or where nothing is."""
    try:
        if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
            return None
        text = _content(_STDIN, "text").decode("utf-8-sig", errors="replace")
    except BadInput:
        raise  # what was sent is refused, and why is said
    except (OSError, ValueError):
        return None
    return text if text.strip() else None


def _message(path: str) -> Message:
    """A log may hold what is no text; it is read around."""
    text = _content(path, "oom").decode("utf-8-sig", errors="replace")
    if not text.strip():
        raise BadInput("oom", f"{_name(path)} is empty; give the out-of-memory message, or the log it stands in")
    return oom.read(text)


def _read(path: str | None, field: str, form: str) -> Pasted:
    if path is None:
        return Pasted(changes={})
    try:
        pasted = read(_content(path, field).decode("utf-8-sig"), form)
    except UnicodeDecodeError:
        raise BadInput(field, f"{_name(path)} is not text in UTF-8; save it so and give it to --{field} again") from None
    if not pasted.forms:
        raise BadInput(field, f"{_name(path)} holds no {form}; give its JSON, or the text it stands in")
    return pasted


_STDIN = "-"


def _name(path: str) -> str:
    return "standard input" if path == _STDIN else one_line(path, 200)


def _content(path: str, field: str) -> bytes:
    """All of a file or of standard input."""
    if path != _STDIN:
        content = read_bytes(path, field)
    elif sys.stdin is None or sys.stdin.closed:
        raise BadInput(field, "standard input is closed; give a file, or send it there")
    else:
        content = sys.stdin.buffer.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise BadInput(field, f"{_name(path)} is over 1 MiB; give the part that matters")
    return content


def _together(config: Pasted, trainer: Pasted) -> Pasted:
    """The arguments beside the config: they are the Trainer's that "auto" was assumed of, and what they name is given."""
    if "deepspeed" in config.changes and not config.inferred:
        trainer = trainer.beside_config()
    elif "deepspeed" in trainer.changes and not trainer.inferred:
        config = config.beside_config()
    changes = {**config.changes, **trainer.changes}
    if "trainer" in trainer.changes:
        coercions = tuple(f for f in config.coercions if f.id != "trainer-assumed")
    else:
        coercions = config.coercions
    return Pasted(changes=changes, forms=config.forms + trainer.forms, coercions=coercions + trainer.coercions, unread=config.unread + trainer.unread, launcher=trainer.launcher or config.launcher, inferred=config.inferred or trainer.inferred, unseen=config.unseen or trainer.unseen)


def sizes(consultation: Consultation, all_of_them: bool, prove: largest.Axis | None, on_progress: tapes.Progress | None = None) -> tuple[dict[str, Any], BadInput | CouldNotRun | None]:
    """(what `--largest` and `--prove` add to the answer, null where there is no job to ask of; why nothing was proven, where nothing could be run). Nothing else is lost for it."""
    setup = consultation.setup if consultation.error is None else None
    more: dict[str, Any] = {}
    unproven: BadInput | CouldNotRun | None = None
    if all_of_them:
        more["largest"] = None if setup is None else largest.to_json(setup, on_progress)
    if prove:
        try:
            more["proof"] = _proof(setup, prove, on_progress)
        except (BadInput, CouldNotRun) as error:
            unproven = error
            more["proof"] = None if setup is None else {"axis": prove, "n": None, "holds": None, "peak_allocated_bytes": None, "beyond_peak_allocated_bytes": None, "text": f"Not run: {error}."}
    return more, unproven


def _proof(setup: Setup | None, axis: largest.Axis, on_progress: tapes.Progress | None) -> dict[str, Any]:
    if setup is None:
        raise CouldNotRun("there is no job to prove; name a --job file with a model and a batch")
    n = largest.largest(setup, axis, on_progress)
    if n is None:
        raise BadInput("gpu", "is not given, nor capacity_gib: there is nothing to be the largest for")
    if n < 1:
        raise CouldNotRun(f"no {axis} fits, so there is nothing to run")
    return largest.prove(setup, axis, n, partial(probe, on_progress=on_progress)).to_json()


_MOST_FIXES = 12


def report(consultation: Consultation, more: Mapping[str, Any]) -> str:
    """A consultation as a short text: what it is, why, what to change, and what `sizes` adds."""
    rows = [f"{r.severity:<8} {r.text}" for r in consultation.remarks]
    profile = consultation.profile
    if profile is not None:
        verdict = profile.verdict
        rows.append(f"estimate {human(profile.peak.allocated_bytes)} at the peak in {profile.peak.allocated_phase}" + (f": {verdict.answer}, {verdict.why}" if verdict.answer else ""))
    for fix in consultation.fixes[:_MOST_FIXES]:
        answer = "no help" if fix.text.startswith("Does not help") else fix.answer or "-"
        rows.append(f"{answer:<13} {fix.id}: {fix.text} Costs {fix.cost}.")
    rows += [f"largest {name.replace('_', ' ')} that fits: {value}" for name, value in (more.get("largest") or {}).items() if isinstance(value, int | str)]
    if more.get("proof"):
        rows.append(more["proof"]["text"])
    return "\n".join(rows) or "Nothing was found in it."
