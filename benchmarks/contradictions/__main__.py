"""Statements that contradict each other: `python -m benchmarks.contradictions 5000 [--first N] [--show N] [--workers N]`.

Random jobs of models whose tapes ship, each with a random message: the consultation of each pair, every sentence held against the
others and against the message's numbers. Prints how many consultations had a contradiction, and of which rule; exit 1 if any.
The pairs are the same every time. Estimates are kept over a run: jobs repeat, messages do not.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from benchmarks.contradictions.runs import answers


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python -m benchmarks.contradictions")
    parser.add_argument("pairs", type=int, nargs="?", default=5000)
    parser.add_argument("--first", type=int, default=0, help="number of the first pair")
    parser.add_argument("--show", type=int, default=3, help="examples of each rule")
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args(argv)
    bad, rules = 0, Counter()
    for number, found in answers(range(asked.first, asked.first + asked.pairs), asked.workers):
        bad += bool(found)
        for said in found:
            rule = said.partition(":")[0]
            rules[rule] += 1
            if rules[rule] <= asked.show:
                print(f"pair {number}: {said}", flush=True)
    print(f"{bad} of {asked.pairs} pairs had contradictions" + (f": {dict(rules)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
