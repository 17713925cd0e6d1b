"""`python -m explorer check`: a consultation of files, and how it reads in a terminal. No torch."""

from __future__ import annotations

from pathlib import Path

from explorer.advice import oom
from explorer.advice.consultation import Consultation, consult
from explorer.advice.message import Message
from explorer.dsconfig.read import Pasted, read
from explorer.errors import BadInput, one_line
from explorer.estimator import tapes
from explorer.jsonfile import LARGEST_BYTES
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


_MOST_FIXES = 12


def report(consultation: Consultation) -> str:
    """A consultation as a short text: what it is, why, and what to change."""
    rows = [f"{r.severity:<8} {r.text}" for r in consultation.remarks]
    profile = consultation.profile
    if profile is not None:
        verdict = profile.verdict
        rows.append(f"estimate {human(profile.peak.allocated_bytes)} at the peak in {profile.peak.allocated_phase}" + (f": {verdict.answer}, {verdict.why}" if verdict.answer else ""))
    for fix in consultation.fixes[:_MOST_FIXES]:
        rows.append(f"{'fits' if fix.answer == 'fits' else fix.answer or '-':<13} {fix.id}: {fix.text} Costs {fix.cost}.")
    return "\n".join(rows) or "Nothing was found in it."
