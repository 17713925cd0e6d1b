"""What is exported starts: transformers' own check of the config against the arguments finds nothing to correct, and DeepSpeed takes the config."""

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


STARTS = """
import json, sys, types
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
from deepspeed.runtime.config import DeepSpeedConfig
from transformers import AutoConfig
config = AutoConfig.for_model("gpt2")
for line in sys.stdin:
    case = json.loads(line)
    args = types.SimpleNamespace(**case["arguments"], get_warmup_steps=lambda steps: 0)
    made = HfTrainerDeepSpeedConfig(case["trainer_config"])
    made.trainer_config_process(args)
    made.trainer_config_finalize(args, types.SimpleNamespace(config=config), 100)
    left = [k for k in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping") if made.config[k] == "auto"]
    assert not left, left
    DeepSpeedConfig(made.config)
    DeepSpeedConfig(case["config"])
    print("started", flush=True)
"""


def test_transformers_and_deepspeed_take_every_export(root):
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers")
    lines = []
    for setup in SETUPS:
        out = write(setup)
        usual = {"learning_rate": 5e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "fp16_full_eval": False, "bf16_full_eval": False, "world_size": 1, "save_on_each_node": False, "warmup_steps": 0}
        lines.append(json.dumps({"arguments": {**usual, **out.arguments}, "trainer_config": dict(out.trainer_config), "config": dict(out.config)}))
    done = subprocess.run([sys.executable, "-c", STARTS], input="\n".join(lines), cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.count("started") == len(SETUPS), done.stderr[-1500:]
