"""What a recording keeps until backward is what autograd really saves: the real model on the CPU, its saved tensors counted, whole and with frozen parts."""

from __future__ import annotations

import pytest

from explorer.catalog import find_model, lengths
from explorer.setup import Setup
from tests.catalog.tiny import TINY

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

LOSS_BYTES = 4
"""The loss outlives the forward too, though nothing saves it."""
TOWER = ("text_model*", "text_projection*", "visual_projection*", "logit_scale")
LANGUAGE = ("model.language_model*", "lm_head*")

CASES = {
    "CLIP": ("CLIP", {}),
    "CLIP with a frozen vision tower": ("CLIP", {"trainable": TOWER}),
    "CLIP with frozen towers": ("CLIP", {"trainable": ("visual_projection*",)}),
    "Llama": ("Llama", {}),
    "Llama's head alone": ("Llama", {"trainable": ("lm_head*",)}),
    "Llama with LoRA": ("Llama", {"lora": {"r": 4}}),
    "Llama with LoRA and a head that trains whole": ("Llama", {"lora": {"r": 4, "target_modules": ["o_proj"], "modules_to_save": ["lm_head"]}}),
    "InternVL": ("InternVL", {}),
    "InternVL with a frozen vision tower": ("InternVL", {"trainable": LANGUAGE}),
}


def kept_by_the_recording(setup, model) -> dict[str, int]:
    """Bytes alive when forward ends, by module."""
    from explorer.estimator.program import ALLOCATE, END_OF_FORWARD, FREE
    from explorer.estimator.recorder import _Recording
    from explorer.estimator.tapes import key

    at = lengths(setup, model)
    recording = _Recording(setup, model, key(setup, "fp32", model, at, None), None)
    basis = recording._basis()
    trace = recording._trace(basis, tuple({"batch": at.micro_batch, "sequence": at.sequence, "patches": at.patches}[name] for name in basis.variables))
    alive = {}
    for kind, *rest in trace.events:
        if kind == END_OF_FORWARD:
            break
        if kind == ALLOCATE:
            alive[rest[0]] = rest[1], rest[3]
        elif kind == FREE:
            del alive[rest[0]]
    kept: dict[str, int] = {}
    for n_bytes, module in alive.values():
        kept[module] = kept.get(module, 0) + n_bytes
    return kept


def saved_by_autograd(setup, model) -> int:
    """Bytes of the storages that a real forward saves, parameters, buffers and the batch apart."""
    from explorer.workload import build_model, make_batch

    built, batch = (make(model, setup, device="cpu", dtype=torch.float32) for make in (build_model, make_batch))
    known = {t.untyped_storage().data_ptr() for t in (*built.parameters(), *built.buffers(), *(x for x in batch.values() if isinstance(x, torch.Tensor)))}
    saved = {}

    def save(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = built(**batch).loss
    assert loss.requires_grad
    return sum(t.untyped_storage().nbytes() for address, t in saved.items() if address not in known)


@pytest.mark.parametrize("name", CASES)
def test_a_recording_keeps_what_autograd_saves(name):
    family, job = CASES[name]
    setup = Setup(model=TINY[family], micro_batch=4, attention="eager", **job)
    model = find_model(setup.model)
    assert sum(kept_by_the_recording(setup, model).values()) == saved_by_autograd(setup, model) + LOSS_BYTES


def test_a_frozen_tower_keeps_only_what_its_projection_reads():
    setup = Setup(model=TINY["CLIP"], micro_batch=4, attention="eager", trainable=TOWER)
    kept = kept_by_the_recording(setup, find_model(setup.model))
    assert {part: n for part, n in kept.items() if part.startswith("vision_model")} == {"vision_model.post_layernorm": 4 * 4 * 32}
