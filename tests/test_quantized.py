"""Weights in 4 bit: transformers' own choice of layers, bitsandbytes' arithmetic by hand, and what a recording makes of both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from explorer import estimate
from explorer.catalog import find_model, lengths
from explorer.errors import BadInput, CouldNotRun
from explorer.setup import Setup
from tests.catalog.tiny import TINY

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from explorer.quantized import Linear4bit, packed_away  # noqa: E402 (needs torch)
from explorer.workload import build_model  # noqa: E402

SECTION = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
LORA = {"r": 4, "target_modules": "all-linear"}


def setup_of(family="Llama", section=SECTION, lora=LORA, **job):
    return Setup(**{"model": {**TINY[family], "quantization_config": section}, "micro_batch": 2, "lora": lora, **job})


def built(setup, device="meta", dtype=torch.bfloat16):
    return build_model(find_model(setup.model), setup, device=device, dtype=dtype)


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "OPT", "Mixtral", "BERT"])
def test_the_layers_are_those_that_transformers_replaces(family, monkeypatch):
    """Its own function is run, with a class in the place of the package that is not there."""
    from transformers import BitsAndBytesConfig
    from transformers.integrations import bitsandbytes as theirs
    from transformers.quantizers.base import HfQuantizer

    class Marked(torch.nn.Module):
        def __init__(self, *arguments, **_):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(arguments[1], arguments[0], device="meta"))

    setup = Setup(model=TINY[family], micro_batch=2)
    plain = built(setup)
    monkeypatch.setattr(theirs, "bnb", SimpleNamespace(nn=SimpleNamespace(Linear4bit=Marked)), raising=False)
    theirs.replace_with_bnb_linear(plain, HfQuantizer.get_modules_to_not_convert(plain, None, plain._keep_in_fp32_modules), BitsAndBytesConfig(load_in_4bit=True))
    expected = {name: module.weight.numel() for name, module in plain.named_modules() if isinstance(module, Marked)}
    ours = {name: module.whole_numel for name, module in built(setup_of(family, lora=None, trainable=("*norm*", "*ln_*", "*LayerNorm*"))).named_modules() if isinstance(module, Linear4bit)}
    assert ours == expected and expected


@pytest.mark.parametrize(("double", "scale_bytes"), [(False, 4.0), (True, 1 + 4 / 256)], ids=["fp32 scales", "double quantised"])
def test_storage_by_hand(double, scale_bytes):
    """Half a byte an element; a scale for every 64, in fp32, or in one byte and a further one in fp32 for every 256 scales."""
    model = built(setup_of(section={**SECTION, "bnb_4bit_use_double_quant": double}))
    layers = [m for m in model.modules() if isinstance(m, Linear4bit)]
    assert len(layers) == 2 * 7
    for layer in layers:
        n = layer.in_features * layer.out_features
        assert layer.weight.numel() * layer.weight.element_size() == n // 2
        assert not layer.weight.requires_grad
        assert sum(b.numel() * b.element_size() for b in layer.buffers()) == pytest.approx(n / 64 * scale_bytes, abs=4)
    assert packed_away(model) == sum(m.in_features * m.out_features * 3 // 4 for m in layers)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_estimate_counts_whole_weights_and_holds_packed_ones(stage):
    """Against the same job with whole weights: as many parameters, and less of them in memory by what 4 bit saves."""
    job = {"sequence": 32, "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000}}}
    packed, whole = (estimate(setup_of(section=section, **job), largest=False) for section in (SECTION, None))
    assert (packed.parameters, packed.trainable_parameters) == (whole.parameters, whole.trainable_parameters)
    elements = 2 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64)
    assert whole.at_peak["parameters"] - packed.at_peak["parameters"] == pytest.approx(elements * (2 - 0.5 - 4 / 64), abs=512 * 20)
    assert any("derived from what bitsandbytes stores" in note for note in packed.notes)
    assert stage < 3 or any("bnb_4bit_quant_storage" in note for note in packed.notes)


def traced(setup):
    from explorer.estimator.recorder import _Recording
    from explorer.estimator.tapes import key

    model = find_model(setup.model)
    recording = _Recording(setup, model, key(setup, "bf16", model, lengths(setup, model), None), None)
    return recording._trace(recording._basis(), (2, 24))


def test_a_whole_weight_lives_for_a_moment_forward_and_backward():
    """One of its own size a layer and direction, made and freed inside its layer; nothing more is saved than with whole weights."""
    from explorer.estimator.program import ALLOCATE, END_OF_FORWARD, FREE

    setup = setup_of(lora={"r": 4, "target_modules": ["q_proj"]})
    trace = traced(setup)
    kept = [block for block, category in trace.categories.items() if category == 0]
    assert sum(e[2] for e in trace.events if e[0] == ALLOCATE and e[1] in kept) == _kept_bytes(setup_of(section=None, lora={"r": 4, "target_modules": ["q_proj"]}))
    middle = next(i for i, e in enumerate(trace.events) if e[0] == END_OF_FORWARD)
    freed = {e[1]: i for i, e in enumerate(trace.events) if e[0] == FREE}
    whole = 2 * 32 * 64
    for part in (range(middle), range(middle, len(trace.events))):
        mine = [trace.events[i] for i in part if trace.events[i][0] == ALLOCATE and trace.events[i][4].endswith("layers.1.mlp.up_proj") and trace.events[i][2] == whole and freed[trace.events[i][1]] in part]
        assert len(mine) == 1


def _kept_bytes(setup) -> int:
    from explorer.estimator.program import ALLOCATE

    trace = traced(setup)
    return sum(e[2] for e in trace.events if e[0] == ALLOCATE and trace.categories[e[1]] == 0)


def test_weights_that_cannot_train_are_not_trained():
    with pytest.raises(BadInput, match="lora: is null, and weights in 4 bit do not train"):
        built(setup_of(lora=None))
    assert not any(p.requires_grad for n, p in built(setup_of(lora=None, trainable=("*norm*", "*proj*"))).named_parameters() if "proj" in n)


def test_what_is_not_followed_is_said():
    with pytest.raises(CouldNotRun, match="the probe does not build"):
        built(setup_of(), device="cpu")
    with pytest.raises(BadInput, match="bnb_4bit_compute_dtype is \"int8\"; choose one of"):
        built(setup_of(section={**SECTION, "bnb_4bit_compute_dtype": "int8"}))
    with pytest.raises(CouldNotRun, match=r"deepspeed.torch_autocast: with weights in 4 bit is not modelled"):
        estimate(setup_of(deepspeed={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}), largest=False)
