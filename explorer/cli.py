"""`python -m explorer estimate | probe | check | records | dashboard`: the contract of docs/contract.md. Answers on standard output, all else on standard error."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from explorer import cli_flags, cli_records
from explorer.dsconfig import flags, jobs, methods
from explorer.dsconfig.said import described
from explorer.errors import BadInput, CouldNotRun, one_line
from explorer.jsonfile import LARGEST_BYTES, read_bytes
from explorer.profile import CATEGORIES, Profile
from explorer.setup import Setup
from explorer.units import human

FITS, BAD_INPUT, DOES_NOT_FIT, TIGHT, COULD_NOT_RUN = 0, 2, 3, 4, 5
INTERRUPTED = 130
"""As a shell has it: 128 and the signal's number."""
_WORST_FIRST = (BAD_INPUT, COULD_NOT_RUN, DOES_NOT_FIT, TIGHT, FITS)
_BY_ANSWER = {"fits": FITS, "tight": TIGHT, "does not fit": DOES_NOT_FIT, None: FITS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["dashboard"]:
        from explorer.ui.serve import serve

        return serve(given[1:]) or 0
    parser = _parser()
    options = parser.parse_args(given)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name, or a terminal without UTF-8, stops no answer
    empty = next((name for name, value in vars(options).items() if value == ""), None)
    if empty:  # as a shell leaves it where a variable is not set: not the same as leaving the option out
        return _refused(options.command, f"--{empty} is empty; give it a name, or leave it out", BAD_INPUT, options.json)
    run = {"check": _check, "records": cli_records.run}.get(options.command, partial(_jobs, parser))
    try:
        return run(options)
    except BrokenPipeError:  # who reads our answers has had enough of them
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


def _jobs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Job files and a sweep, in their order; the worst exit code back."""
    sweep = getattr(options, "sweep", None)
    given = {} if options.command == "probe" else {k: v for k, v in vars(options).items() if k in flags.NAMES}
    try:
        typed = flags.read(given)
    except BadInput as error:
        return _refused("estimate", str(error), error.exit_code, options.json)
    if typed and not options.jobs:
        return _job("the flags", partial(jobs.of_flags, typed), run_of(options), options.json)
    if not options.jobs and sweep is None:
        parser.error("name a JOB.json" + (", or --sweep SWEEP.json" if options.command == "probe" else ""))
    codes = [_job(path, partial(_read, path, typed), run_of(options), options.json) for path in options.jobs]
    if sweep is not None:
        codes.append(_sweep(sweep, options.out, options.json))
    return next(code for code in _WORST_FIRST if code in codes)


def run_of(options: argparse.Namespace) -> Callable[[Setup], Profile]:
    """What is done with each job."""
    if options.command == "probe":
        return _probe
    return partial(_estimate, sources=True) if options.sources else _estimate


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m explorer", description="Where the GPU memory goes when you train with DeepSpeed.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (("estimate", "estimate jobs, without a GPU"), ("probe", "run one real training step of each job and measure it")):
        command = commands.add_parser(name, help=help_text, epilog="exit code: 2 bad input > 5 could not run > 3 does not fit > 4 tight > 0")
        command.add_argument("jobs", nargs="*", metavar="JOB.json", help="a job file, or - for standard input")
        command.add_argument("--json", action="store_true", help="one JSON object a line, in the order of the files")
        if name == "estimate":
            cli_flags.add_arguments(command)
            command.add_argument("--sources", action="store_true", help="also what the peak is made of, and where each part comes from")
        if name == "probe":
            command.add_argument("--sweep", metavar="SWEEP.json", help="a job and lists of values to try in it; what was measured before is not run again")
            command.add_argument("--out", metavar="ROWS.jsonl", help="where the sweep keeps its rows; table and chart go beside it (default: SWEEP.rows.jsonl)")
    command = commands.add_parser("check", help="say what is wrong with a config, why it runs out of memory, and what to change", epilog="exit code: as of the job that is checked; 2 where DeepSpeed would refuse it")
    for name, content in (("config", "a DeepSpeed config"), ("trainer", "TrainingArguments, as JSON or Python"), ("oom", "an out-of-memory message, or the log it stands in"), ("job", "a job file, which the others change")):
        command.add_argument(f"--{name}", metavar="FILE", help=content)
    cli_flags.add_arguments(command)
    command.add_argument("--largest", action="store_true", help="also the largest micro-batch, lengths and model of the family that fit")
    command.add_argument("--prove", metavar="AXIS", choices=("micro_batch", "sequence", "target_sequence"), help="also real steps at the largest micro_batch, sequence or target_sequence that fits, and at one more")
    command.add_argument("--json", action="store_true", help="one JSON object")
    cli_records.add_arguments(commands.add_parser("records", help="list what was measured before, compare two, keep one that was made elsewhere"))
    commands.add_parser("dashboard", help="serve the dashboard on this machine; further arguments go to Voila")
    return parser


def _check(options: argparse.Namespace) -> int:
    """One consultation. What DeepSpeed would refuse is bad input, though it is answered as it was meant."""
    from explorer.advice.check import check, report, sizes

    typed = {name: value for name, value in vars(options).items() if name in flags.NAMES}
    found = check(options.config, options.trainer, options.oom, options.job, _progress, typed)
    more, unproven = sizes(found, options.largest, options.prove, _progress)
    wrong = str(found.error) if found.error else found.stops[0].text if found.stops else str(unproven) if unproven else None
    codes = {found.error.exit_code if found.error else BAD_INPUT if found.stops else _BY_ANSWER[found.profile.verdict.answer if found.profile else None], unproven.exit_code if unproven else FITS}
    if wrong:
        print(f"check: {one_line(wrong, 1000)}", file=sys.stderr)
    if options.json:
        stopped = unproven or found.error if found.profile is None or unproven else None
        fault = {"job": _at_fault(options, found.error)} if stopped else {}
        _line({**found.to_json(), **more, **({"error": wrong} if wrong else {}), **fault})
    else:
        print(report(found, more))
    return next(code for code in _WORST_FIRST if code in codes)


def _at_fault(options: argparse.Namespace, error: BadInput | CouldNotRun | None) -> str:
    """The file that an error is of: the one that it names, else the first that says what is trained."""
    given = {name: getattr(options, name) for name in ("job", "config", "trainer", "oom") if getattr(options, name) is not None}
    return given.get(getattr(error, "field", ""), next(iter(given.values()), options.command))


def _job(path: str, read: Callable[[], jobs.Job], run: Callable[[Setup], Profile], as_json: bool) -> int:
    """One job: its line on standard output, its exit code back."""
    try:
        job = read()
        profile = _told(job, run(job.setup))
    except BrokenPipeError:
        raise
    except (BadInput, CouldNotRun) as error:
        return _refused(path, str(error), error.exit_code, as_json)
    except Exception as error:  # a fault of ours: the jobs after this one still get their answer
        traceback.print_exc()
        return _refused(path, f"this is a fault of the explorer, not of the job: {type(error).__name__}: {error}", COULD_NOT_RUN, as_json)
    if as_json:
        _line(profile.to_json())
    else:
        print(table(one_line(path, 200), profile, job.setup))
    return _BY_ANSWER[profile.verdict.answer]


def _sweep(path: str, out: str | None, as_json: bool) -> int:
    """All jobs of a sweep file: their rows kept, a table and a chart at the end; the worst exit code back."""
    from explorer.measure import sweep

    try:
        jobs = sweep.read(path)
        kept = Path(out) if out else Path(path).with_suffix(".rows.jsonl")
        rows = []
        for row in sweep.run(jobs, kept, _probe, lambda number, point, known: _progress(f"job {number + 1} of {len(jobs)}: {one_line(point.label, 200)}" + (" (measured before)" if known else ""), 0.0)):
            rows.append(row)
            if row.profile is None:
                _refused(one_line(row.point.label, 200), row.error, row.exit_code, as_json)
            elif as_json:
                _line({"change": dict(row.point.change), **row.profile.to_json()})
    except OSError as error:
        return _refused(path, f"cannot write {error.filename}: {error.strerror}", BAD_INPUT, as_json)
    except BadInput as error:
        return _refused(path, str(error), error.exit_code, as_json)
    text = sweep.table(rows)
    kept.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    if not as_json:
        print(text)
    _chart(rows, kept.with_suffix(".svg"))
    codes = [row.exit_code if row.profile is None else _BY_ANSWER[row.profile.verdict.answer] for row in rows]
    return next(code for code in _WORST_FIRST if code in codes)


def _chart(rows: list[Any], path: Path) -> None:
    """The rows' chart, where Altair is installed: a machine that only measures may lack it."""
    measured = [(row.point.label, row.profile) for row in rows if row.profile is not None]
    if not measured:
        return
    try:
        from explorer.ui.charts import sweep

        sweep(measured).save(path)
    except ImportError as error:
        print(f"no chart: {error.name} is not installed", file=sys.stderr)
    else:
        print(f"table and chart: {path.with_suffix('.md')}, {path}", file=sys.stderr)


def _read(path: str, typed: Mapping[str, Any]) -> jobs.Job:
    """The job of a file, of standard input for "-", with what the flags add to it."""
    if path != "-":
        return jobs.of_file(read_bytes(path, "job"), typed, one_line(path, 200))
    if sys.stdin is None or sys.stdin.closed:
        raise BadInput("job", "standard input is closed; give a file, or send the job to it")
    stream = getattr(sys.stdin, "buffer", sys.stdin)
    content = stream.read(LARGEST_BYTES + 1)
    return jobs.of_file(content.encode() if isinstance(content, str) else content, typed, "standard input")


def _told(job: jobs.Job, profile: Profile) -> Profile:
    """The profile with what was assumed before it was estimated."""
    first = methods.sentence(job.setup)
    notes = tuple(note for note in profile.notes if note != first)
    if not job.world_known and profile.source == "estimated":
        from explorer.advice import worlds

        notes = (worlds.sentence(job.setup, _progress), *notes)
    return replace(profile, notes=(*([first] if first else []), *notes, *job.notes))


def _refused(path: str, sentence: str, code: int, as_json: bool) -> int:
    """One sentence on one line, and the job's place in the answers kept."""
    sentence = one_line(sentence, 1000)
    print(f"{one_line(path, 200)}: {sentence}", file=sys.stderr)
    if as_json:
        _line({"error": sentence, "job": path})
    return code


def _line(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _progress(text: str, seconds: float) -> None:
    print(f"{seconds:6.1f} s  {text}", file=sys.stderr, flush=True)


def _estimate(setup: Setup, sources: bool = False) -> Profile:
    from explorer.estimator.estimate import estimate

    return estimate(setup, on_progress=_progress, sources=sources)


def _probe(setup: Setup) -> Profile:
    from explorer.measure import records
    from explorer.measure.runner import probe

    before = records.find(setup)
    if before is not None:
        _progress(f"measured before, on {before.recorded_at[:10]}: {human(before.profile.peak.allocated_bytes)} at the peak; now anew", 0.0)
    return probe(setup, on_progress=_progress)


def table(name: str, profile: Profile, setup: Setup | None = None) -> str:
    """A profile as a short text; with its job in a line of its own."""
    peak = profile.peak
    rows = [f"{name}: {profile.source}" + (f" on {profile.measured_on}" if profile.measured_on else "")]
    if setup is not None:
        first = methods.sentence(setup)
        rows = [*([f"{first}."] if first else []), *rows, f"  {described(setup)}"]
    rows.append(f"  peak allocated  {human(peak.allocated_bytes):>10}  in {peak.allocated_phase} of the {peak.allocated_step} step")
    rows.append(f"  peak reserved   {human(peak.reserved_bytes):>10}  in {peak.reserved_phase} of the {peak.reserved_step} step")
    rows += [f"    {c.replace('_', ' '):<14}{human(profile.at_peak[c]):>10}" for c in CATEGORIES if profile.at_peak.get(c)]
    rows.append(f"  host            {human(profile.host.resident_bytes):>10}  per process, {human(profile.host.per_node_bytes)} at most per node")
    verdict = profile.verdict
    if verdict.answer is not None:
        rows.append(f"  {verdict.answer}" + (f" ({human(verdict.capacity_bytes)} for PyTorch): " if verdict.capacity_bytes else ": ") + verdict.why)
    if profile.largest_micro_batch is not None:
        rows.append(f"  largest micro-batch that fits: {profile.largest_micro_batch}")
    rows += [f"  {human(s.n_bytes):>9}  {s.category}: {s.name} ({s.provenance}: {s.origin})" for s in profile.sources]
    rows += [f"  note: {note}" for note in profile.notes]
    return "\n".join(rows)
