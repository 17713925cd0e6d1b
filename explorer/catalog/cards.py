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
    advertised: int
    """Gigabytes that the vendor names it by."""
    total_bytes: int
    """As `torch.cuda.mem_get_info` and PyTorch's out-of-memory text show it."""
    compute_capability: float
    attention_generation: Literal["hopper", "ampere", "older"]
    """Which fused attention kernels PyTorch picks there."""
    context_bytes: int
    nccl_bytes: int
    cublas_workspace_bytes: int
    """ATen/cuda/CublasHandlePool.cpp: 32 MiB on compute capability 9 and 10, 4096 KiB × 2 + 16 KiB × 8 on other
    CUDA cards; on ROCm 128 MiB for gfx94x and gfx95x, 32 MiB for older ones."""
    source: str
    """Where `total_bytes` comes from."""
    names: tuple[str, ...] = ()
    """What it is called as well. A name that several cards share means the one that lists it without a size, else none."""
    common: bool = False
    """Whether a card known by its size alone is taken for this one first."""
    has_nvml: bool = True
    """Whether NVIDIA's management library can be asked for the free memory."""
    outside_source: str = OUTSIDE_SOURCE


@lru_cache(maxsize=1)
def cards() -> tuple[Card, ...]:
    """All cards, smallest first."""
    data = json.loads((Path(__file__).parent / "cards.json").read_text(encoding="utf-8"))
    return tuple(sorted((_card(name, facts) for name, facts in data.items()), key=lambda c: c.total_bytes))


def _card(name: str, facts: dict) -> Card:
    capability = facts["compute_capability"]
    amd = facts.get("vendor") == "amd"
    cudnn_first = 9 <= capability < 11 and not amd
    return Card(
        name=name,
        advertised=facts["advertised_gb"],
        total_bytes=facts.get("total_bytes") or int(facts["total_gib"] * GiB),
        compute_capability=capability,
        attention_generation="hopper" if cudnn_first else "ampere" if capability >= 8 else "older",
        context_bytes=CONTEXT_BYTES,
        nccl_bytes=NCCL_BYTES,
        cublas_workspace_bytes=_workspace(capability, amd, cudnn_first),
        source=facts["source"],
        has_nvml=not amd,
        names=tuple(facts.get("names", ())),
        common=facts.get("common", False),
    )


def _workspace(capability: float, amd: bool, large: bool) -> int:
    if amd:
        return (128 if capability >= 9.4 else 32) * MiB
    return 32 * MiB if large else 2 * 4096 * KiB + 8 * 16 * KiB


@lru_cache(maxsize=256)
def find_card(name: str) -> Card:
    """A card by name, in any writing, a driver's too: "NVIDIA A100-SXM4-80GB", "4090", "a100 80g".

    Raises BadInput("gpu", ...) with the nearest names where none, or more than one, is meant.
    """
    words = _words(name)
    if not words & _SMALLER:
        found = _meant(name)
        if len(found) == 1:
            return found[0]
    near = ", ".join(_near(name))
    raise BadInput("gpu", f"is {shown(name)}, which is not a known card; choose one of {near}, or give capacity_gib instead")


_SMALLER = {"laptop", "mobile", "mig"}
"""Words that make a card's name mean less memory."""
_SAID_BESIDE = frozenset((
    "nvidia", "geforce", "tesla", "amd", "instinct", "radeon", "gpu", "graphics", "card", "tensor", "core",
    "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "pcie", "pci", "oam", "hbm", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x", "gddr7",
    "blackwell", "hopper", "ampere", "volta", "turing", "workstation", "server", "edition", "generation", "max", "q", "superchip",
))
"""Words that drivers and people add to a card's name and that say nothing of its memory."""


def _meant(name: str) -> list[Card]:
    """Cards of that name. Its size, where the name gives one, must be theirs: another size is another card."""
    plain = _plain(name)
    exact = [card for card in cards() if any(plain == _plain(known) for known in (card.name, *card.names))]
    if exact:
        return exact
    core, size = _parts(name)
    found = [card for card in cards() if core in _cores(card) and size in (None, card.advertised)]
    usual = [card for card in found if size is None and any(_parts(other) == (core, None) for other in card.names)]
    return usual if len(usual) == 1 else found


@lru_cache(maxsize=256)
def _cores(card: Card) -> frozenset[str]:
    return frozenset(_parts(name)[0] for name in (card.name, *card.names))


def _parts(name: str) -> tuple[str, int | None]:
    """(the name without what is said beside it, its size in GB): "NVIDIA A100-SXM4-80GB" is ("a100", 80)."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(\d)\s+(g|gb|gib)\b", r"\1\2", name[:200].lower()))
    size = next((int(found[1]) for word in words if (found := _SIZE.fullmatch(word))), None)
    words = [word for word in words if word not in _SAID_BESIDE and not _SIZE.fullmatch(word)]
    if size is None and len(words) > 1 and re.fullmatch(r"\d{1,3}", words[-1]) and any(re.search(r"\d", word) for word in words[:-1]):
        size = int(words.pop())  # "A800-80"
    return "".join(words), size


_SIZE = re.compile(r"(\d{1,4})gi?b?")


def _near(name: str) -> list[str]:
    """Names with a word of it, smallest card first; else those alike, most alike first; else cards
    of its size; else one of each."""
    names = [card.name for card in cards()]
    words = {word for word in _words(name) if not word.endswith("gb") and word not in _SAID_BESIDE}
    telling = words - {"rtx", "ti", "super"} or words
    shared = [card.name for card in cards() if any(telling & _words(n) for n in (card.name, *card.names))]
    alike = difflib.get_close_matches(name.upper()[:60], names, 3, 0.75)
    size = _parts(name)[1]
    sized = [card.name for card in cards() if size is not None and card.advertised == size]
    one_of_each_size = {card.advertised: card.name for card in reversed(cards()) if card.common}
    return shared or alike or sized or list(one_of_each_size.values())[::-1]


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", re.sub(r"(\d)\s+gb\b", r"\1gb", name.lower())))
