"""A tape is the model: its loops, written out, are the recording of the whole model, event for event, and at sizes nobody traced."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

from explorer.catalog import Card, find_card, find_model, lengths
from explorer.estimator.program import ALLOCATE, BACKWARD, END_OF_FORWARD, ENTER, FORWARD, FREE, GRADIENT, LEAVE, MATMUL
from explorer.estimator.tape import Key, Tape, column_sum_scratch
from explorer.estimator.tapes import key as key_of
from explorer.setup import Setup
from tests.catalog.tiny import TINY

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

DEEPER = {
    "CLIP": {"text_config": {**TINY["CLIP"]["text_config"], "num_hidden_layers": 7}, "vision_config": {**TINY["CLIP"]["vision_config"], "num_hidden_layers": 8}},
    "Whisper": {"encoder_layers": 8, "decoder_layers": 9},
    "T5": {"num_layers": 8, "num_decoder_layers": 9},
    "GPT-2": {"n_layer": 9},
    "InternVL": {"text_config": {**TINY["InternVL"]["text_config"], "num_hidden_layers": 9}, "vision_config": {**TINY["InternVL"]["vision_config"], "num_hidden_layers": 8}},
    "Gemma-2": {"num_hidden_layers": 16, "sliding_window": 32, "max_position_embeddings": 512},
}
"""Layers enough that the recorder leaves some out; Gemma-2 repeats in twos."""

CASES = {
    "GPT-2": ("GPT-2", "bf16", "H200", {}),
    "Llama fp32": ("Llama", "fp32", None, {}),
    "Llama": ("Llama", "bf16", "A100-80GB", {}),
    "Llama checkpointed": ("Llama", "bf16", "H200", {"gradient_checkpointing": True}),
    "Llama reentrant, eager, T4": ("Llama", "fp16", "T4", {"gradient_checkpointing": {"use_reentrant": True}, "attention": "eager"}),
    "Llama padded": ("Llama", "bf16", "H200", {"padding": True}),
    "Llama one sample": ("Llama", "bf16", "H200", {"micro_batch": 1}),
    "Mixtral": ("Mixtral", "bf16", "H200", {}),
    "Gemma-2 beyond its window": ("Gemma-2", "bf16", "H200", {"sequence": 64}),
    "BERT": ("BERT", "fp16", "V100-32GB", {}),
    "ViT": ("ViT", "fp16", "H200", {}),
    "CLIP": ("CLIP", "fp16", "H200", {}),
    "CLIP with frozen towers": ("CLIP", "bf16", "H200", {"trainable": ("visual_projection*", "text_projection*")}),
    "T5": ("T5", "bf16", "H200", {}),
    "Whisper": ("Whisper", "fp16", "H200", {}),
    "InternVL": ("InternVL", "bf16", "H200", {}),
    "InternVL padded, with a frozen tower": ("InternVL", "bf16", "A100-80GB", {"padding": True, "trainable": ("model.language_model*", "lm_head*")}),
}
FRESH = {"batch": 4, "sequence": 15, "target_sequence": 13, "patches": 36}
"""Sizes that no recording is made at."""


@cache
def recorded(name: str):
    """(setup, model, key, the tape that would ship, one trace of the whole model at FRESH)."""
    from explorer.estimator.recorder import _Recording, make_tape

    family, precision, card, job = CASES[name]
    config = {**TINY[family], **DEEPER.get(family, {"num_hidden_layers": 8})}
    setup = Setup(**{"model": config, "micro_batch": 2, **job})
    model = find_model(config)
    gpu: Card | None = find_card(card) if card else None
    key = key_of(setup, precision, model, lengths(setup, model), gpu)
    tape = make_tape(setup, key)
    whole = _Recording(setup, model, key, None)
    trace = whole._trace(whole._basis(), tuple(fresh_point(tape, key)[v] for v in tape.variables))
    return setup, model, key, tape, trace


def fresh_point(tape: Tape, key: Key) -> dict[str, int]:
    at = {"batch": 1, **{name: FRESH[name] for name in tape.variables}}
    if key.beyond_window:
        at["sequence"] += tape.window
    return at


@pytest.mark.parametrize("name", CASES)
def test_loops_written_out_are_the_whole_models_recording(name):
    _, _, _, tape, trace = recorded(name)
    flat = tape.unrolled
    assert any(len(step) > 1 for step in tape.program), "nothing was left out: the test would prove nothing"
    order, owners, hooks, forward_end = _flat(trace.events, tape)
    np.testing.assert_array_equal(flat.order, order)
    np.testing.assert_array_equal(flat.owners, owners)
    np.testing.assert_array_equal(flat.categories, [trace.categories[block] for block in range(1, len(owners) + 1)])
    assert flat.hooks == tuple(hooks)
    assert flat.forward_end == forward_end


def _flat(events, tape: Tape):
    """A trace in a tape's words."""
    modules = {name: i for i, name in enumerate(tape.modules)}
    parameters = {p[0]: i for i, p in enumerate(tape.parameters)}
    order, owners, hooks, forward_end = [], [], [], -1
    for kind, *rest in events:
        if kind == ALLOCATE:
            order.append(rest[0])
            owners.append(modules[rest[3]])
        elif kind == FREE:
            order.append(-rest[0])
        elif kind == GRADIENT:
            hooks.append((len(order), kind, parameters[rest[0]], rest[1]))
        elif kind == END_OF_FORWARD:
            forward_end = len(order)
        elif kind == MATMUL:
            hooks.append((len(order), kind, rest[0], FORWARD if forward_end < 0 else BACKWARD))
        else:
            hooks.append((len(order), kind, modules[rest[0]], rest[1]))
    return order, owners, hooks, forward_end


