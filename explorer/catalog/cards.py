"""GPU cards: what PyTorch shows as capacity, and what a process holds of it outside PyTorch's allocator."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from explorer.errors import BadInput, shown
from explorer.units import GiB, KiB, MiB

CONTEXT_BYTES = 718_077_952
"""CUDA context with the kernels of a training step loaded, read on an H200 (torch 2.11, CUDA 13.0): device use less reserved."""
NCCL_BYTES = 652_214_272
"""What initialising NCCL and one all-reduce added there, on one GPU."""
OUTSIDE_SOURCE = "read on an H200 with torch 2.11; assumed alike on other cards"


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One kind of card."""

    name: str
    total_bytes: int
    """As `torch.cuda.mem_get_info` and PyTorch's out-of-memory text show it."""
    compute_capability: float
    attention_generation: Literal["hopper", "ampere", "older"]
    """Which fused attention kernels PyTorch picks there."""
    context_bytes: int
    nccl_bytes: int
    cublas_workspace_bytes: int
    """ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and newer, 4096 KiB × 2 + 16 KiB × 8 elsewhere."""
    source: str
    """Where `total_bytes` comes from."""
    outside_source: str = OUTSIDE_SOURCE


@lru_cache(maxsize=1)
def cards() -> tuple[Card, ...]:
    """All cards, smallest first."""
    data = json.loads((Path(__file__).parent / "cards.json").read_text(encoding="utf-8"))
    return tuple(sorted((_card(name, facts) for name, facts in data.items()), key=lambda c: c.total_bytes))


def _card(name: str, facts: dict) -> Card:
    capability = facts["compute_capability"]
    amd = facts.get("vendor") == "amd"
    hopper = capability >= 9 and not amd
    return Card(
        name=name,
        total_bytes=facts.get("total_bytes") or int(facts["total_gib"] * GiB),
        compute_capability=capability,
        attention_generation="hopper" if hopper else "ampere" if capability >= 8 else "older",
        context_bytes=CONTEXT_BYTES,
        nccl_bytes=NCCL_BYTES,
        cublas_workspace_bytes=32 * MiB if hopper else 2 * 4096 * KiB + 8 * 16 * KiB,
        source=facts["source"],
    )


def find_card(name: str) -> Card:
    """A card by name, in any writing, a driver's too ("NVIDIA A100-SXM4-80GB"); BadInput("gpu", ...) with the nearest names otherwise."""
    plain, words = _plain(name), _words(name)
    for card in cards():
        if plain == _plain(card.name) or _words(card.name) <= words and not words & _OTHERS:
            return card
    near = _near(name, [card.name for card in cards()])
    raise BadInput("gpu", f"is {shown(name)}, which is not a known card; choose one of {', '.join(near)}, or give capacity_gib instead")


def _near(name: str, names: list[str]) -> list[str]:
    """Names with a word of it, smallest card first; else those alike, most alike first; else all."""
    words = {word for word in _words(name) if not word.endswith("gb")}
    return [n for n in names if words & _words(n)] or difflib.get_close_matches(name.upper()[:60], names, 3, 0.75) or names


_OTHERS = {"laptop", "mobile", "mig"}
"""Words that make a card's name mean less memory."""


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", re.sub(r"(\d)\s+gb\b", r"\1gb", name.lower())))
