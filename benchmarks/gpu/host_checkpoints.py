"""Host memory while a checkpoint is loaded, and while one is saved. Checkpoints are made on the spot from random weights."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.host_parts import environment, watched

_CONFIG = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 2048}
"""A Llama of 0.5 billion parameters: 2 GB in fp32, large against all else a process holds."""


def _folder(saved: str, form: str, shard: str) -> str:
    """A folder with a checkpoint, made in another process so that nothing of it stays in this one."""
    folder = tempfile.mkdtemp(prefix="host-checkpoint-")
    pid = os.fork()
    if not pid:
        try:
            _make(folder, saved, form, shard)
            os._exit(0)
        except BaseException:
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the checkpoint could not be made")
    return folder


def _make(folder: str, saved: str, form: str, shard: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(getattr(torch, saved))
    model = LlamaForCausalLM(LlamaConfig(**_CONFIG, dtype=saved))
    model.save_pretrained(folder, max_shard_size=shard)
    if form == "bin":
        for path in Path(folder).glob("*.safetensors*"):
            path.unlink()
        torch.save(model.state_dict(), Path(folder) / "pytorch_model.bin")


def load(argument: dict[str, Any]) -> dict[str, Any]:
    """`from_pretrained` as a person calls it, then the GPU."""
    folder = _folder(argument["saved"], argument["form"], argument.get("shard", "50GB"))
    try:
        import torch
        import transformers.trainer  # noqa: F401
        from transformers import LlamaForCausalLM

        keep = _zero_3(argument) if argument.get("zero3") else None
        if not argument.get("on_cpu"):
            torch.zeros(1, device="cuda")
        with watched() as watch:
            watch.mark("imported")
            keywords = {k: argument[k] for k in ("device_map", "low_cpu_mem_usage", "use_safetensors") if k in argument}
            model = LlamaForCausalLM.from_pretrained(folder, dtype=argument["dtype"] if argument["dtype"] == "auto" else getattr(torch, argument["dtype"]), **keywords)
            watch.mark("loaded")
            loaded = sum(p.numel() * p.element_size() for p in model.parameters())
            if not argument.get("zero3") and not argument.get("on_cpu"):
                model.to("cuda")
            watch.mark("moved")
        del keep
        return {"argument": argument, "checkpoint_bytes": sum(f.stat().st_size for f in Path(folder).iterdir()), "model_bytes": loaded, "watch": watch.result(), "environment": environment()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _zero_3(argument: dict[str, Any]) -> Any:
    """What tells transformers to load under zero.Init, in a process group of one."""
    import deepspeed
    import torch
    from transformers.integrations import HfDeepSpeedConfig

    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    deepspeed.init_distributed(verbose=False)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": argument["dtype"] == "bfloat16"}, "zero_optimization": {"stage": 3, **argument.get("zero", {})}}
    return HfDeepSpeedConfig(config)


def save(argument: dict[str, Any]) -> dict[str, Any]:
    """One step of the engine, then a save of the kind that is asked for."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    os.environ["TORCH_CUDA_ARCH_LIST"] = ".".join(map(str, torch.cuda.get_device_capability()))
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    folder = tempfile.mkdtemp(prefix="host-save-")
    zero = {"stage": argument["stage"], "stage3_gather_16bit_weights_on_model_save": True, **argument.get("zero", {})}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "steps_per_print": 1 << 30}
    try:
        with watched() as watch:
            torch.set_default_dtype(torch.bfloat16)
            with torch.device("cuda"):
                model = LlamaForCausalLM(LlamaConfig(**_CONFIG))
            torch.set_default_dtype(torch.float32)
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            ids = torch.zeros(1, 64, dtype=torch.long, device="cuda")
            for _ in range(2):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
            watch.mark("stepped")
        with watched() as saving:
            _saved(engine, argument["how"], folder)
        files = {p.name: p.stat().st_size for p in Path(folder).rglob("*") if p.is_file()}
        return {"argument": argument, "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()), "watch": watch.result(), "saving": saving.result(), "files": files, "environment": environment()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _saved(engine: Any, how: str, folder: str) -> None:
    if how == "checkpoint":
        engine.save_checkpoint(folder)
    elif how == "16bit":
        engine.save_16bit_model(folder)
    elif how == "pretrained":
        engine.module.save_pretrained(folder)
    else:  # as the Trainer does at stage 3: accelerate's get_state_dict, then save_pretrained
        engine.module.save_pretrained(folder, state_dict=engine._zero3_consolidated_16bit_state_dict())


_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
_BOTH = {**_OFFLOAD, "offload_param": {"device": "cpu"}}
CASES: dict[str, Any] = {
    "load-st32-auto": {"saved": "float32", "form": "safetensors", "dtype": "auto"},
    "load-st32-bf16": {"saved": "float32", "form": "safetensors", "dtype": "bfloat16"},
    "load-st16-auto": {"saved": "bfloat16", "form": "safetensors", "dtype": "auto"},
    "load-st16-fp32": {"saved": "bfloat16", "form": "safetensors", "dtype": "float32"},
    "load-bin32-auto": {"saved": "float32", "form": "bin", "dtype": "auto"},
    "load-bin32-bf16": {"saved": "float32", "form": "bin", "dtype": "bfloat16"},
    "load-bin16-auto": {"saved": "bfloat16", "form": "bin", "dtype": "auto"},
    "load-st32-shards": {"saved": "float32", "form": "safetensors", "dtype": "float32", "shard": "500MB"},
    "load-st16-device": {"saved": "bfloat16", "form": "safetensors", "dtype": "bfloat16", "device_map": "cuda"},
    "load-st32-device": {"saved": "float32", "form": "safetensors", "dtype": "float32", "device_map": "cuda"},
    "load-st32-zero3": {"saved": "float32", "form": "safetensors", "dtype": "float32", "zero3": True},
    "load-st16-zero3": {"saved": "bfloat16", "form": "safetensors", "dtype": "bfloat16", "zero3": True},
    "load-bin32-zero3": {"saved": "float32", "form": "bin", "dtype": "float32", "zero3": True},
    "load-shards-zero3": {"saved": "bfloat16", "form": "safetensors", "dtype": "bfloat16", "zero3": True, "shard": "200MB"},
    "load-zero3-offload": {"saved": "bfloat16", "form": "safetensors", "dtype": "bfloat16", "zero3": True, "zero": _BOTH},
    **{f"save-z{stage}-{how}{suffix}": {"stage": stage, "how": how, "zero": zero, "adam": "cpu_adam" if zero else "fused-adam"} for stage, how, suffix, zero in (
        (2, "checkpoint", "", {}), (2, "pretrained", "", {}), (2, "checkpoint", "-off", _OFFLOAD), (3, "checkpoint", "", {}), (3, "16bit", "", {}),
        (3, "trainer", "", {}), (3, "16bit", "-both", _BOTH), (3, "checkpoint", "-both", _BOTH), (3, "trainer", "-both", _BOTH))},
}


def run(argument: dict[str, Any]) -> dict[str, Any]:
    """One case, in this process."""
    return save(argument) if "stage" in argument else load(argument)


if __name__ == "__main__":
    import sys

    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(run(CASES[sys.argv[1]])))
