"""Host memory: what a process loads, and what the Trainer's data loader holds."""

import dataclasses
import gc
import weakref

import pytest

from benchmarks.accuracy import host_parts
from benchmarks.accuracy.rows import read
from explorer.dsconfig.dataloader import Loader, loader
from explorer.errors import BadInput
from explorer.estimator.estimate import estimate
from explorer.estimator.host import PARTS, parts
from explorer.estimator.work import Work
from explorer.setup import Setup

_TEXT = Setup(model="gpt2", micro_batch=8, sequence=1024, trainer={}, deepspeed={"bf16": {"enabled": True}})
_IMAGES = Setup(model="google/vit-large-patch16-224", micro_batch=32, trainer={}, deepspeed={"bf16": {"enabled": True}})


def changed(setup: Setup, **arguments):
    return setup.replace(trainer={**setup.trainer, **arguments})


# --- the data loader


@pytest.mark.parametrize(("arguments", "pinned_batches"), [
    ({}, 2), ({"dataloader_num_workers": 1}, 3), ({"dataloader_num_workers": 4, "dataloader_prefetch_factor": 3}, 13), ({"dataloader_pin_memory": False}, 0),
])
def test_pinned_batches(arguments, pinned_batches):
    """8 × 1024 tokens of 8 bytes are 64 KiB: input_ids and labels, and no mask. 32 images of 3 × 224² in bf16 are 9.2 MiB, rounded up to 16; labels 256 bytes."""
    assert estimate(changed(_TEXT, **arguments), largest=False).host.pinned_bytes == pinned_batches * 2 * 65536
    assert estimate(changed(_IMAGES, **arguments), largest=False).host.pinned_bytes == pinned_batches * ((16 << 20) + 256)


def test_no_trainer_no_loader():
    assert estimate(_TEXT.replace(trainer=None), largest=False).host.pinned_bytes == 0


@pytest.mark.parametrize("arguments", [{"dataloader_num_workers": -1}, {"dataloader_num_workers": "many"}, {"dataloader_pin_memory": "perhaps"}])
def test_wrong_arguments_are_named(arguments):
    with pytest.raises(BadInput, match=next(iter(arguments))):
        loader(changed(_TEXT, **arguments))


class _Batches:
    """A data set of numbers; a batch is a tensor that is counted while it lives."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return index


class _Counted:
    """Collates in this process, and knows how many of its batches live."""

    def __init__(self):
        self.live = weakref.WeakSet()

    def __call__(self, rows):
        import torch

        batch = torch.tensor(rows, dtype=torch.float32)
        self.live.add(batch)
        return {"x": batch}


@pytest.mark.parametrize("arguments", [{}, {"dataloader_num_workers": 2}, {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 5}, {"dataloader_pin_memory": False}])
def test_the_trainers_own_loader_asks_for_it(arguments, tmp_path):
    """transformers' Trainer is asked: what it gives torch's loader is what is taken here."""
    torch = pytest.importorskip("torch")
    from transformers import Trainer, TrainingArguments

    model = torch.nn.Linear(1, 1)
    made = Trainer(model=model, args=TrainingArguments(output_dir=str(tmp_path), report_to="none", **arguments), train_dataset=_Batches()).get_train_dataloader()
    ours = loader(changed(_TEXT, **arguments))
    assert (made.pin_memory, made.num_workers) == (ours.pins, ours.workers)
    assert ours.batches == (made.num_workers * made.prefetch_factor + 1 if made.num_workers else 2)


def test_accelerate_holds_two_batches():
    """Its loader has the next batch before it lets the last one go: at most two live, seen where a batch is made."""
    pytest.importorskip("torch")
    import torch
    from accelerate.data_loader import DataLoaderShard

    class Moved:
        """Stands on another device than the batch did."""

        def __init__(self, batch):
            self.copy = batch.clone()

    counted, most = _Counted(), []

    def collate(rows):
        batch = counted(rows)
        gc.collect()
        most.append(len(counted.live))
        return batch

    shard = DataLoaderShard(_Batches(), batch_size=4, collate_fn=collate, device=None)
    for batch in shard:
        Moved(batch.pop("x"))
        del batch
    assert most[0] == 1
    assert isinstance(torch.tensor(most), torch.Tensor) and max(most[1:]) <= loader(_TEXT).batches


# --- what a process loads


def found(setup: Setup):
    work = Work(setup, None)
    return dict(parts(work.rules, work.tape, work.model, work.setup.attention))


def job(model, **zero):
    return Setup(model=model, micro_batch=2, deepspeed={"bf16": {"enabled": True}, "zero_optimization": zero})


@pytest.mark.parametrize("model", ["google/vit-large-patch16-224", "openai/clip-vit-base-patch32", "openai/whisper-small"])
def test_pixels_and_sound_are_convolved(model):
    assert found(job(model))["convolution"] and not found(job("bert-base-uncased"))["convolution"]


def test_parts_follow_the_job():
    plain, flat, third = found(job("gpt2")), found(job("gpt2", stage=2)), found(job("gpt2", stage=3))
    assert (plain["flat partitions"], plain["stage 3"]) == (0, 0)
    assert flat["flat partitions"] == third["stage 3"] == pytest.approx(1 - flat["layer kind"] / 60)
    assert found(job("gpt2", stage=2, offload_optimizer={"device": "cpu"}))["optimizer on the host"]
    assert not found(job("gpt2").replace(attention="eager"))["fused attention"]
    assert found(job("gpt2").replace(deepspeed={}))["fp32 weights"]
    assert found(job("gpt2").replace(lora={"r": 8, "target_modules": "all-linear"}))["frozen weights"]


def test_two_towers_are_more_kinds_of_layer():
    one, two = Work(job("google/vit-large-patch16-224"), None).tape, Work(job("openai/clip-vit-large-patch14"), None).tape
    assert one.layer_kinds < two.layer_kinds


def test_depth_is_no_new_kind():
    shallow, deep = Work(job("gpt2"), None).tape, Work(job("gpt2-medium"), None).tape
    assert shallow.layer_kinds == deep.layer_kinds


# --- the fit


@pytest.fixture(scope="module")
def readings():
    return [host_parts.Reading.of(row) for row in read() if row.name in _ROWS]


_ROWS = ("gpt2-z2", "bert-z2@1.20", "llama1b-z2", "llama1b-z3-of8", "vitl-z2-bf16", "clipb-z2-fp16", "whisper-z2", "t5-z2", "gpt2-z0-fp32", "mixtral-s-z0", "llama1b-z2off", "siglip-z2")


def test_rows_of_every_kind_are_met(readings):
    """Relative errors of the resident memory, of a dozen rows that differ in model, stage, precision and offload."""
    assert len(readings) == len(_ROWS)
    assert abs(host_parts.errors(readings, list(PARTS.values()))).max() < 0.10


def test_the_fit_finds_what_made_the_readings(readings):
    """Readings made from known parts give those parts back, where there are enough of them."""
    import numpy as np

    known = np.array([float(n) for n in PARTS.values()])
    many = [
        dataclasses.replace(r, counts=tuple(counts), measured_bytes=round(float(np.dot(counts, known))), tensors_bytes=0)
        for r in readings for counts in np.random.default_rng(len(r.name)).integers(0, 3, (20, len(known))) + np.array([3, *[0] * (len(known) - 1)])
    ]
    assert host_parts.fit(many) == pytest.approx(known, rel=1e-4)


def test_loader_without_a_trainer_is_unknown():
    assert loader(_TEXT.replace(trainer=None)) is None and loader(_TEXT) == Loader(True, 0, 2)
