"""Models of a name's own family, for a name that is not known: "Llama-3.1-70B" is answered with Llamas or not at all."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable

_SURELY = 4
"""Letters from which on a family's name is its own whatever number follows it: Qwen2 and Qwen3 are Qwens, GPT-2 and GPT-J no more than namesakes."""
_SLIP = 0.85
"""Likeness from which on one name is another with a letter wrong."""

_GRADES = {"tiny": -1, "mini": -1, "small": 0, "base": 0, "medium": 1, "large": 2, "huge": 3, "xl": 3, "xxl": 4}


def relatives(name: str, known: Iterable[str]) -> list[str]:
    """The known names of the same family, nearest first: its own line of the family, then its size within a factor of two, then its spelling. A name that only a letter keeps from a known one counts as its relative."""
    near = [other for other in known if _kinship(name, other) is not None]
    if near:
        return sorted(near, key=lambda other: (_kinship(name, other), _apart(name, other), -_likeness(name, other)))
    return [other for other in known if _likeness(name, other) >= _SLIP]


def _short(name: str) -> str:
    return name[:200].rpartition("/")[2].lower()


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z][a-z0-9.]*", _short(name).replace("_", "-"))


def _kinship(name: str, other: str) -> int | None:
    """0 where the other's first word is one of the name's, 1 where all but its number is; None for another family. A word that is the name's first counts before any other's."""
    first = _words(other)[0]
    for place, word in enumerate(_words(name)):
        if word == first:
            return 2 * place
        if (letters := word.rstrip("0123456789.")) == first.rstrip("0123456789.") and len(letters) >= _SURELY:
            return 2 * place + 1
    return None


def _apart(name: str, other: str) -> int:
    """Powers of two between their sizes, where both give a number ("7b"); else grades between their words ("large")."""
    sizes = [float(found[1]) for n in (name, other) if (found := re.search(r"(?<![a-z\d.])(\d{1,4}(?:\.\d{1,3})?)b\b", _short(n)))]
    if len(sizes) == 2 and all(sizes):
        return abs(round(math.log2(sizes[0] / sizes[1])))
    first, second = (next((_GRADES[word] for word in _words(n) if word in _GRADES), 0) for n in (name, other))
    return abs(first - second)


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, _short(name), _short(other)).ratio()
