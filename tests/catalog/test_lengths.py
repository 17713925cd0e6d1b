"""Lengths of a batch: what the model can take, and the sentence where it cannot."""

from __future__ import annotations

import pytest

from explorer.catalog import find_model, lengths
from explorer.errors import BadInput
from explorer.setup import Setup
from tests.catalog.tiny import TINY


def shape(model, **job):
    setup = Setup(model=model, micro_batch=2, **job)
    return lengths(setup, find_model(model))


@pytest.mark.parametrize(
    ("model", "job", "expected"),
    [
        ("openai/clip-vit-large-patch14", {}, (77, None, 224, 256)),
        ("openai/clip-vit-large-patch14", {"sequence": 20, "image_size": 336}, (20, None, 336, 576)),
        ("google/siglip-base-patch16-224", {}, (64, None, 224, 196)),
        ("google/vit-large-patch16-224", {"image_size": 16}, (None, None, 16, 1)),
        ("openai/whisper-small", {}, (None, 128, None, None)),
        ("openai/whisper-small", {"target_sequence": 448}, (None, 448, None, None)),
        ("google-t5/t5-base", {}, (512, 128, None, None)),
        ("google-t5/t5-base", {"sequence": 9000, "target_sequence": 5000}, (9000, 5000, None, None)),
        ("gpt2", {}, (1024, None, None, None)),
        ("google-bert/bert-base-uncased", {}, (512, None, None, None)),
        ("meta-llama/Llama-3.2-1B", {"sequence": 131072}, (131072, None, None, None)),
    ],
)
def test_shapes(model, job, expected):
    at = shape(model, **job)
    assert (at.sequence, at.target_sequence, at.image_size, at.patches) == expected


@pytest.mark.parametrize(
    ("model", "job", "field", "words"),
    [
        ("gpt2", {"sequence": 1025}, "sequence", "beyond the 1024 positions of gpt2; give at most 1024"),
        ("google-bert/bert-base-uncased", {"sequence": 513}, "sequence", "at most 512"),
        ("openai/clip-vit-base-patch32", {"sequence": 78}, "sequence", "at most 77"),
        ("google/siglip-base-patch16-224", {"sequence": 65}, "sequence", "at most 64"),
        ("openai/whisper-small", {"target_sequence": 449}, "target_sequence", "at most 448"),
        ("meta-llama/Llama-2-7b-hf", {"sequence": 4097}, "sequence", "at most 4096"),
        ("openai/clip-vit-large-patch14", {"image_size": 225}, "image_size", "patch of 14; take 224 or 238"),
        ("openai/clip-vit-large-patch14", {"image_size": 5}, "image_size", "take 14 or 28"),
        ("gpt2", {"image_size": 224}, "image_size", "leave it out"),
        ("gpt2", {"target_sequence": 8}, "target_sequence", "leave it out"),
        ("openai/whisper-small", {"sequence": 8}, "sequence", "leave it out"),
        ("google/vit-large-patch16-224", {"sequence": 8}, "sequence", "leave it out"),
        ("gpt2", {"sequence": 1}, "sequence", "at least 2"),
        (TINY["Llama"], {"sequence": 65}, "sequence", "at most 64"),
        (TINY["CLIP"], {"sequence": 17}, "sequence", "at most 16"),
    ],
)
def test_what_a_model_cannot_take(model, job, field, words):
    with pytest.raises(BadInput) as caught:
        shape(model, **job)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_config_whose_own_image_is_no_multiple_of_its_patch():
    config = {**TINY["ViT"], "image_size": 30}
    with pytest.raises(BadInput, match="image_size: is 30"):
        shape(config)
