"""Which known names an unknown one is answered with: those of its family, or none."""

from __future__ import annotations

import pytest

from explorer.catalog import models, stand_in


@pytest.mark.parametrize(("name", "nearest"), [
    ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B"),
    ("meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-7b-hf"),
    ("NousResearch/Meta-Llama-3-8B-Instruct", "meta-llama/Llama-3.1-8B"),
    ("Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-7B"),
    ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"),
    ("Qwen/Qwen2-7B", "Qwen/Qwen2.5-7B"),
    ("google/flan-t5-xl", "google-t5/t5-base"),
    ("gpt2-xl", "gpt2-large"),
    ("openai/clip-vit-large-patch14-336", "openai/clip-vit-large-patch14"),
    ("mistralai/Mixtral-8x22B-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
    ("lama-3.2-1b", "meta-llama/Llama-3.2-1B"),
])
def test_the_nearest_of_the_family(name, nearest):
    assert stand_in(name).name == nearest


@pytest.mark.parametrize("name", ["bigscience/bloom-7b1", "EleutherAI/gpt-j-6b", "EleutherAI/gpt-neo-1.3B", "FacebookAI/roberta-base", "microsoft/phi-2", "tiiuae/falcon-7b", "", "/models/llama", "llama/config.json", "\U0001f600"])
def test_no_other_family_stands_in(name):
    assert stand_in(name) is None


def test_a_known_name_is_its_own_nearest():
    assert [stand_in(model.name).name for model in models()] == [model.name for model in models()]
