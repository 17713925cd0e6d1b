"""`python -m explorer records`: what was measured before: listed, compared, taken in and given out."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from explorer.dsconfig import resolve
from explorer.errors import BadInput, CouldNotRun, one_line, shown
from explorer.jsonfile import read_bytes
from explorer.measure import records
from explorer.measure.comparison import Change, Comparison, compare
from explorer.measure.records import Record
from explorer.profile import CATEGORIES
from explorer.setup import Setup
from explorer.units import human


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command; without one of the first four it lists."""
    one = command.add_mutually_exclusive_group()
    one.add_argument("--compare", nargs=2, metavar=("A", "B"), help="what B took beyond A, and what differs in their jobs; each a record's name or file")
    one.add_argument("--import", nargs="+", dest="files", metavar="FILE", help="keep records that were made elsewhere")
    one.add_argument("--export", metavar="NAME", help="print a record's file as it is")
    one.add_argument("--remove", metavar="NAME", help="remove a record of your own")
    command.add_argument("--json", action="store_true", help="one JSON object a line")


def run(options: argparse.Namespace) -> int:
    """Do what was asked; returns the exit code."""
    if options.files:
        return max(_guarded(lambda path=path: _said(records.keep(read_bytes(path, "record"), Path(path).name), options.json), options.json) for path in options.files)
    return _guarded(lambda: _answer(options), options.json)


def _guarded(work: Any, as_json: bool) -> int:
    """The work's exit code, or that of its one sentence on standard error."""
    try:
        work()
    except (BadInput, CouldNotRun) as error:
        sentence = one_line(error, 1000)
        print(f"records: {sentence.removeprefix('record: ')}", file=sys.stderr)
        if as_json:
            print(json.dumps({"error": sentence}))
        return error.exit_code
    return 0


def _answer(options: argparse.Namespace) -> None:
    if options.compare:
        found = compare(*(_record(word) for word in options.compare))
        print(json.dumps(found.to_json()) if options.json else side_by_side(found))
    elif options.export is not None:
        sys.stdout.write(records.content(records.get(options.export)).decode("utf-8-sig"))
    elif options.remove is not None:
        _said(records.remove(options.remove), options.json)
    else:
        for record in records.all():
            _said(record, options.json)
        for sentence in records.unreadable():
            print(f"records: {one_line(sentence, 1000)}", file=sys.stderr)


def _record(word: str) -> Record:
    """The record of that name, or in that file."""
    return records.load(word) if Path(word).is_file() else records.get(word)


def _said(record: Record, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_entry(record)))
    else:
        profile = record.profile
        size = "ran out of memory" if profile.verdict.failure else human(profile.peak.allocated_bytes)
        print(f"{record.name:<26} {record.recorded_at[:10]}  {where(record):<12} {size:>17}  {about(record.setup)}")


def _entry(record: Record) -> dict[str, Any]:
    profile = record.profile.to_json()
    kept = {key: profile[key] for key in ("peak", "verdict", "measured_on", "environment")}
    return {"name": record.name, "shipped": record.shipped, "recorded_at": record.recorded_at, "job": record.setup.to_job(), **kept}


def where(record: Record) -> str:
    """The card it ran on."""
    return "CPU" if record.profile.measured_on == "cpu" else one_line((record.profile.environment.get("gpu") or "GPU").removeprefix("NVIDIA "), 40)


def about(setup: Setup) -> str:
    """A job in a few words."""
    model = setup.model if isinstance(setup.model, str) else f"a {setup.model.get('model_type', 'config')}"
    try:
        settings = resolve(setup)
        how = f"{settings.precision}, ZeRO-{settings.stage}, "
    except BadInput:
        how = ""
    ranks = f", rank {setup.rank} of {setup.world_size}" if setup.world_size > 1 else ""
    return one_line(f"{model}, {how}micro-batch {setup.micro_batch}{', checkpointing' if setup.gradient_checkpointing is not False else ''}{ranks}", 120)


def side_by_side(found: Comparison) -> str:
    """Two records as a short text."""
    first, second = found.first.profile, found.second.profile
    lines = [f"{'':<24}{found.first.name[:22]:>24}{found.second.name[:22]:>24}{'difference':>14}"]
    sizes = [("peak allocated", first.peak.allocated_bytes, second.peak.allocated_bytes), ("peak reserved", first.peak.reserved_bytes, second.peak.reserved_bytes)]
    sizes += [(f"  {c.replace('_', ' ')}", first.at_peak.get(c, 0), second.at_peak.get(c, 0)) for c in CATEGORIES if first.at_peak.get(c) or second.at_peak.get(c)]
    lines += [f"{name:<24}{human(a):>24}{human(b):>24}{'same' if a == b else ('+' if b > a else '-') + human(abs(b - a)):>14}" for name, a, b in sizes]
    lines += [_change(change) for change in (*found.setups, *found.environments)]
    return "\n".join(lines if found.setups else [*lines, "the jobs are the same"])


def _change(change: Change) -> str:
    return f"{change.key}: {shown(change.first)} -> {shown(change.second)}"
