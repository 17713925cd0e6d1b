"""Every family's real model and batch: a finite loss and gradients for all parameters, on the CPU in fp32."""

from __future__ import annotations

import math

import pytest

from explorer.catalog import find_model, models
from explorer.errors import BadInput
from explorer.setup import Setup
from tests.catalog.tiny import TINY, TINY_TYPES

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from explorer.workload import build_config, build_model, make_batch  # noqa: E402 (needs torch)


def build(config, device="cpu", dtype=torch.float32, **job):
    setup = Setup(model=config, micro_batch=2, **job)
    model = find_model(setup.model)
    return model, setup, build_model(model, setup, device=device, dtype=dtype), make_batch(model, setup, device=device, dtype=dtype)


def test_the_tiny_models_cover_the_catalog():
    assert {config["model_type"] for config in (*TINY.values(), *TINY_TYPES.values())} == {model.model_type for model in models()}
    assert all(config["model_type"] == name for name, config in TINY_TYPES.items())


ALL_TINY = {**TINY, **TINY_TYPES}


@pytest.mark.parametrize("family", ALL_TINY)
def test_one_step(family):
    torch.manual_seed(0)
    _, _, model, batch = build(ALL_TINY[family])
    loss = model(**batch).loss
    assert loss.dim() == 0 and math.isfinite(loss.item())
    loss.backward()
    assert model.training
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert len(without) < 0.2 * len(list(model.parameters())), without
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert any(p.grad.abs().sum() > 0 for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("family", ALL_TINY)
def test_the_class_has_the_shape_that_lengths_say(family):
    model, setup, _, batch = build(ALL_TINY[family], device="meta", dtype=torch.bfloat16)
    from explorer.catalog import lengths

    at = lengths(setup, model)
    if at.sequence:
        assert tuple(batch["input_ids"].shape) == (2, at.sequence)
    if at.image_size and "image_grid_thw" in batch:
        assert tuple(batch["pixel_values"].shape) == (2 * at.patches, 3 * 2 * model.patch_size**2) and batch["image_grid_thw"].prod(-1).tolist() == [at.patches] * 2
    elif at.image_size:
        assert tuple(batch["pixel_values"].shape) == (2, 3, at.image_size, at.image_size)
        assert batch["pixel_values"].dtype == torch.bfloat16
    if at.target_sequence:
        assert tuple(batch["labels"].shape) == (2, at.target_sequence)
    assert ("labels" in batch) != ("return_loss" in batch)


@pytest.mark.parametrize("family", ["GPT-2", "Llama", "BERT", "ViT", "T5", "Whisper", "CLIP", "Gemma-2"])
@pytest.mark.parametrize("asked", [True, {"use_reentrant": True}], ids=["non-reentrant", "reentrant"])
def test_checkpointing_gives_the_same_gradients(family, asked):
    def gradients(**job):
        torch.manual_seed(0)
        _, _, model, batch = build(_without_dropout(TINY[family]), **job)
        torch.manual_seed(1)
        for p in model.parameters():
            torch.nn.init.uniform_(p, -0.1, 0.1)
        model(**batch).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain, checkpointed = gradients(), gradients(gradient_checkpointing=asked)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(gradient, checkpointed[name], msg=name)


def _without_dropout(config):
    off = {name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "dropout", "attention_dropout", "activation_dropout")}
    return {**config, **off}


@pytest.mark.parametrize(("asked", "expected"), [("sdpa", "sdpa"), ("eager", "eager")])
def test_the_attention_asked_for_is_the_one_built(asked, expected):
    _, _, model, _ = build(TINY["Llama"], device="meta", attention=asked)
    assert model.config._attn_implementation == expected


def test_frozen_parts_get_no_gradient():
    _, _, model, batch = build(TINY["CLIP"], trainable=("visual_projection*", "text_projection*"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"visual_projection.weight", "text_projection.weight"}
    model(**batch).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_patterns_that_match_nothing_are_bad_input():
    with pytest.raises(BadInput, match="trainable: matches no parameter: nothing"):
        build(TINY["GPT-2"], device="meta", trainable=("nothing*",))


def test_no_parameter_is_left_without_a_dimension():
    for family in ("CLIP", "SigLIP"):
        _, _, model, _ = build(TINY[family], device="meta")
        assert min(p.dim() for p in model.parameters()) == 1


def test_tied_weights_stay_one():
    _, _, model, _ = build(TINY["GPT-2"])
    assert model.lm_head.weight is model.transformer.wte.weight


def test_an_image_size_changes_the_position_table():
    _, setup, small, batch = build(TINY["CLIP"], device="meta")
    _, _, large, _ = build(TINY["CLIP"], device="meta", image_size=64)
    name = "vision_model.embeddings.position_embedding"
    assert small.get_submodule(name).num_embeddings == 4 * 4 + 1
    assert large.get_submodule(name).num_embeddings == 8 * 8 + 1
    assert build_config(find_model(TINY["ViT"]), Setup(model=TINY["ViT"], micro_batch=1, image_size=64)).image_size == 64


def test_a_padded_batch_has_a_mask_with_holes():
    _, _, model, batch = build(TINY["Llama"], padding=True)
    assert batch["attention_mask"].shape == batch["input_ids"].shape
    assert 0 < batch["attention_mask"].sum() < batch["attention_mask"].numel()
    assert math.isfinite(model(**batch).loss.item())


REFUSED = {
    "null for a size": {**TINY["Llama"], "hidden_size": None},
    "a list for a size": {**TINY["Llama"], "num_hidden_layers": [2]},
    "a text for a window": {**TINY["Mistral"], "sliding_window": "32"},
    "an activation that does not exist": {**TINY["Llama"], "hidden_act": "nothing"},
    "layer types of another length": {**TINY["Gemma-2"], "layer_types": ["sliding_attention"]},
    "a dropout that is none": {**TINY["GPT-2"], "resid_pdrop": 7},
}


@pytest.mark.parametrize("config", REFUSED.values(), ids=REFUSED)
def test_what_transformers_refuses_is_one_sentence(config):
    with pytest.raises(BadInput) as caught:
        build(config)
    assert caught.value.field == "model"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_one_image_a_sample_stands_in_its_tokens():
    """As many tokens as the model makes of an image, or transformers itself refuses the batch; and no other token is taken for one."""
    for size, tokens in ((16, 1), (32, 4), (64, 16)):
        _, _, model, batch = build(TINY["InternVL"], image_size=size)
        assert ((batch["input_ids"] == 127).sum(dim=1) == tokens).all()
        assert math.isfinite(model(**batch).loss.item())


def test_a_text_shorter_than_its_image_is_bad_input():
    with pytest.raises(BadInput, match=r"sequence: is 16, and one image alone takes 16 tokens of internvl; give at least 18, or a smaller image_size"):
        build(TINY["InternVL"], sequence=16, image_size=64)
    with pytest.raises(BadInput, match=r"image_size: is 24, which is not a multiple of internvl's patch of 16; take 16 or 32"):
        build(TINY["InternVL"], image_size=24)


def test_a_part_of_the_model_keeps_no_cache_either():
    assert build_config(find_model(TINY["InternVL"]), Setup(model=TINY["InternVL"], micro_batch=1)).text_config.use_cache is False
