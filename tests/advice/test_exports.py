"""What is exported starts: its lines are run as Python, its config goes through transformers and into `deepspeed.initialize`, and a step is taken."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from explorer.dsconfig import resolve
from explorer.dsconfig.read import read
from explorer.dsconfig.write import write
from explorer.setup import Setup
from tests.measure.jobs import LLAMA

_AUTO = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
_BATCH = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping"), "auto")


def job(stage: int, precision: str = "bf16", *, trainer: dict[str, Any] | None = None, optimizer: str | dict | None = "AdamW", zero: dict[str, Any] | None = None, top: dict[str, Any] | None = None, **fields: Any) -> Setup:
    """A job of a quarter of a million parameters. `precision` may be "auto", which the Trainer's arguments then say."""
    config: dict[str, Any] = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000, **(zero or {})}}
    if precision != "fp32":
        config[precision] = {"enabled": "auto" if trainer is not None else True}
        trainer = None if trainer is None else {**trainer, precision: True}
    if optimizer is not None:
        config["optimizer"] = optimizer if isinstance(optimizer, dict) else {"type": optimizer, "params": _AUTO if trainer is not None else {"lr": 1e-4}}
    return Setup(**{"model": LLAMA, "micro_batch": 2, "sequence": 16, "deepspeed": {**config, **(top or {})}, "trainer": trainer, **fields})


