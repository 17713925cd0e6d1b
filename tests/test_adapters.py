"""LoRA by the real peft: what trains, what is refused, and what an estimate makes of it."""

from __future__ import annotations

import math
from functools import cache

import pytest

from explorer.catalog import find_model, lengths
from explorer.dsconfig import resolve
from explorer.errors import BadInput
from explorer.estimator.program import GRADIENT
from explorer.setup import Setup
from tests.catalog.tiny import TINY

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from explorer.workload import build_model, make_batch  # noqa: E402 (needs torch)

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
SAVED = {**LORA, "modules_to_save": ["lm_head"]}
DEEP = {**TINY["Llama"], "num_hidden_layers": 8}


def setup_of(lora, model=DEEP, **job):
    return Setup(**{"model": model, "micro_batch": 2, "sequence": 32, "lora": lora, **job})


def built(lora, device="cpu", dtype=torch.float32, **job):
    setup = setup_of(lora, **job)
    model = find_model(setup.model)
    return build_model(model, setup, device=device, dtype=dtype), make_batch(model, setup, device=device, dtype=dtype)


@cache
def tape_of(saved: bool):
    from explorer.estimator.recorder import make_tape
    from explorer.estimator.tapes import key

    setup = setup_of(SAVED if saved else LORA)
    model = find_model(setup.model)
    return make_tape(setup, key(setup, "bf16", model, lengths(setup, model), None))


@pytest.mark.parametrize("checkpointing", [False, True, {"use_reentrant": True}], ids=["plain", "non-reentrant", "reentrant"])
def test_adapters_alone_get_gradients(checkpointing):
    model, batch = built(LORA, gradient_checkpointing=checkpointing)
    loss = model(**batch).loss
    loss.backward()
    assert math.isfinite(loss.item())
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)


@pytest.mark.parametrize("saved", [False, True])
def test_a_tapes_parameters_are_those_of_pefts_own_model(saved):
    """Against `get_peft_model` as a person calls it, in DeepSpeed's order."""
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = peft.get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(**DEEP)), peft.LoraConfig(**(SAVED if saved else LORA)))
    assert [(p.name, p.numel, p.trainable) for p in tape_of(saved).model_parameters()] == [(n, p.numel(), p.requires_grad) for n, p in theirs.named_parameters()]


@pytest.mark.parametrize("saved", [False, True])
def test_a_tape_repeats_layers_with_their_adapters_and_hands_over_their_gradients_alone(saved):
    tape = tape_of(saved)
    assert [(x.path.rpartition(".")[2], x.units) for x in tape.layers] == [("layers", 8)]
    handed = {which for _, kind, which, _ in tape.unrolled.hooks if kind == GRADIENT}
    assert handed == {i for i, p in enumerate(tape.model_parameters()) if p.trainable}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("saved", [False, True])
def test_optimizer_states_are_the_adapters_alone(stage, saved):
    """fp32 masters and two moments of what trains, one rank's part of it; the frozen weights stay in bf16."""
    from explorer.estimator.replay import replay

    ranks = 4
    setup = setup_of(SAVED if saved else LORA, world_size=ranks, deepspeed={"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}})
    tape = tape_of(saved)
    stream, _ = replay(resolve(setup), tape, {"batch": 2, "sequence": 32}, 0)
    trained = [p.numel for p in tape.model_parameters() if p.trainable]
    frozen = [p.numel for p in tape.model_parameters() if not p.trainable]
    shares = {0: sum(trained), 2: math.ceil(sum(trained) / (2 * ranks)) * 2, 3: sum(math.ceil(n / ranks) for n in trained)}
    assert _alive(stream, "optimizer") == 12 * shares[stage]
    kept = {0: 2 * sum(frozen), 2: 2 * sum(frozen), 3: 2 * sum(math.ceil(n / ranks) for n in frozen)}
    flat = {0: 2 * sum(trained), 2: 2 * ranks * shares[2], 3: 2 * shares[3]}
    assert _alive(stream, "parameters") == kept[stage] + flat[stage] + tape.buffers_bytes


def _alive(stream, category):
    """Bytes of a category, step counters aside, once everything has run."""
    from explorer.profile import CATEGORIES

    alive = {}
    for event in stream.order.tolist():
        alive[abs(event)] = event > 0
    mine = [i - 1 for i, is_alive in alive.items() if is_alive and stream.categories[i - 1] == CATEGORIES.index(category)]
    return sum(int(stream.bytes[i]) for i in mine if stream.bytes[i] != 4)


def test_the_base_model_keeps_no_copy_of_inputs_for_frozen_weights():
    """A frozen linear layer's input need not be kept: less lives at the end of a LoRA's forward, but for the adapters' own."""
    import numpy as np

    from explorer.estimator.recorder import make_tape
    from explorer.estimator.tapes import key

    plain = setup_of(None)
    model = find_model(DEEP)
    whole = make_tape(plain, key(plain, "bf16", model, lengths(plain, model), None))

    def kept(tape):
        flat = tape.unrolled
        sizes = tape.values({"batch": 8, "sequence": 32})[flat.size_rows]
        alive = np.bincount(np.abs(flat.order[: flat.forward_end]), weights=np.sign(flat.order[: flat.forward_end]), minlength=len(sizes) + 1)[1:].astype(bool)
        return int(sizes[alive].sum())

    assert 0 < kept(tape_of(False)) < kept(whole)


REFUSED = {
    "a field that is none": ({"rank": 4}, "lora.rank: is not a field of peft's LoraConfig"),
    "a rank of nothing": ({"r": 0}, "lora: peft refuses it"),
    "a module that is not there": ({"r": 4, "target_modules": ["nothing"]}, "lora: peft refuses it"),
    "nothing to train": ({**LORA, "inference_mode": True}, "lora: leaves nothing to train"),
}


@pytest.mark.parametrize(("lora", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_peft_refuses_is_one_sentence(lora, sentence):
    with pytest.raises(BadInput, match=sentence):
        built(lora, device="meta")


def test_two_ways_to_say_what_trains_are_refused():
    with pytest.raises(BadInput, match="trainable: and lora both say what trains"):
        built(LORA, trainable=("lm_head*",))


@pytest.mark.parametrize("start", ["pissa", "olora", "gaussian"])
def test_how_adapters_begin_changes_no_shape(start):
    model, _ = built({**LORA, "init_lora_weights": start}, device="meta", dtype=torch.bfloat16)
    plain, _ = built(LORA, device="meta", dtype=torch.bfloat16)
    assert [(n, p.shape, p.dtype) for n, p in model.named_parameters()] == [(n, p.shape, p.dtype) for n, p in plain.named_parameters()]
