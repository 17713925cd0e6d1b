"""The catalog's models are what transformers builds; a pasted config is read or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from explorer import catalog
from explorer.catalog import find_model, lengths, models
from explorer.catalog.kinds import kinds
from explorer.errors import BadInput
from explorer.setup import Setup
from tests.catalog.tiny import TINY

NAMES = [model.name for model in models()]


# --- the catalog


ENTRIES = json.loads((Path(catalog.__file__).parent / "models.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_class_and_those_published(name):
    """`published` counts the weights that the release holds; where it has no head, the encoder alone is published."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from explorer.workload import build_model

    model, published = find_model(name), ENTRIES[name]["published"]
    built = build_model(model, Setup(model=name, micro_batch=1), device="meta", dtype=torch.float16)
    assert sum(p.numel() for p in built.parameters()) == model.parameters
    assert type(built).__name__ == model.model_class
    if model.sequence_limit is not None and model.task not in ("contrastive", "image_text") and hasattr(built.config, "max_position_embeddings"):
        assert model.sequence_limit == built.config.max_position_embeddings - _positions_taken(model)
    of_encoder = published.get("of") == "encoder"
    count = _encoder_parameters(model) if of_encoder else model.parameters
    assert abs(count - published["parameters"]) <= published.get("within", 0)
    assert of_encoder or published["source"] in ("weights", "card")


def _positions_taken(model):
    return 2 if model.model_type in ("roberta", "xlm-roberta") else 0


def _encoder_parameters(model):
    import torch
    from transformers import AutoModel

    from explorer.workload import build_config

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModel.from_config(build_config(model, Setup(model=model.name, micro_batch=1))).parameters())


def test_a_published_count_is_exact_where_the_release_says_it_to_the_last_digit():
    rounded = [name for name, entry in ENTRIES.items() if entry["published"].get("within")]
    assert len(ENTRIES) >= 120 and len(rounded) <= 0.08 * len(ENTRIES)
    assert all(ENTRIES[name]["published"]["within"] <= 0.008 * ENTRIES[name]["parameters"] for name in rounded)