_CPU, _NVME = {"device": "cpu", "pin_memory": False}, {"device": "nvme", "nvme_path": "/local_nvme"}
_WARMUP = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}}}
_SIZES = dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto")
SETUPS = {
    # without the Trainer
    "plain, stage 0": job(0),
    "plain, stage 0 in fp32": job(0, "fp32"),
    "plain, stage 1": job(1, top={"gradient_clipping": 0.5}),
    "plain, stage 1 in fp16": job(1, "fp16"),
    "plain, stage 1, SGD": job(1, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, top={"zero_allow_untested_optimizer": True}),
    "plain, stage 2": job(2, zero={"overlap_comm": True, "contiguous_gradients": True, "allgather_partitions": True}),
    "plain, stage 2 offloaded": job(2, zero={"offload_optimizer": _CPU}),
    "plain, stage 2, accumulation": job(2, top={"gradient_accumulation_steps": 3, "train_batch_size": 6}),
    "plain, stage 2, gradients in fp32": job(2, top={"data_types": {"grad_accum_dtype": "fp32"}}),
    "plain, stage 2, a schedule": job(2, top={"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 10}}}),
    "plain, stage 2, torch's Adam": job(2, optimizer={"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True, "adam_w_mode": False}}),
    "plain, stage 3": job(3, zero={"stage3_prefetch_bucket_size": 20_000, "stage3_param_persistence_threshold": 1000}),
    "plain, stage 3 offloaded whole": job(3, zero={"offload_optimizer": _CPU, "offload_param": _CPU}),
    "plain, stage 3 on a disk": job(3, zero={"offload_optimizer": _NVME}),
    "plain, stage 3 in fp16": job(3, "fp16", zero={"sub_group_size": 1e9}),
    "plain, stage 3, own keys": job(3, top={"my_own": {"kept": [1]}, "steps_per_print": 50, "wall_clock_breakdown": False}),
    # the Trainer
    "trainer, stage 0": job(0, trainer={}, top=_BATCH),
    "trainer, stage 1": job(1, trainer={"learning_rate": 3e-4, "weight_decay": 0.1}, top=_BATCH),
    "trainer, stage 1 in fp32": job(1, "fp32", trainer={}, top=_BATCH),
    "trainer, stage 2": job(2, trainer={"max_grad_norm": 0.3}, top=_BATCH),
    "trainer, stage 2 in fp16": job(2, "fp16", trainer={}, top=_BATCH),
    "trainer, stage 2 offloaded": job(2, trainer={"adam_beta2": 0.95}, zero={"offload_optimizer": _CPU}, top=_BATCH),
    "trainer, stage 2, a schedule": job(2, trainer={"warmup_steps": 5}, top={**_BATCH, **_WARMUP}),
    "trainer, stage 2, a schedule that DeepSpeed refuses as it was": job(2, trainer={}, top={**_BATCH, **_WARMUP}),
    "trainer, stage 2, accumulation": job(2, trainer={"gradient_accumulation_steps": 4}, top=_BATCH, micro_batch=3),
    "trainer, stage 2, its own AdamW": job(2, trainer={"optim": "adamw_torch"}, optimizer=None, top=_BATCH),
    "trainer, stage 2, its own SGD": job(2, trainer={"optim": "sgd"}, optimizer=None, top=_BATCH),
    "trainer, stage 2, own AdamW offloaded": job(2, trainer={}, optimizer=None, zero={"offload_optimizer": _CPU}, top=_BATCH),
    "trainer, stage 2, checkpointing": job(2, trainer={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, top=_BATCH, gradient_checkpointing=True),
    "trainer, stage 3": job(3, trainer={}, zero=_SIZES, top=_BATCH),
    "trainer, stage 3 offloaded whole": job(3, trainer={}, zero={**_SIZES, "offload_optimizer": _CPU, "offload_param": _CPU}, top=_BATCH),
    "trainer, stage 3 on a disk": job(3, trainer={}, zero={**_SIZES, "offload_param": _NVME, "offload_optimizer": _NVME}, top=_BATCH),
    "trainer, stage 3, numbers in the config": job(3, trainer={"learning_rate": 1e-4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.7}, optimizer={"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999]}}, top={"gradient_accumulation_steps": 2, "gradient_clipping": 0.7, "train_batch_size": 4}),
    "trainer, no batch keys at all": job(2, trainer={"gradient_accumulation_steps": 2}),
    "trainer, an accumulation that only the config says": job(2, trainer={}, top={"gradient_accumulation_steps": 2}),
}
REPLACED = {name: replaced for name in SETUPS if (replaced := [*(["fp16"] if "fp16" in name else []), *(["nvme"] if "disk" in name else [])])}
"""What the CPU accelerator does not have: fp16, which is then bf16, and a disk's asynchronous reads, which is then host memory. Nothing else is replaced."""


_ZERO = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000}, "bf16": {"enabled": "auto"}}
_MICRO = {**_ZERO, "train_micro_batch_size_per_gpu": "auto"}
AS_PASTED = {
    # the config, the arguments besides bf16, what is told, what happens
    "no batch": (_ZERO, {}, "batch-missing", "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided"),
    "accumulation left out": (_MICRO, {"gradient_accumulation_steps": 2}, "trainer-not-filled", {"accumulation": 1}),
    "accumulation left out of a total": ({**_MICRO, "train_batch_size": "auto"}, {"gradient_accumulation_steps": 2}, "trainer-not-filled", "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step"),
    "accumulation in the config alone": ({**_MICRO, "gradient_accumulation_steps": 2}, {}, "trainer-disagrees", "ds gradient_accumulation_steps=2 vs hf gradient_accumulation_steps=1"),
    "clipping left out": (_MICRO, {"max_grad_norm": 0.25}, "trainer-not-filled", {"clipping": 1.0}),
    "no step to warm up in": ({**_MICRO, **_WARMUP}, {}, "no-warmup", "warmup_num_steps must be a positive integer, got 0"),
    "a rate that differs": ({**_MICRO, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, {}, "trainer-disagrees", "ds optimizer.params.lr=0.0001 vs hf learning_rate=5e-05"),
}
"""Configs that are not exported but run as people paste them beside their arguments."""


def arguments_of(more: dict[str, Any]) -> str:
    given = {"output_dir": "out", "per_device_train_batch_size": 2, "bf16": True, "deepspeed": "ds_config.json", **more}
    return f"training_args = TrainingArguments({', '.join(f'{name}={value!r}' for name, value in given.items())})\n"


@pytest.fixture(scope="module")
def started(root) -> dict[str, dict[str, Any]]:
    """What came of each, all in one process."""
    for package in ("torch", "transformers", "deepspeed", "accelerate"):
        pytest.importorskip(package)
    lines = []
    for name, setup in SETUPS.items():
        out = write(setup)
        lines.append(json.dumps({"way": name.partition(",")[0], "config": dict(out.config), "config_text": out.config_text, "arguments_text": out.arguments_text, "model": LLAMA}))
    for config, more, *_ in AS_PASTED.values():
        lines.append(json.dumps({"way": "trainer", "config_text": json.dumps(config), "arguments_text": arguments_of(more), "model": LLAMA}))
    done = subprocess.run([sys.executable, "-m", "tests.advice.export_starts"], input="\n".join(lines) + "\n", cwd=root, capture_output=True, text=True, check=False, timeout=300)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(SETUPS) + len(AS_PASTED), done.stderr[-3000:]
    return dict(zip([*SETUPS, *AS_PASTED], answers, strict=True))


def test_there_are_thirty():
    assert len(SETUPS) >= 30


@pytest.mark.parametrize("name", SETUPS)
def test_an_export_starts_and_is_the_job_that_was_exported(started, name):
    answer, settings = started[name], resolve(SETUPS[name])
    assert "error" not in answer, answer["error"]
    assert answer["replaced"] == REPLACED.get(name, [])
    said = (settings.stage, SETUPS[name].micro_batch, settings.gradient_accumulation_steps, settings.gradient_clipping, settings.reduce_bucket_size, settings.precision != "fp32")
    assert tuple(answer[key] for key in ("stage", "micro_batch", "accumulation", "clipping", "bucket", "bf16")) == said
    assert answer["steps"] == 1


@pytest.mark.parametrize(("name", "optimizer"), [
    ("plain, stage 2", "FusedAdam"), ("plain, stage 2 offloaded", "DeepSpeedCPUAdam"), ("plain, stage 2, torch's Adam", "Adam"), ("plain, stage 1, SGD", "SGD"),
    ("trainer, stage 2", "FusedAdam"), ("trainer, stage 2, its own AdamW", "AdamW"), ("trainer, stage 2, its own SGD", "SGD"), ("trainer, stage 2, own AdamW offloaded", "DeepSpeedCPUAdam"),
])
def test_its_optimizer_is_the_one_that_was_meant(started, name, optimizer):
    assert started[name]["optimizer"] == optimizer


@pytest.mark.parametrize("name", AS_PASTED)
def test_what_is_told_of_a_paste_is_what_happens(started, name):
    config, more, told, happens = AS_PASTED[name]
    pasted = read(f"{json.dumps(config)}\n{arguments_of(more)}")
    assert told in {f.id for f in (*pasted.coercions, *resolve(pasted.onto(SETUPS["plain, stage 2"])).findings)}
    if isinstance(happens, str):
        assert happens in started[name]["error"]
    else:
        assert happens.items() <= started[name].items()
