"""Tokens of the text that one image takes: what each model's own processor counts, by its model card or paper."""

from __future__ import annotations

import pytest

from explorer.catalog import find_model, image_tokens, lengths
from explorer.errors import BadInput
from explorer.setup import Setup
from tests.catalog.tiny import TINY_TYPES


@pytest.mark.parametrize(("name", "image_size", "tokens"), [
    ("llava-hf/llava-1.5-7b-hf", None, 576),  # arXiv:2310.03744: 24 x 24 patches of 336 pixels
    ("google/paligemma-3b-pt-224", None, 256),  # arXiv:2407.07726, table 1
    ("google/paligemma-3b-pt-448", None, 1024),
    ("google/gemma-3-4b-it", None, 256),  # arXiv:2503.19786: 896 pixels, pooled to 256
    ("OpenGVLab/InternVL3-1B-hf", None, 256),  # arXiv:2404.16821: 448 pixels, pixel shuffle
    ("Qwen/Qwen2-VL-7B-Instruct", 224, 64),  # arXiv:2409.12191, section 2.1: 66 with its two marks
    ("Qwen/Qwen2-VL-7B-Instruct", 448, 256),
    ("Qwen/Qwen2.5-VL-3B-Instruct", 1008, 1296),
])
def test_tokens_of_one_image(name, image_size, tokens):
    model = find_model(name)
    at = lengths(Setup(model=name, micro_batch=1, sequence=4096, image_size=image_size), model)
    assert image_tokens(model, at.patches) == tokens


@pytest.mark.parametrize("name", ["llava-hf/llava-1.5-7b-hf", "Qwen/Qwen2-VL-7B-Instruct"])
def test_an_image_beyond_the_sequence(name):
    with pytest.raises(BadInput, match="sequence: is 100, and one image alone takes (576|256) tokens"):
        lengths(Setup(model=name, micro_batch=1, sequence=100), find_model(name))


def test_an_image_between_two_sizes_that_the_model_takes():
    with pytest.raises(BadInput, match="image_size: is 450.*take 448 or 476"):
        lengths(Setup(model="Qwen/Qwen2-VL-2B-Instruct", micro_batch=1, image_size=450), find_model("Qwen/Qwen2-VL-2B-Instruct"))


@pytest.mark.parametrize("tokens", [0, -4, "many", 5, 9, True])
def test_a_pool_that_cannot_be(tokens):
    with pytest.raises(BadInput, match="mm_tokens_per_image is"):
        find_model({**TINY_TYPES["gemma3"], "mm_tokens_per_image": tokens})


@pytest.mark.parametrize("family", ["llava", "paligemma", "gemma3", "qwen2_vl", "qwen2_5_vl"])
def test_the_batch_marks_as_many_tokens_as_the_class_makes(family):
    """The class itself refuses another number (transformers' get_placeholder_mask)."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from explorer.vision import mark
    from explorer.workload import build_model, make_batch

    model = find_model(TINY_TYPES[family])
    setup = Setup(model=TINY_TYPES[family], micro_batch=2, image_size=24 if family.startswith("qwen") else None)
    batch = make_batch(model, setup, device="cpu", dtype=torch.float32)
    at = lengths(setup, model)
    assert (batch["input_ids"] == mark(model)).sum(1).tolist() == [image_tokens(model, at.patches)] * 2
    built = build_model(model, setup, device="cpu", dtype=torch.float32)
    assert torch.isfinite(built(**batch).loss)
    batch["input_ids"][:, 0] = 1
    with pytest.raises((ValueError, RuntimeError)):
        built(**batch)