@pytest.mark.parametrize(
    ("config", "untied", "tied"),
    [
        ({"model_type": "t5", "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64, "vocab_size": 32128, "feed_forward_proj": "gated-gelu"}, 11135332352, 11003736064),
        ({"model_type": "mt5", "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64, "vocab_size": 250112, "feed_forward_proj": "gated-gelu"}, 12921057280, 11896598528),
        ({"model_type": "umt5", "d_model": 512, "d_ff": 1024, "d_kv": 64, "num_layers": 8, "num_heads": 6, "vocab_size": 256384, "feed_forward_proj": "gated-gelu"}, 306601984, 175333376),
        ({"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}, 1498482688, 1235814400),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_head_that_the_config_unties_counts(config, untied, tied):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from explorer.workload import build_model

    for flag, count in ((False, untied), (True, tied)):
        given = {**config, "tie_word_embeddings": flag}
        built = build_model(find_model(given), Setup(model=given, micro_batch=1), device="meta", dtype=torch.bfloat16)
        built.tie_weights()  # as from_pretrained and accelerate call it once more
        assert sum(p.numel() for p in built.parameters()) == count


def test_the_first_two_are_clip_and_no_name_comes_twice():
    assert NAMES[:2] == ["openai/clip-vit-base-patch32", "openai/clip-vit-large-patch14"]
    shorts = [name.rpartition("/")[2].lower() for name in NAMES]
    assert len(set(shorts)) == len(shorts)
    assert len({model.key for model in models()}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_model_is_found_by_its_short_name_in_any_case(name):
    short = name.rpartition("/")[2]
    for written in (name, name.upper(), short, short.lower()):
        assert find_model(written).name == name


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults_are_lengths_the_model_takes(name):
    model = find_model(name)
    at = lengths(Setup(model=name, micro_batch=3), model)
    assert at.micro_batch == 3
    assert {axis for axis in ("sequence", "target_sequence", "image_size") if getattr(at, axis)} == set(model.axes)
    again = {axis: getattr(at, axis) for axis in model.axes}
    assert lengths(Setup(model=name, micro_batch=3, **again), model) == at


@pytest.mark.parametrize("name", NAMES)
def test_pasting_a_catalog_config_is_the_same_model(name):
    model = find_model(name)
    pasted = find_model({**model.config, "architectures": [model.model_class], "torch_dtype": "bfloat16", "transformers_version": "4.40.0", "_name_or_path": name})
    assert pasted.key == model.key
    assert (pasted.axes, pasted.sequence_limit, pasted.hidden_size, pasted.source) == (model.axes, model.sequence_limit, model.hidden_size, "config")


# --- pasted configs


@pytest.mark.parametrize("family", TINY)
def test_a_tiny_config_of_every_family(family):
    model = find_model(TINY[family])
    assert model.model_type == TINY[family]["model_type"]
    assert model.parameters is None and model.source == "config"
    expected = {"CLIP": "contrastive", "SigLIP": "contrastive", "ViT": "image", "Whisper": "speech", "BERT": "masked", "T5": "seq2seq", "InternVL": "image_text"}.get(family, "causal")
    assert model.task == expected


def test_sizes_in_the_config_win_over_the_catalogs():
    pasted = find_model({**find_model("gpt2").config, "n_layer": 3, "n_positions": 2048})
    assert pasted.config["n_layer"] == 3 and pasted.sequence_limit == 2048
    assert pasted.key != find_model("gpt2").key


@pytest.mark.parametrize(
    ("extra", "model_class"),
    [
        ({}, "GPT2LMHeadModel"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["GPT2Model"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "GPT2LMHeadModel"),
        ({"architectures": None}, "GPT2LMHeadModel"),
        ({"auto_class": "AutoModelForCausalLM"}, "GPT2LMHeadModel"),
        ({"architectures": ["os.system"]}, "GPT2LMHeadModel"),
        ({"architectures": "GPT2LMHeadModel"}, "GPT2LMHeadModel"),
        ({"architectures": [5]}, "GPT2LMHeadModel"),
    ],
)
def test_which_class_a_config_names(extra, model_class):
    assert find_model({**TINY["GPT-2"], **extra}).model_class == model_class


def test_bert_is_trained_as_the_config_says():
    assert find_model({**TINY["BERT"], "architectures": ["BertLMHeadModel"]}).task == "causal"


@pytest.mark.parametrize("name", ["missing.json", "./here", "../there/config.json", "~/nowhere", "/not/there"])
def test_a_path_that_is_not_there_is_no_hub_id(name):
    with pytest.raises(BadInput, match="is no folder with a config.json and no .json file"):
        find_model(name)


def test_auto_map_and_remote_code_are_ignored():
    model = find_model({**TINY["GPT-2"], "auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    assert "auto_map" not in model.config and model.key == find_model(TINY["GPT-2"]).key


def test_folders_and_files(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY["Llama"]))
    by_folder, by_file = find_model(str(folder)), find_model(str(folder / "config.json"))
    assert by_folder == by_file
    assert by_folder.name == "mine" and by_folder.key == find_model(TINY["Llama"]).key


def test_a_folder_that_changes_is_read_again(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY["Llama"]))
    before = find_model(str(tmp_path)).key
    path.write_text(json.dumps({**TINY["Llama"], "num_hidden_layers": 3}))
    assert find_model(str(tmp_path)).key != before


# --- refused


LLAMA, CLIP = TINY["Llama"], TINY["CLIP"]
BAD = {
    "no model_type": ({"hidden_size": 64}, "model_type"),
    "model_type a number": ({"model_type": 5}, "model_type"),
    "model_type a list": ({"model_type": ["gpt2"]}, 'model_type is ["gpt2"]; it must be one name'),
    "model_type null": ({"model_type": None}, "has no \"model_type\""),
    "an activation that is none": ({**LLAMA, "hidden_act": "zzz"}, "choose gelu, relu or silu"),
    "an activation misspelt": ({**TINY["GPT-2"], "activation_function": "gelu_nwe"}, 'did you mean "gelu_new"?'),
    "a rope that is none": ({**LLAMA, "rope_parameters": {"rope_type": "zzz"}}, "choose one of axial, default, dynamic"),
    "a rope that is a list": ({**LLAMA, "rope_scaling": {"type": []}}, "rope_scaling.rope_type is []"),
    "another quantization": ({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}, 'of "gptq", and only bitsandbytes in 4 bit'),
    "8 bit": ({**LLAMA, "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "in 8 bit"),
    "a quantization that is a list": ({**LLAMA, "quantization_config": [4]}, "quantization_config is [4]"),
    "model_type unknown, near": ({"model_type": "lama"}, "llama"),
    "model_type unknown, far": ({"model_type": "zzzzzz"}, "zzzzzz"),
    "a class without a loss here": ({"model_type": "sam"}, "no class with a loss"),
    "text beside images": ({"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": {"model_type": "gemma3_text"}}, "its text_config (gemma3_text) can be pasted alone"),
    "a class whose batch is another": ({**TINY["BERT"], "architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification"),
    "an auto class of another task": ({**LLAMA, "auto_class": "AutoModelForImageClassification"}, "AutoModelForCausalLM"),
    "an auto class that is none": ({**LLAMA, "auto_class": 5}, "auto_class is 5"),
    "a window of layers as a text": ({"model_type": "mpt", "max_seq_len": "long"}, 'max_seq_len is "long"'),
    "a text for a size": ({**LLAMA, "hidden_size": "64"}, 'hidden_size is "64"'),
    "a fraction for a size": ({**LLAMA, "num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
    "true for a size": ({**LLAMA, "vocab_size": True}, "vocab_size is true"),
    "zero layers": ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "negative width": ({**LLAMA, "intermediate_size": -4}, "intermediate_size is -4"),
    "absurd vocabulary": ({**LLAMA, "vocab_size": 10**12}, "vocab_size"),
    "absurdly deep": ({**LLAMA, "num_hidden_layers": 10**8}, "num_hidden_layers is 100000000, beyond every model there is; give 4,096 at most"),
    "absurdly deep, GPT-2": ({**TINY["GPT-2"], "n_layer": 4097}, "n_layer is 4097"),
    "absurdly deep, inside": ({**CLIP, "vision_config": {**CLIP["vision_config"], "num_hidden_layers": 10**8}}, "vision_config.num_hidden_layers is 100000000"),
    "absurdly deep, a list": ({"model_type": "swin", "depths": [2, 10**8]}, "depths is [2, 100000000]"),
    "absurdly wide": ({**LLAMA, "hidden_size": 10**8, "head_dim": 16}, "hidden_size is 100000000, beyond every model there is; give 1,048,576 at most"),
    "absurdly many words": ({**LLAMA, "vocab_size": 10**8}, "vocab_size is 100000000, beyond every model there is; give 16,777,216 at most"),
    "an object for a size": ({**LLAMA, "hidden_size": {}}, "hidden_size"),
    "width not divisible by heads": ({**LLAMA, "num_attention_heads": 5}, "not divisible by its 5"),
    "width not divisible, GPT-2": ({**TINY["GPT-2"], "n_head": 5}, "not divisible by its 5"),
    "width not divisible, inside": ({**CLIP, "vision_config": {**CLIP["vision_config"], "num_attention_heads": 5}}, "vision_config."),
    "heads not a multiple of shared ones": ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads 3"),
    "text_config a list": ({**CLIP, "text_config": []}, "text_config"),
    "text_config a text": ({**CLIP, "text_config": "small"}, "text_config"),
    "vision_config a number": ({**CLIP, "vision_config": 7}, "vision_config"),
    "image_size a list": ({**TINY["ViT"], "image_size": [32, 48]}, "image_size"),
    "image_size a text": ({**TINY["ViT"], "image_size": "32"}, 'image_size is "32"'),
    "positions a list": ({**LLAMA, "max_position_embeddings": [64]}, "max_position_embeddings is [64]"),
    "positions a text": ({**LLAMA, "max_position_embeddings": "2048"}, 'max_position_embeddings is "2048"'),
    "positions inside a text": ({**CLIP, "text_config": {**CLIP["text_config"], "max_position_embeddings": "16"}}, "text_config.max_position_embeddings"),
    "speech sizes a text": ({**TINY["Whisper"], "num_mel_bins": "8"}, 'num_mel_bins is "8"'),
    "speech positions negative": ({**TINY["Whisper"], "max_source_positions": -1}, "max_source_positions is -1"),
    "speech targets a text": ({**TINY["Whisper"], "max_target_positions": "x"}, 'max_target_positions is "x"'),
    "huge": ({**LLAMA, "pad": "x" * 1_100_000}, "too large to be a configuration"),
}


@pytest.mark.parametrize(("config", "words"), BAD.values(), ids=BAD)
def test_a_bad_config_is_one_sentence(config, words):
    with pytest.raises(BadInput) as caught:
        model = find_model(config)
        lengths(Setup(model=config, micro_batch=1), model)
    assert caught.value.field == "model"
    assert words in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("section", ["text_config", "vision_config"])
def test_null_sections_are_transformers_defaults(section):
    """Transformers writes such configs; the missing part has the class's own defaults."""
    config = {**CLIP, section: None}
    at = lengths(Setup(model=config, micro_batch=1), find_model(config))
    assert (at.sequence, at.image_size) == ((77, 32) if section == "text_config" else (16, 224))


def test_files_that_are_no_config(tmp_path):
    for text, words in (("[1]", "object"), ("{", "not valid JSON"), ("null", "object"), ('"gpt2"', "object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(BadInput, match=words):
            find_model(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(BadInput, match="is no folder with a config.json"):
        find_model(str(tmp_path))


def fields(config):
    model = find_model(config)
    return {name: getattr(model, name) for name in ("model_class", "task", "hidden_size", "sequence_limit", "vocab_size", "default_image_size", "patch_size")}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2"}, {"hidden_size": 768, "sequence_limit": 1024, "vocab_size": 50257}),
        ({"model_type": "opt", "hidden_size": 64, "num_attention_heads": 4}, {"hidden_size": 64, "sequence_limit": 2048}),
        ({"model_type": "roberta", "max_position_embeddings": 514}, {"sequence_limit": 512, "model_class": "RobertaForMaskedLM"}),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 0}, {"sequence_limit": 513}),
        ({"model_type": "bart"}, {"task": "seq2seq", "hidden_size": 1024, "sequence_limit": 1024}),
        ({"model_type": "bart", "architectures": ["BartModel"]}, {"model_class": "BartForConditionalGeneration"}),
        ({"model_type": "led"}, {"sequence_limit": 16384}),
        ({"model_type": "marian"}, {"model_class": "MarianMTModel", "task": "seq2seq"}),
        ({"model_type": "mpt", "max_seq_len": 64}, {"sequence_limit": 64}),
        ({"model_type": "longt5", "n_positions": 512}, {"sequence_limit": None}),
        ({"model_type": "albert"}, {"vocab_size": 30000}),
        ({"model_type": "dinov2"}, {"patch_size": 14, "hidden_size": 768}),
        ({"model_type": "resnet"}, {"patch_size": 32, "hidden_size": 2048, "vocab_size": None}),
        ({"model_type": "convnext", "hidden_sizes": [8, 16, 32, 64]}, {"hidden_size": 64}),
        ({"model_type": "clip", "text_config": {"dropout": 0.0}}, {"hidden_size": 512, "sequence_limit": 77, "vocab_size": 49408}),
        ({"model_type": "clip", "architectures": ["CLIPForImageClassification"], "vision_config": {"image_size": 64, "patch_size": 8}}, {"task": "image", "default_image_size": 64, "patch_size": 8}),
    ],
)
def test_what_a_config_leaves_out_is_the_class_s_default(config, expected):
    assert {name: value for name, value in fields(config).items() if name in expected} == expected


@pytest.mark.parametrize(
    ("auto_class", "model_type", "model_class"),
    [("AutoModelForCausalLM", "bert", "BertLMHeadModel"), ("AutoModelForMaskedLM", "bert", "BertForMaskedLM"), ("AutoModelForCausalLM", "bart", "BartForCausalLM"), ("AutoModel", "clip", "CLIPModel")],
)
def test_auto_class_chooses(auto_class, model_type, model_class):
    assert find_model({"model_type": model_type, "auto_class": auto_class}).model_class == model_class


def test_architectures_as_the_hub_s_own_clip_files_write_them():
    """Old files carry every generation setting in both sections; none of them is a size."""
    extras = {"pruned_heads": {}, "num_beams": 1, "num_beam_groups": 1, "id2label": {"0": "LABEL_0"}, "torch_dtype": None, "use_bfloat16": False, "cross_attention_hidden_size": None}
    config = {**CLIP, "architectures": ["CLIPModel"], "text_config": {**CLIP["text_config"], **extras}, "vision_config": {**CLIP["vision_config"], **extras}, "text_config_dict": None}
    assert find_model(config).hidden_size == 32


@pytest.mark.parametrize(("model_type", "extra"), [("gemma4_text", {"num_kv_shared_layers": 0}), ("nemotron_h", {"num_nextn_predict_layers": 0}), ("glm4_moe", {}), ("blt", {}), ("gpt2", {"n_layer": 1000}), ("llama", {"vocab_size": 901_629, "max_position_embeddings": 10_485_760}), ("llama", {"hidden_size": 64, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16})])
def test_unusual_sizes_are_not_refused(model_type, extra):
    assert find_model({"model_type": model_type, **extra}).model_type == model_type


def test_no_default_config_of_transformers_is_refused_for_its_sizes():
    transformers = pytest.importorskip("transformers")
    for model_type in [name for name, kind in kinds().items() if kind is not None]:
        config = json.loads(json.dumps(transformers.AutoConfig.for_model(model_type).to_dict(), default=str))
        try:
            assert find_model(config).model_type == config["model_type"]
        except BadInput as error:
            # Gemma 3's default pools 14 patches a side to 16, which transformers cannot build either.
            assert "square images" in str(error) or model_type == "gemma3", model_type


def test_every_model_type_is_read_or_refused_in_one_sentence():
    read = 0
    for model_type in kinds():
        try:
            model = find_model({"model_type": model_type})
            lengths(Setup(model={"model_type": model_type}, micro_batch=2), model)
            read += 1
        except BadInput as error:
            assert error.field == "model" and "\n" not in str(error)
    assert read > 220


def test_what_cannot_be_read_as_a_config_is_said_alike(tmp_path):
    """Whether another file is there is no one's business: the page may serve others."""
    (tmp_path / "there").write_text("x")
    said = set()
    for name in (tmp_path / "there", tmp_path / "not-there", "/etc/passwd", "/etc/no-such-file", "~no-such-user/config.json", "/dev/null", "/" + "x" * 5000, "/a\0b"):
        with pytest.raises(BadInput) as caught:
            find_model(str(name))
        assert "is no folder with a config.json and no .json file" in str(caught.value) and len(str(caught.value)) < 300
        said.add(str(caught.value).partition("is no folder")[2])
    assert len(said) == 1


def test_a_config_in_4_bit_is_read():
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert find_model({**LLAMA, "quantization_config": section}).config["quantization_config"] == section
    assert find_model({**LLAMA, "quantization_config": None}).model_class == "LlamaForCausalLM"


def test_activations_and_ropes_are_transformers_own():
    activations = pytest.importorskip("transformers.activations")
    ropes = pytest.importorskip("transformers.modeling_rope_utils")
    from explorer.catalog import checks

    assert set(activations.ACT2FN) == checks.ACTIVATIONS
    assert set(ropes.ROPE_INIT_FUNCTIONS) <= checks.ROPES


def test_what_transformers_refuses_is_told_without_the_types_it_tried():
    configuration = pytest.importorskip("transformers")
    from explorer.errors import reason

    for change, words in (({"pad_token_id": [1]}, "doesn't match any type in (int, NoneType)"), ({"rms_norm_eps": "x"}, "Field 'rms_norm_eps' expected float, got str")):
        with pytest.raises(Exception) as caught:  # of huggingface_hub's own kind
            configuration.AutoConfig.for_model(**{**LLAMA, **change})
        assert words in reason(caught.value) and "Errors:" not in reason(caught.value) and len(reason(caught.value)) < 200
    assert reason(KeyError("zzz")) == "KeyError: 'zzz'" and reason(ValueError()) == "ValueError"
