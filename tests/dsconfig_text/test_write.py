"""What is written says one thing in every file, and reads back as the job it was written from; that it starts is tests/advice/test_exports.py's."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys

import pytest

from explorer.dsconfig import resolve
from explorer.dsconfig.read import read
from explorer.dsconfig.write import model_lines, write
from explorer.setup import Setup

_STAGES = [{"stage": 0}, {"stage": 1}, {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 2e8}, {"stage": 3, "stage3_prefetch_bucket_size": "auto", "offload_param": {"device": "cpu"}}]
_REST = [
    {"bf16": {"enabled": True}},
    {"fp16": {"enabled": "auto"}, "gradient_accumulation_steps": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}}},
    {"gradient_clipping": 0.5, "my_own": {"kept": [1]}},
    {"bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "gradient_clipping": "auto"},
]
_TRAINERS = [None, {"fp16": False, "learning_rate": 3e-4, "optim": "adamw_torch"}]


def _setups():
    for zero, rest, trainer in itertools.product(_STAGES, _REST, _TRAINERS):
        args = trainer if trainer is None or not str(rest.get("bf16", {}).get("enabled")) == "True" else {**trainer, "bf16": True}
        if args is not None and "lr" in str(rest) and "auto" not in str(rest):
            args = {**args, "learning_rate": 1e-5, "adam_beta2": 0.95, "weight_decay": 0.1}
        if args is not None and "gradient_accumulation_steps" in rest:
            args = {**args, "gradient_accumulation_steps": rest["gradient_accumulation_steps"]}
        clip = {} if args is None or rest.get("gradient_clipping") != 0.5 else {"max_grad_norm": 0.5}
        yield Setup(model="gpt2", micro_batch=4, world_size=1, gradient_checkpointing=zero["stage"] == 2, deepspeed={"zero_optimization": zero, **rest}, trainer=None if args is None else {**args, **clip, "gradient_checkpointing": zero["stage"] == 2, **({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if zero["stage"] == 2 else {})})


SETUPS = list(_setups())


def test_there_are_enough():
    assert len(SETUPS) >= 30


@pytest.mark.parametrize("setup", SETUPS, ids=range(len(SETUPS)))
def test_what_is_written_reads_back_as_the_same_job(setup):
    out = write(setup)
    call = ast.parse(out.arguments_text).body[0].value
    arguments = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    again = read(out.arguments_text + "\n" + out.config_text)
    job = again.onto(Setup(model="gpt2", micro_batch=1))
    before, after = resolve(setup), resolve(job)
    for name in ("stage", "precision", "gradient_accumulation_steps", "gradient_clipping", "reduce_bucket_size", "offload_optimizer", "offload_param", "grad_accum_dtype", "overlap_comm"):
        assert getattr(before, name) == getattr(after, name), name
    assert job.micro_batch == setup.micro_batch == arguments["per_device_train_batch_size"]
    assert (job.gradient_checkpointing is not False) == (setup.gradient_checkpointing is not False)


def test_order_and_own_keys_are_kept():
    setup = Setup(model="gpt2", micro_batch=1, deepspeed={"my_own": 1, "zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}})
    keys = list(json.loads(write(setup).config_text))
    assert keys[:3] == ["my_own", "zero_optimization", "bf16"]


@pytest.mark.parametrize(("change", "launch"), [
    ({"world_size": 4}, "deepspeed --num_gpus 4 train.py"),
    ({"world_size": 16}, "deepspeed --num_gpus 8 --num_nodes 2 --hostfile hostfile train.py"),
    ({}, "deepspeed --num_gpus 1 train.py"),
])
def test_the_launch_command_reads_back(change, launch):
    setup = Setup(model="gpt2", micro_batch=1, **change)
    assert write(setup).launch == launch
    assert read(launch + " --bf16").changes["world_size"] == setup.world_size


def test_the_environment_reads_back():
    setup = Setup(model="gpt2", micro_batch=1, allocator={"expandable_segments": True, "max_split_size_mb": 128})
    text = write(setup).environment_text
    assert text == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:128\n"
    assert read(f"{text}deepspeed train.py --bf16").changes["allocator"] == setup.allocator


def test_the_models_lines():
    assert model_lines(Setup(model="gpt2", micro_batch=1, attention="eager")) == "model = GPT2LMHeadModel.from_pretrained('gpt2', attn_implementation='eager')  # sequence length 1024\n"


_TINY = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
MODELS = [
    Setup(model=_TINY, micro_batch=1, attention="eager"),
    Setup(model=_TINY, micro_batch=1, trainable=("transformer.h.1.*", "*.wte.*")),
    Setup(model=_TINY, micro_batch=1, lora={"r": 4, "target_modules": ["c_attn"], "modules_to_save": ["lm_head"]}),
    Setup(model=_TINY, micro_batch=1, gradient_checkpointing=True),
]
LOADS = """
import json, sys, torch
import transformers
from explorer.catalog import find_model
from explorer.dsconfig.write import model_lines
from explorer.setup import Setup
from explorer.workload import build_model
for line in sys.stdin:
    setup = Setup.from_job(json.loads(line))
    names = {name: getattr(transformers, name) for name in ("AutoConfig", "GPT2LMHeadModel")}
    exec(model_lines(setup), names)
    found, ours = names["model"], build_model(find_model(setup.model), setup, device="cpu", dtype=torch.float32)
    facts = [({n for n, p in m.named_parameters() if p.requires_grad}, {n: p.shape for n, p in m.named_parameters()}, m.config._attn_implementation, m.is_gradient_checkpointing) for m in (found, ours)]
    assert facts[0] == facts[1], facts
    print("the same", flush=True)
"""


def test_the_models_lines_make_the_model_that_is_estimated(root):
    for package in ("transformers", "peft"):
        pytest.importorskip(package)
    jobs = "\n".join(json.dumps(setup.to_job()) for setup in MODELS)
    done = subprocess.run([sys.executable, "-c", LOADS], input=jobs, cwd=root, capture_output=True, text=True, check=False, timeout=200)
    assert done.stdout.count("the same") == len(MODELS), done.stderr[-1500:]


def test_a_model_in_4_bit_is_loaded_so():
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    line = model_lines(Setup(model={**_TINY, "quantization_config": quantized}, micro_batch=1, lora={"r": 4, "target_modules": ["c_attn"]}))
    assert "BitsAndBytesConfig(**{'load_in_4bit': True, 'bnb_4bit_quant_type': 'nf4'})" in line and line.endswith("get_peft_model(model, LoraConfig(r=4, target_modules=['c_attn']), autocast_adapter_dtype=False)\n")
