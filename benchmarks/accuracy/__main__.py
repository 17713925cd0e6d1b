"""Estimate every measured row and print how far off: `make accuracy`, or `python -m benchmarks.accuracy`.

    --write   put the tables into docs/accuracy.md too
    --check   exit 1 where a bar is not met or a row has no estimate
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.accuracy import rows, tables

DOCUMENT = Path(__file__).parents[2] / "docs" / "accuracy.md"
BEGIN, END = "<!-- tables: begin (make accuracy ARGS=--write) -->", "<!-- tables: end -->"


def put(text: str, made: str) -> str:
    """The document with the tables between its two markers. Raises ValueError where it lacks them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def _tell(done: int, of: int) -> None:
    """Progress, for a person at a terminal."""
    if sys.stderr.isatty():
        print(f"\r{done} of {of} rows", end="\n" if done == of else "", file=sys.stderr, flush=True)


def main() -> None:
    """Estimate, print, and write where asked."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.splitlines()[0])
    options.add_argument("--rows", type=Path, default=rows.ROWS, help="another file of rows")
    options.add_argument("--write", action="store_true", help="put the tables into docs/accuracy.md")
    options.add_argument("--check", action="store_true", help="exit 1 where a bar is not met or a row has no estimate")
    given = options.parse_args()
    measured = rows.read(given.rows)
    pairs = rows.pairs(measured, lambda n: _tell(n, len(measured)))
    made = tables.document(pairs)
    print(made)
    if given.write:
        DOCUMENT.write_text(put(DOCUMENT.read_text(encoding="utf-8"), made), encoding="utf-8")
    if given.check and (tables.missed_bars(pairs, {row.name: row for row in measured}) or rows.without_estimate(pairs)):
        sys.exit(1)


if __name__ == "__main__":
    main()
