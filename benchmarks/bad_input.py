"""How long the largest and oddest pastes take: `python -m benchmarks.bad_input [--check]`.

Each text of tests/advice/test_mutations.py that has a mebibyte, in seconds of this thread's own time; the bar is one second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tests.advice.test_mutations import LARGE, answered, only_a_sentence

BAR = 1.0


def seconds(answer: Callable[[str], object], text: str) -> float:
    """The better of two runs."""
    took = []
    for _ in range(2):
        started = time.thread_time()
        with only_a_sentence():
            answer(text)
        took.append(time.thread_time() - started)
    return min(took)


def main() -> int:
    """The exit code: 1 with --check where one takes longer than the bar."""
    read = sorted(((seconds(answered, text), name) for name, text in LARGE.items()), reverse=True)
    print(f"{len(read)} texts of a mebibyte: slowest {read[0][0]:.2f} s (bar {BAR:.0f} s)")
    for took, name in read[:5]:
        print(f"  {took:.2f} s  {name}")
    return 1 if "--check" in sys.argv and read[0][0] > BAR else 0


if __name__ == "__main__":
    sys.exit(main())
