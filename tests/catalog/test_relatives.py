"""Which known names an unknown one is answered with: those of its family, or none."""

from __future__ import annotations

import pytest

from explorer.catalog import models, stand_in


@pytest.mark.parametrize(("name", "nearest"), [
    ("someone/Llama-3.1-70B-ours", "meta-llama/Llama-3.1-70B"),
    ("someone/Llama-2-13b-ours", "meta-llama/Llama-2-13b-hf"),
    ("Qwen/Qwen2.5-Math-14B", "Qwen/Qwen2.5-14B"),
    ("Qwen/Qwen3-2B", "Qwen/Qwen3-1.7B"),
    ("google/flan-t5-huge", "google/flan-t5-xl"),
    ("gpt2-huge", "gpt2-xl"),
    ("openai/clip-vit-large-patch16", "openai/clip-vit-large-patch14"),
    ("mistralai/Mixtral-8x7B-v0.2-ours", "mistralai/Mixtral-8x7B-v0.1"),
    ("bigscience/bloom-2b5", "bigscience/bloom-3b"),
    ("lama-3.2-1b", "meta-llama/Llama-3.2-1B"),
])
def test_the_nearest_of_the_family(name, nearest):
    assert stand_in(name).name == nearest


@pytest.mark.parametrize("name", ["state-spaces/mamba-130m", "Salesforce/codegen-350M-mono", "RWKV/rwkv-4-169m-pile", "google/mobilebert-uncased", "", "/models/llama", "llama/config.json", "\U0001f600"])
def test_no_other_family_stands_in(name):
    assert stand_in(name) is None


def test_a_known_name_is_its_own_nearest():
    assert [stand_in(model.name).name for model in models()] == [model.name for model in models()]
