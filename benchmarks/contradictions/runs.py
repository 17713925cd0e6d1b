"""The consultations of many pairs, by one process or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from multiprocessing import get_context

from benchmarks.contradictions.pairs import JOBS, pair
from benchmarks.contradictions.rules import contradictions
from explorer.advice import consultation, doctor, fixes

KEPT = 2000
"""Estimates a process keeps, some 20 KiB each."""


def answer(number: int) -> tuple[int, list[str]]:
    """(number, contradictions) of one pair."""
    chosen = pair(number)
    return number, contradictions(doctor(chosen.text, chosen.setup))


def _keep() -> None:
    """Let each process estimate a job but once."""
    for module in (consultation, fixes):
        module.estimate = lru_cache(KEPT)(module.estimate)


def answers(numbers: Sequence[int], workers: int) -> Iterator[tuple[int, list[str]]]:
    """Of each pair of these numbers, a job's together."""
    ordered = sorted(numbers, key=lambda n: (n % JOBS, n))
    if workers == 1:
        _keep()
        yield from map(answer, ordered)
        return
    with get_context("spawn").Pool(workers, _keep) as pool:
        yield from pool.imap(answer, ordered, chunksize=8)
