"""Which model a name means: releases, mirrors and quantized copies by rule, and never a model of other sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from explorer import catalog
from explorer.catalog import catalog_name, find_model, models
from explorer.catalog.names import Names
from explorer.errors import BadInput

ENTRIES = json.loads((Path(catalog.__file__).parent / "models.json").read_text(encoding="utf-8"))
NAMES = list(ENTRIES)


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.mark.parametrize(("written", "name"), [
    ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
    ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
    ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
    ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-70B"),
    ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Instruct-2507"),
    ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
    ("mistralai/Mistral-7B-Instruct-v0.1", "mistralai/Mistral-7B-v0.1"),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen/Qwen2.5-7B"),
    ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-1.7B"),
    ("bigscience/mt0-xxl", "google/mt5-xxl"),
    ("google/gemma-2-9b-it", "google/gemma-2-9b"),
    ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
    ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
    ("ibm-granite/granite-3.1-8b-instruct", "ibm-granite/granite-3.1-8b-base"),
    ("NousResearch/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
    ("NousResearch/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
    ("huggyllama/llama-7b", "huggyllama/llama-7b"),
    ("unsloth/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B"),
    ("openai-community/gpt2", "gpt2"),
    ("bert-base-uncased", "google-bert/bert-base-uncased"),
    ("LLAMA_3.2_1B", "meta-llama/Llama-3.2-1B"),
    ("qwen2.5 7b instruct", "Qwen/Qwen2.5-7B"),
    ("meta-llama/Llama-3.1-8B-Instruct-2407", "meta-llama/Llama-3.1-8B"),
])
def test_a_name_by_rule(written, name):
    assert find_model(written).name == name == catalog_name(written)


@pytest.mark.parametrize("written", [
    "Qwen/Qwen2.5-7B-Instruct-1M",  # longer positions, another attention
    "Qwen/Qwen2.5-Math-7B", "nvidia/Llama-3.1-Nemotron-70B-Instruct", "meta-llama/Llama-3.1-8B-v2",
    "mistral-7b-instruct",  # of which release?
    "Qwen/Qwen3-8B-Instruct-2507",  # Qwen3's dated releases differ, and there is none of this size
    "mistralai/Mistral-Small-Instruct-2501", "someone/Llama-3.1-8B-Instruct", "Helsinki-NLP/opus-mt-en-it", "t5", "roberta", "", "-", "/", "4bit", "unsloth/bnb-4bit", "base", "x" * 5000,
])
def test_no_wrong_match(written):
    assert catalog_name(written) is None
    with pytest.raises(BadInput):
        find_model(written)


@pytest.mark.parametrize(("written", "offered"), [
    ("Qwen/Qwen2.5-Math-7B", "Qwen2.5-7B"), ("someone/Llama-3.1-8B-Instruct", "Llama-3.1-8B"), ("mistral-7b-instruct", "Mistral-7B-Instruct-v0.2"), ("roberta", "roberta-base"),
])
def test_an_unknown_name_offers_the_nearest(written, offered):
    with pytest.raises(BadInput, match="choose one of its family: .*" + offered.replace(".", r"\.")):
        find_model(written)


@pytest.mark.parametrize(("written", "whole"), [
    ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B"), ("unsloth/Qwen2.5-7B-Instruct-unsloth-bnb-4bit", "Qwen/Qwen2.5-7B"), ("unsloth/mistral-7b-v0.3-bnb-4bit", "mistralai/Mistral-7B-v0.3"),
])
def test_a_copy_in_4_bit_is_the_model_in_4_bit(written, whole):
    model, of = find_model(written), find_model(whole)
    assert model.in_4_bit and not of.in_4_bit and model.key != of.key
    assert {k: v for k, v in model.config.items() if k != "quantization_config"} == of.config
    pasted = find_model({**of.config, "architectures": [of.model_class], "quantization_config": dict(model.config["quantization_config"])})
    assert pasted.key == model.key
    assert catalog_name(written) is None


@pytest.mark.parametrize(("written", "way", "whole"), [
    ("Qwen/Qwen2.5-7B-Instruct-AWQ", "AWQ", "Qwen/Qwen2.5-7B"), ("TheBloke/Llama-2-7B-Chat-GPTQ", "GPTQ", "meta-llama/Llama-2-7b-hf"), ("Qwen/Qwen3-8B-FP8", "FP8", "Qwen/Qwen3-8B"),
    ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "GPTQ", "Qwen/Qwen2.5-7B"), ("mlx-community/Qwen3-8B-4bit", "4 bit", "Qwen/Qwen3-8B"),
])
def test_weights_quantized_in_another_way_are_said_to_be(written, way, whole):
    with pytest.raises(BadInput, match=rf"\({way}\).*name {whole} for its whole weights"):
        find_model(written)


def test_each_alias_is_its_own_models():
    for name, entry in ENTRIES.items():
        for written in (name, *entry.get("aliases", ())):
            assert catalog_name(written) == name, written
            assert catalog_name(written.rpartition("/")[2]) == name, written


def test_no_two_entries_have_the_same_sizes():
    """Those would be one model, and one of the names an alias."""
    assert len({model.key for model in models()}) == len(NAMES)


def test_names_that_two_models_could_have_mean_neither():
    names = Names({"a/x-7b-it": (), "a/x-7b-chat": ()}, {"a/x-7b-it": "X", "a/x-7b-chat": "X"})
    assert names.find("a/x-7b") is None
    assert names.find("a/x-7b-it").model == "a/x-7b-it"


@pytest.mark.parametrize("name", ["org/cached-model", "org/cached-with-junk"])
def test_a_config_in_the_hubs_cache_is_enough(name, tmp_path):
    folder = tmp_path / "hub" / ("models--" + name.replace("/", "--")) / "snapshots" / "0123"
    folder.mkdir(parents=True)
    config = {**find_model("gpt2").config, "n_layer": 3, "architectures": ["GPT2LMHeadModel"]}
    (folder / "config.json").write_text(json.dumps(config) if name == "org/cached-model" else "{")
    if name == "org/cached-model":
        model = find_model(name)
        assert (model.name, model.source, model.config["n_layer"]) == (name, "hub", 3)
    else:
        with pytest.raises(BadInput):
            find_model(name)
