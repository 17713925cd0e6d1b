"""Kinds of model: what transformers' own defaults say of each model type. Data, gathered by `python -m explorer.catalog.survey`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

Task = Literal["contrastive", "image", "causal", "masked", "seq2seq", "speech", "image_text", "own"]

_CONTRASTIVE = ("CLIPModel", "SiglipModel")
IMAGE_TEXT = {
    "internvl": "InternVLForConditionalGeneration", "llava": "LlavaForConditionalGeneration", "paligemma": "PaliGemmaForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration", "qwen2_vl": "Qwen2VLForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
}
"""Model type → class, of the decoders that read images among their text and whose batch is made here."""
_BY_SUFFIX: tuple[tuple[str, Task], ...] = (
    ("ForCausalLM", "causal"), ("LMHeadModel", "causal"), ("WithLMHead", "causal"), ("ForMaskedLM", "masked"),
    ("ForImageClassification", "image"), ("ForConditionalGeneration", "seq2seq"), ("MTModel", "seq2seq"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One model type. A number is the class's default, for configs that leave it out; None where the class has none."""

    classes: Mapping[Task, str]
    """Task → class with a loss. The first is trained unless a config names another."""
    encoder_decoder: bool = False
    hidden_size: int | None = None
    """By the Trainer's rule: hidden_size, else the largest of hidden_sizes, else the text config's."""
    hidden_key: str = "hidden_size"
    """What the config calls it, "n_embd" say (transformers' attribute_map)."""
    positions: int | None = None
    """Longest sequence."""
    positions_key: str = "max_position_embeddings"
    positions_taken: bool = False
    """The table's first `pad_token_id + 1` rows hold no position, as in RoBERTa."""
    vocab_size: int | None = None
    image_size: int | None = None
    patch_size: int | None = None
    free_heads: bool = False
    """The width need not divide by the heads: their own width is given apart."""


@lru_cache(maxsize=1)
def kinds() -> Mapping[str, Kind | None]:
    """Every model type transformers 5.17.0 knows; None where there is no class with a loss that a batch can be made for here."""
    data = json.loads((Path(__file__).parent / "model_types.json").read_text(encoding="utf-8"))
    return {name: None if facts is None else Kind(**facts) for name, facts in data.items()}


def task_of(model_class: str, model_type: str, encoder_decoder: bool) -> Task | None:
    """What a class is trained for, by its name; None for one that has no loss, or needs a batch that is not made here."""
    if model_class in _CONTRASTIVE:
        return "contrastive" if model_type in ("clip", "siglip") else None
    if model_class in IMAGE_TEXT.values():
        return "image_text"
    if model_type == "whisper":
        return "speech" if model_class.endswith("ForConditionalGeneration") else None
    task = next((task for suffix, task in _BY_SUFFIX if model_class.endswith(suffix)), None)
    # Other decoders "for conditional generation" take images or sound beside their text in ways of their own.
    return None if task == "seq2seq" and not encoder_decoder else task
