"""Run by test_exports.py in a process of its own: starts every exported job on DeepSpeed's CPU accelerator, as a person would save and run it.

A line of JSON on standard input is a case: its files' texts, the model's config. A line on standard output is what came of it.
What a CPU does not have is replaced in the open, by `for_a_cpu` and nothing else, and each replacement is in the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", ACCELERATE_TORCH_DEVICE="cpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1", DS_SKIP_CUDA_CHECK="1", OMP_NUM_THREADS="1")


def for_a_cpu(config: dict[str, Any], replaced: list[str]) -> dict[str, Any]:
    """The config with what the CPU accelerator has no code for replaced by what is nearest: fp16 by bf16, a disk by host memory."""
    config = json.loads(json.dumps(config))
    if "fp16" in config:
        replaced.append("fp16")
        section = config.pop("fp16")
        if "bf16" not in config:
            config["bf16"] = {"enabled": section.get("enabled", False)}
    for name in ("offload_optimizer", "offload_param"):
        section = config["zero_optimization"].get(name) or {}
        if section.get("device") == "nvme":
            replaced.append("nvme")
            section["device"] = "cpu"
    return config


def plain(case: dict[str, Any], replaced: list[str]) -> Any:
    """`deepspeed.initialize` with the export's full config, as a script without the Trainer has it."""
    import deepspeed
    import torch

    config = for_a_cpu(case["config"], replaced)
    if "optimizer" not in config:  # a script without the Trainer brings its own, and says so
        replaced.append("script's optimizer")
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-5}}
    model = build(case["model"])
    if config["zero_optimization"].get("stage") == 3:
        deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=torch.bfloat16 if config.get("bf16", {}).get("enabled") else torch.float32)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(**{name: torch.stack([value] * engine.train_micro_batch_size_per_gpu()) for name, value in row().items()}).loss)
        engine.step()
    return engine


def by_the_trainer(case: dict[str, Any], replaced: list[str]) -> Any:
    """The exported TrainingArguments, run as Python beside the exported ds_config.json, and a Trainer's first step."""
    from transformers import Trainer, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    Path("ds_config.json").write_text(json.dumps(for_a_cpu(json.loads(case["config_text"]), replaced)), encoding="utf-8")
    text = case["arguments_text"]
    if "fp16=True" in text:
        text = text.replace("fp16=True", "fp16=False").replace("bf16=False", "bf16=True")
    names: dict[str, Any] = {"TrainingArguments": lambda **given: TrainingArguments(**given, max_steps=1, save_strategy="no", report_to="none", disable_tqdm=True)}
    exec(text, names)
    arguments = names["training_args"]
    assert isinstance(arguments.hf_deepspeed_config, HfTrainerDeepSpeedConfig)
    trainer = Trainer(model=build(case["model"]), args=arguments, train_dataset=[row()] * 64)
    trainer.train()
    return trainer.model_wrapped


def compile_once() -> None:
    """DeepSpeed's optimizer for the host, once on a machine; a lock that a killed build left is cleared."""
    from explorer.dsconfig import resolve
    from explorer.measure import kernels
    from explorer.setup import Setup

    for zero in ({"stage": 2}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}):
        kernels.build(resolve(Setup(model="gpt2", micro_batch=1, deepspeed={"bf16": {"enabled": True}, "zero_optimization": zero, "optimizer": {"type": "AdamW"}})), lambda _: None)


def build(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def row() -> dict[str, Any]:
    import torch

    tokens = torch.arange(16) % 64
    return {"input_ids": tokens, "labels": tokens}


def facts(engine: Any) -> dict[str, Any]:
    """What DeepSpeed made of the config."""
    return {
        "stage": engine.zero_optimization_stage(), "micro_batch": engine.train_micro_batch_size_per_gpu(), "accumulation": engine.gradient_accumulation_steps(),
        "clipping": engine.gradient_clipping(), "bucket": engine.zero_reduce_bucket_size(), "bf16": engine.bfloat16_enabled(), "steps": engine.global_steps, "optimizer": type(engine.basic_optimizer).__name__,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed logs to standard output
    import deepspeed
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, DistributedType, PartialState
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import training_args

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    deepspeed.init_distributed(verbose=False)
    compile_once()
    training_args.is_torch_bf16_gpu_available = lambda: True  # it asks for a GPU; DeepSpeed's CPU accelerator has bf16
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
    for line in sys.stdin:
        case, replaced, answer = json.loads(line), [], {}
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            try:
                engine = (by_the_trainer if case["way"] == "trainer" else plain)(case, replaced)
                answer = facts(engine)
                engine.destroy()
            except Exception:
                answer["error"] = traceback.format_exc()[-1500:]
        AcceleratorState._reset_state(reset_partial_state=True)
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        print(json.dumps({**answer, "replaced": sorted(set(replaced))}), file=answers, flush=True)


if __name__ == "__main__":
    main()
