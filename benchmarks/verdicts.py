"""Verdicts against real runs under a limit: `python benchmarks/verdicts.py limits.jsonl [MORE ...] [--check]`.

Reads what benchmarks/gpu/limits.py wrote, estimates each job that ran under a limit, and prints who was called what and who lived,
with the bars. --check: exit 1 where a bar is not met. A job that emptied its cache in each of its last steps lived by flushing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from explorer import Setup, estimate
from explorer.errors import BadInput, CouldNotRun
from explorer.units import GiB

ANSWERS = ("fits", "tight", "does not fit")
LAST = 3
"""Steps at the end of a run by which its flushes are counted."""
MOST_TIGHT = 0.25


@dataclass(frozen=True, slots=True)
class Judged:
    """A run under a limit and its verdict."""

    name: str
    factor: float | None
    """The limit as a multiple of the peak allocated without one."""
    answer: str
    retries: float | None
    why: str
    lived: bool
    flushed: bool
    """Whether it emptied its cache in each of its last steps."""
    died_in: int | None
    """The step that ran out of memory, from 1 on; 0 before the first."""

    @property
    def wrong(self) -> str:
        """What is wrong with the verdict; empty where nothing is."""
        if self.answer == "fits" and not self.lived:
            return "called fits, ran out of memory"
        if self.answer == "fits" and self.flushed:
            return "called fits, lived by flushing"
        return "called does not fit, lived" if self.answer == "does not fit" and self.lived else ""


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The runs under a limit that ended, the last of each name. Raises ValueError for a line that is no JSON object."""
    rows = {}
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: no JSON object")
            if "lived" in row and row.get("limit_bytes"):
                rows[row["name"]] = row
    return list(rows.values())


def judge(row: Mapping[str, Any]) -> Judged:
    """A run beside the verdict on its job. Raises BadInput and CouldNotRun as `estimate` does."""
    job = {**row["setup"], "capacity_gib": row["limit_bytes"] / GiB}
    verdict = estimate(Setup.from_job(job), largest=False).verdict
    retries = [step.get("num_alloc_retries", 0) for step in row["steps"] if step["alive"]]
    last = [after - before for before, after in zip(retries, retries[1:], strict=False)][-LAST:]
    failure = row["failure"]
    return Judged(
        name=row["name"], factor=row.get("factor"), answer=verdict.answer, retries=verdict.retries, why=verdict.why, lived=row["lived"],
        flushed=row["lived"] and bool(last) and all(last), died_in=failure and failure["step"] + 1,
    )


def table(judged: Sequence[Judged]) -> str:
    """Who was called what against who lived, in Markdown."""
    counts = Counter((one.answer, "lived by flushing" if one.flushed else "lived" if one.lived else "died") for one in judged)
    columns = ("lived", "lived by flushing", "died")
    lines = [f"| verdict | {' | '.join(columns)} |", "|---|---:|---:|---:|"]
    return "\n".join([*lines, *(f"| {answer} | {' | '.join(str(counts[answer, column]) for column in columns)} |" for answer in ANSWERS)])


def missed(judged: Sequence[Judged]) -> list[str]:
    """The bars that are not met, in words."""
    wrong = Counter(one.wrong for one in judged if one.wrong)
    tight = sum(one.answer == "tight" for one in judged)
    found = [f"{kind}: {count} of {len(judged)} (bar 0)" for kind, count in wrong.items()]
    if tight > MOST_TIGHT * len(judged):
        found.append(f"called tight: {tight} of {len(judged)}, {tight / len(judged):.1%} (bar {MOST_TIGHT:.0%})")
    return found


def main() -> None:
    """Read, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="limits.jsonl of benchmarks/gpu/limits.py")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is not met or a job has no estimate")
    given = parser.parse_args()
    judged, without = [], []
    for row in read(given.files):
        try:
            judged.append(judge(row))
        except (BadInput, CouldNotRun) as error:
            without.append(f"{row['name']}: {error}")
    tight = sum(one.answer == "tight" for one in judged)
    print(f"{len(judged)} runs under a limit, {tight} called tight ({tight / max(1, len(judged)):.1%}, bar {MOST_TIGHT:.0%}):\n\n{table(judged)}\n")
    for one in judged:
        if one.wrong:
            print(f"wrong: {one.name}: {one.wrong}, in step {one.died_in}; said: {one.why}" if not one.lived else f"wrong: {one.name}: {one.wrong}; said: {one.why}")
    for text in (*without, *(f"bar not met: {bar}" for bar in missed(judged))):
        print(text)
    if given.check and (without or missed(judged) or not judged):
        sys.exit(1)


if __name__ == "__main__":
    main()
