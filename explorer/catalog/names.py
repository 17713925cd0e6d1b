"""Which of the catalog's models a name means: other writings, fine-tuned releases, mirrors, quantized copies. By rule, never by likeness.

A name is an alias only where the model has the same sizes. A release that differs in them has an entry of its own, and an entry lists
the other names of its sizes ("aliases"); the rules below add what a family's releases add to a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

MIRRORS = frozenset((
    "unsloth", "nousresearch", "huggyllama", "modelscope", "ai-modelscope", "llm-research", "alpindale", "xenova", "openai-community",
    "hf-internal-testing", "trl-lib", "philschmid", "mlx-community", "thebloke", "hugging-quants", "casperhansen", "redhatai", "neuralmagic",
    "nvidia", "techxgenus", "lmstudio-community", "bartowski",
))
"""Accounts of the hub that keep copies of others' models under their names."""
_SAME_SIZES = frozenset(("instruct", "it", "chat", "hf", "base", "pt"))
"""Words of a release that leave a model's sizes as they are."""
_SIZE = re.compile(r"\d+([._]\d+)?[bm]")
"""Of a name that has none of these, "base" is the size: "t5-base"."""
_DATE = re.compile(r"2[3-9](0[1-9]|1[0-2])|20[2-9]\d(0[1-9]|1[0-2])(\d\d)?")
"""2507, 202507, 20250714."""
_QUANTIZED = {
    "gptq": "GPTQ", "awq": "AWQ", "gguf": "GGUF", "ggml": "GGML", "exl2": "EXL2", "exl3": "EXL3", "aqlm": "AQLM", "hqq": "HQQ", "fp8": "FP8", "nvfp4": "NVFP4", "mxfp4": "MXFP4",
    "int4": "4 bit", "int8": "8 bit", "4bit": "4 bit", "8bit": "8 bit", "w4a16": "4 bit", "w8a8": "8 bit", "mlx": "MLX", "dwq": "MLX",
}
_BESIDE_QUANTIZED = frozenset(("bnb", "unsloth", "dynamic", "nf4", "quantized"))

BITSANDBYTES_4_BIT = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
}
"""What the configs of "…-bnb-4bit" say."""


class Meant(NamedTuple):
    """What a name means."""

    model: str
    """The catalog's name."""
    quantized: str | None
    """How its weights are kept: "bitsandbytes", or another way's name; None where they are whole."""


class Names:
    """The catalog's names and their aliases, ready to be asked."""

    def __init__(self, entries: Mapping[str, Iterable[str]], families: Mapping[str, str]) -> None:
        """`entries`: catalog name → aliases. `families`: catalog name → family."""
        self._exact: dict[str, str] = {}
        self._bare: dict[str, set[str]] = {}
        self._owners: dict[str, set[str]] = {}
        self._dated = {families[name] for name in entries if any(_DATE.fullmatch(word) for word in _words(name))}
        self._families = families
        for name, aliases in entries.items():
            for written in (name, *aliases):
                words = _words(written)
                self._exact.setdefault("".join(words), name)
                self._bare.setdefault(_bare(words), set()).add(name)
                self._owners.setdefault(name, set()).add(_owner(written))

    def find(self, written: str) -> Meant | None:
        """The model that a name means; None where it means none surely."""
        words, quantized = _unquantized(_words(written[:200]), _owner(written))
        found = self._find(words) if words else None
        if found is None or _owner(written) not in ("", *self._owners[found], *MIRRORS):
            return None
        return Meant(found, quantized)

    def _find(self, words: list[str]) -> str | None:
        exact = self._exact.get("".join(words)) or self._only(words)
        if exact is not None:
            return exact
        dates = [word for word in words if _DATE.fullmatch(word)]
        undated = self._only([word for word in words if word not in dates]) if dates else None
        return undated if undated is not None and self._families[undated] not in self._dated else None

    def _only(self, words: list[str]) -> str | None:
        found = self._bare.get(_bare(words), set())
        return next(iter(found)) if len(found) == 1 else None


def _owner(written: str) -> str:
    return written.strip().lower().rpartition("/")[0]


def _words(written: str) -> list[str]:
    """The words of a name without its owner: "meta-llama/Meta-Llama-3-8B" has llama, 3, 8b."""
    words = [word for word in re.split(r"[-_\s]+", written.strip().lower().rpartition("/")[2]) if word]
    return words[1:] if len(words) > 1 and words[0] == "meta" and words[1].startswith("llama") else words


def _bare(words: Iterable[str]) -> str:
    """The name without what a release adds to it."""
    words = list(words)
    dropped = _SAME_SIZES if any(_SIZE.fullmatch(word) for word in words) else _SAME_SIZES - {"base"}
    return "".join(word for word in words if word not in dropped)


def _unquantized(words: list[str], owner: str) -> tuple[list[str], str | None]:
    """(the words of the whole model, how the weights are kept)."""
    ways = [_QUANTIZED[word] for word in words if word in _QUANTIZED]
    kept = [word for word in words if word not in _QUANTIZED and word not in _BESIDE_QUANTIZED]
    if not ways:
        return words, None
    by_bitsandbytes = "4bit" in words and ("bnb" in words or owner == "unsloth")
    return kept, "bitsandbytes" if by_bitsandbytes else ways[0]
