"""What a paste says beside its settings: which file is there after all, how many GPUs a total is of, which release runs."""

from __future__ import annotations

import pytest

from explorer.advice import doctor
from explorer.dsconfig import resolve
from explorer.dsconfig.read import read
from explorer.setup import Setup

_CONFIG = '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}\n'
_USE = "TrainingArguments('o', bf16=True, per_device_train_batch_size=4, deepspeed='ds.json')\n"
_COMMAND = "$ deepspeed train.py --deepspeed ds.json --bf16 true\n"
_ACCELERATE = "compute_environment: LOCAL_MACHINE\ndeepspeed_config:\n  deepspeed_config_file: ds.json\ndistributed_type: DEEPSPEED\n"


def ids(text: str) -> set[str]:
    return {f.id for f in read(text).coercions}


@pytest.mark.parametrize("naming", [_USE, _COMMAND, _ACCELERATE, "TrainingArguments('o', deepspeed=config)\n"])
def test_a_file_that_is_pasted_too_is_not_asked_for(naming: str) -> None:
    assert "config-file" in ids(naming)
    assert "config-file" not in ids(f"{naming}\n{_CONFIG}") and "config-file" not in ids(f"{_CONFIG}\n{naming}")


def test_accelerates_own_answers_are_not_that_file() -> None:
    assert "config-file" in ids("accelerate launch --use_deepspeed --zero_stage 2 train.py --deepspeed ds.json --bf16 true\n")


@pytest.mark.parametrize("text", [
    "deepspeed==0.14.4\ntorch==2.3.0", "- DeepSpeed version: 0.14.4", "deepspeed info ................... 0.14.4, unknown, unknown", "deepspeed                 0.14.4",
    "[INFO] [logging.py:96:log_dist] [Rank 0] DeepSpeed info: version=0.14.4, git-hash=unknown", "with DeepSpeed v0.14.4 and", "**DeepSpeed version**: 0.14.4", "deepspeed_version: 0.14.4",
])
def test_the_release_that_the_text_names(text: str) -> None:
    pasted = read(text)
    assert pasted.changes == {"deepspeed_version": "0.14.4"} and [f.id for f in pasted.coercions] == ["release-read"]
    assert pasted.onto(Setup(model="gpt2", micro_batch=1)).deepspeed_version == "0.14.4"


@pytest.mark.parametrize("text", ["deepspeed>=0.14.4", "deepspeed --master_addr 10.0.0.1 train.py", "deepspeed", "transformers 4.46.0", "deepspeed 10.0.0.1", "deepspeed wheel compiled w. ...... torch 2.1, cuda 12.1"])
def test_what_is_no_release(text: str) -> None:
    assert "deepspeed_version" not in read(text).changes


_TOTAL = '{"train_batch_size": 128, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "zero_optimization": {"stage": 2}}\n'


def test_a_total_says_how_many_gpus_it_is_of() -> None:
    pasted = read(_TOTAL)
    assert pasted.changes["world_size"] == 4
    assert [f.text for f in pasted.coercions] == ["is 128, which is 4 samples × 8 accumulated × 4 GPUs: so many are taken"]
    assert read(f"{_TOTAL}$ deepspeed --num_gpus 2 train.py\n").changes["world_size"] == 2
    assert "world_size" not in read(_TOTAL.replace("128", "100")).changes


@pytest.mark.parametrize(("trainer", "told"), [({"learning_rate": 1e-5}, 1), ({"bf16": True}, 0), ({"bf16": False}, 0)])
def test_an_auto_that_is_fp32_is_told(trainer: dict, told: int) -> None:
    setup = Setup(model="gpt2", micro_batch=1, trainer=trainer, deepspeed={"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}})
    assert sum(f.id == "auto-is-fp32" for f in resolve(setup).findings) == told


def test_what_nobody_said_is_told() -> None:
    model = "model = AutoModelForCausalLM.from_pretrained('gpt2')\n"
    said = {r.id: r.text for r in doctor(f"{model}TrainingArguments('o', bf16=True, per_device_train_batch_size=2)\n").remarks}
    assert said["length-assumed"] == "sequence is not given: 1,024 tokens are taken, as is usual for gpt2" and "1 GPU is taken" in said["gpus-assumed"]
    known = {r.id for r in doctor(f"{model}$ deepspeed --num_gpus 1 t.py --per_device_train_batch_size 2 --max_seq_length 512 --bf16 true\n").remarks}
    assert not known & {"length-assumed", "gpus-assumed", "batch-assumed"}


def test_gpus_that_a_message_implies_are_taken_where_it_is_said() -> None:
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 GiB of which 1.20 GiB is free.\nmodel = AutoModelForCausalLM.from_pretrained('gpt2')\n"
    for config, gpus, words in (('{"train_batch_size": 32, "gradient_accumulation_steps": 8, "zero_optimization": {"stage": 2}}', 1, "answered for 1"), (_CONFIG, 4, "taken so")):
        consultation = doctor(message + config)
        assert consultation.error is None and consultation.setup.world_size == gpus
        assert words in next(r.text for r in consultation.remarks if r.id == "gpus-implied")