@pytest.mark.parametrize("name", CASES)
def test_sizes_nobody_traced_are_a_fresh_traces(name):
    _, _, key, tape, trace = recorded(name)
    sizes = tape.values(fresh_point(tape, key))[tape.unrolled.size_rows]
    np.testing.assert_array_equal(sizes, [_size(event) for event in trace.events if event[0] == ALLOCATE])


def _size(event) -> int:
    _, _, n_bytes, how, _ = event
    if how is None:
        return n_bytes
    if how.columns:
        return column_sum_scratch(how.length, how.columns)
    return 0 if how.length <= how.above else n_bytes


@pytest.mark.parametrize("name", CASES)
def test_every_block_is_freed_once_and_every_gradient_handed_over(name):
    _, _, _, tape, _ = recorded(name)
    flat = tape.unrolled
    blocks = len(flat.size_rows)
    assert sorted(flat.order[flat.order > 0]) == list(range(1, blocks + 1))
    frees = -flat.order[flat.order < 0]
    assert len(set(frees.tolist())) == len(frees)
    position = {int(event): i for i, event in enumerate(flat.order)}
    assert all(position[block] < position[-block] for block in frees.tolist())
    handed = [parameter for _, kind, parameter, _ in flat.hooks if kind == GRADIENT]
    kept = {block for _, kind, _, block in flat.hooks if kind == GRADIENT}
    assert set(range(1, blocks + 1)) - set(frees.tolist()) <= kept
    assert len(set(handed)) == len(handed)
    assert {tape.parameters[i][0] for i in handed} <= {p.name for p in tape.model_parameters() if p.trainable}
    depth = 0
    for _, kind, *_ in flat.hooks:
        depth += {ENTER: 1, LEAVE: -1}.get(kind, 0)
        assert depth >= 0
    assert depth == 0
    assert 0 < flat.forward_end < len(flat.order)


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_the_models(name):
    from explorer.workload import build_model

    setup, model, _, tape, _ = recorded(name)
    for patches in (16, 36) if "patches" in tape.variables else (0,):
        at = setup.replace(image_size=round(patches**0.5) * model.patch_size) if patches else setup
        built = build_model(model, at, device="meta", dtype=torch.bfloat16)
        assert [(p.name, p.numel, p.trainable) for p in tape.model_parameters(patches)] == [(n, p.numel(), p.requires_grad) for n, p in built.named_parameters()]
    assert [tuple(tape.parameters[i][0] for i in own) for own in tape.direct] == [tuple(_own(name, m, built)) for name, m in built.named_modules()]


def _own(name, module, built):
    first = {id(p): n for n, p in built.named_parameters()}
    return [first[id(p)] for p in module._parameters.values() if p is not None]


@pytest.mark.parametrize("name", CASES)
def test_json_is_exact(name):
    _, _, _, tape, _ = recorded(name)
    text = json.dumps(tape.to_json())
    again = Tape.from_json(json.loads(text))
    assert json.dumps(again.to_json()) == text
    for field in ("key", "variables", "exponents", "parameters", "modules", "direct", "layers", "segments", "program", "batch", "buffers_bytes", "window"):
        assert getattr(again, field) == getattr(tape, field), field
    for field in ("table", "lengths", "rounding"):
        np.testing.assert_array_equal(getattr(again, field), getattr(tape, field))
    np.testing.assert_array_equal(again.unrolled.order, tape.unrolled.order)


@pytest.mark.parametrize("name", CASES)
def test_the_batch_rows_are_the_batchs_tensors(name):
    from explorer.workload import make_batch

    setup, model, key, tape, _ = recorded(name)
    at = fresh_point(tape, key)
    job = setup.replace(micro_batch=at["batch"], **{n: at[n] for n in ("sequence", "target_sequence") if n in at}, **({"image_size": round(at["patches"] ** 0.5) * model.patch_size} if "patches" in at else {}))
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[key.dtype]
    batch = make_batch(model, job, device="meta", dtype=dtype)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in batch.values() if isinstance(t, torch.Tensor)}
    assert tape.values(at)[list(tape.batch)].tolist() == list(storages.values())


def test_layers_make_a_tape_longer_to_run_not_to_keep():
    """Thirty-two layers more: the same program."""
    from explorer.estimator.recorder import make_tape

    _, _, key, tape, _ = recorded("Llama")
    deep = make_tape(Setup(model={**TINY["Llama"], "num_hidden_layers": 40}, micro_batch=2), key)
    assert deep.segments == tape.segments and deep.program == tape.program
    assert len(deep.unrolled.order) > 4 * len(tape.unrolled.order)
