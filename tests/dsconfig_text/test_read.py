"""What people paste: read, told where DeepSpeed would have stopped, never run; and what the reader makes of it is what DeepSpeed takes."""

from __future__ import annotations

import json
import random
import time

import pytest

from explorer.dsconfig import resolve
from explorer.dsconfig.coerce import coerced
from explorer.dsconfig.read import read
from explorer.errors import BadInput
from explorer.setup import Setup

PLAIN = {"train_batch_size": "auto", "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}, "my_own": [1, {"b": None}], "bf16": {"enabled": True}}


def ds(text):
    return read(text).changes["deepspeed"]


def told(text):
    return {finding.key: finding.text for finding in read(text).coercions}


def test_a_proper_config_is_taken_as_it_is():
    pasted = read(json.dumps(PLAIN, indent=2))
    assert pasted.changes["deepspeed"] == PLAIN
    assert list(pasted.changes["deepspeed"]) == list(PLAIN)  # order and unknown keys are kept
    assert [f.id for f in pasted.coercions] == ["trainer-assumed"]
    assert pasted.forms == ("DeepSpeed config",)


@pytest.mark.parametrize(("text", "word"), [
    ('{"zero_optimization": {"stage": 2} // two\n}', "comments"),
    ('{"zero_optimization": {"stage": 2} # two\n}', "comments"),
    ('{/* a\nb */"zero_optimization": {"stage": 2}}', "comments"),
    ('{"zero_optimization": {"stage": 2,},}', "comma too many"),
    ('{"zero_optimization": {"stage": 2}\n"bf16": {"enabled": true}}', "lacks a comma"),
    ("{'zero_optimization': {'stage': 2}}", "quotes"),
    ('{“zero_optimization”: {"stage": 2}}', "quotes"),
    ('{zero_optimization: {"stage": 2}}', "without quotes"),
    ('{"zero_optimization": {"stage": 2, "overlap_comm": True}}', "as Python does"),
    ('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 200_000_000}}', "underscores"),
    ('{"zero_optimization": {"stage": 2}, "train_batch_size": batch}', "no value"),
    ('{"zero_optimization": {"stage": 2', "ends before"),
    ('{"zero_optimization": {"stage": 2}, "zero_optimization": {"stage": 2}}', "twice"),
])
def test_what_json_would_stop_at_is_read_and_told(text, word):
    assert ds(text)["zero_optimization"]["stage"] == 2
    assert any(word in said for said in told(text).values())


@pytest.mark.parametrize("form", ['5e8', '"5e8"', "5E+8", "500_000_000", "500000000.0", '"500000000"', '"500M"', "int(5e8)"])
def test_every_way_to_write_a_bucket(form):
    config = ds('{"zero_optimization": {"stage": 2, "reduce_bucket_size": ' + form + "}}")
    setup = Setup(model="gpt2", micro_batch=1, deepspeed=config)
    assert resolve(setup).reduce_bucket_size == 500_000_000


@pytest.mark.parametrize(("section", "key", "said", "expected"), [
    ({"stage": "2", "reduce_bucket_size": "5e8"}, "zero_optimization.reduce_bucket_size", '"5e8"', {"stage": "2", "reduce_bucket_size": 500000000}),
    ({"stage": 2, "foo": 1}, "zero_optimization.foo", "left out", {"stage": 2}),
    ({"stage": 3, "stage3_param_persitance_threshold": 10}, "zero_optimization.stage3_param_persitance_threshold", "stage3_param_persistence_threshold", {"stage": 3, "stage3_param_persistence_threshold": 10}),
    ({"stage": 2, "cpu_offload": True}, "zero_optimization.cpu_offload", "offload_optimizer", {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    ({"stage": 2, "cpu_offload": "true"}, "zero_optimization.cpu_offload", "offload_optimizer", {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    ({"stage": 2, "cpu_offload": False}, "zero_optimization.cpu_offload", "off", {"stage": 2}),
    ({"stage": 3, "cpu_offload_params": True}, "zero_optimization.cpu_offload_params", "offload_param", {"stage": 3, "offload_param": {"device": "cpu"}}),
    ({"stage": 3, "cpu_offload": True, "offload_optimizer": {"device": "nvme"}}, "zero_optimization.cpu_offload", "together", {"stage": 3, "offload_optimizer": {"device": "nvme"}}),
    ({"stage": 3, "offload_param": "cpu"}, "zero_optimization.offload_param", "object", {"stage": 3, "offload_param": {"device": "cpu"}}),
    ({"stage": 3, "offload_param": {"device": "CPU"}}, "zero_optimization.offload_param.device", "read as", {"stage": 3, "offload_param": {"device": "cpu"}}),
    ({"stage": 3, "offload_param": {"device": None}}, "zero_optimization.offload_param.device", "null", {"stage": 3, "offload_param": {"device": "none"}}),
    ({"stage": 3, "mics_shard_size": 4}, "zero_optimization.mics_shard_size", "removed", {"stage": 3}),
    ({"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}, "zero_optimization.stage3_gather_fp16_weights_on_model_save", "old name", {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}),
    (True, "zero_optimization", "stage 1", {"stage": 1}),
])
def test_zero_keys_that_deepspeed_stops_at(section, key, said, expected):
    config, changes = coerced({"zero_optimization": section})
    assert config == {"zero_optimization": expected}
    assert [c.key for c in changes] == [key]
    assert said in changes[0].text
    resolve(Setup(model="gpt2", micro_batch=1, deepspeed=config))


@pytest.mark.parametrize(("config", "key", "expected"), [
    ({"train_micro_batch_size_per_gpu": "4"}, "train_micro_batch_size_per_gpu", {"train_micro_batch_size_per_gpu": 4}),
    ({"gradient_clipping": "1.0"}, "gradient_clipping", {"gradient_clipping": 1}),
    ({"bfloat16": {"enabled": True}}, "bfloat16", {"bf16": {"enabled": True}}),
    ({"fp16": True}, "fp16", {"fp16": {"enabled": True}}),
    ({"fp16": {"enabled": True, "loss_sacle": 0}}, "fp16.loss_sacle", {"fp16": {"enabled": True, "loss_scale": 0}}),
    ({"amp": {"enabled": False}}, "amp", {}),
    ({"wall_clock_breakdown": "False"}, "wall_clock_breakdown", {"wall_clock_breakdown": False}),
    ({"zero_allow_untested_optimizer": "true"}, "zero_allow_untested_optimizer", {"zero_allow_untested_optimizer": True}),
    ({"flops_profiler": {"enabled": "true", "profile_step": 1}}, "flops_profiler.enabled", {"flops_profiler": {"enabled": True, "profile_step": 1}}),
    ({"torch_autocast": {"enabled": "true", "dtype": "bfloat16"}}, "torch_autocast.enabled", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-5"}}}, "optimizer.params.lr", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}),
])
def test_other_keys_that_deepspeed_stops_at(config, key, expected):
    found, changes = coerced(config)
    assert found == expected
    assert [c.key for c in changes] == [key]


@pytest.mark.parametrize("config", [
    {"zero_optimization": {"stage": 2, "overlap_comm": "true", "reduce_bucket_size": 2e8}},  # pydantic takes both
    {"fp16": {"enabled": "auto"}, "unknown": {"deep": 1}},
    {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 5}},
    {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9}},  # of another stage: passed through
    {"gradient_accumulation_steps": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
])
def test_what_deepspeed_takes_is_left_alone(config):
    assert coerced(config) == (config, [])


def test_what_cannot_be_meant_is_left_for_the_check_to_name():
    config, changes = coerced({"zero_optimization": {"stage": 2, "reduce_bucket_size": "many"}})
    assert not changes
    with pytest.raises(BadInput, match="reduce_bucket_size"):
        resolve(Setup(model="gpt2", micro_batch=1, deepspeed=config))


ACCELERATE = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: false
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""


def test_accelerates_yaml():
    pasted = read(ACCELERATE)
    assert pasted.forms == ("accelerate config",)
    assert {k: pasted.changes[k] for k in ("world_size", "gpus_per_node", "zero_init")} == {"world_size": 16, "gpus_per_node": 8, "zero_init": True}
    assert pasted.changes["deepspeed"] == {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}, "stage3_gather_16bit_weights_on_model_save": False},
        "gradient_clipping": 1.0, "bf16": {"enabled": True},
    }


def test_accelerates_yaml_is_what_accelerate_makes_of_it():
    pytest.importorskip("accelerate")
    from accelerate.utils import DeepSpeedPlugin

    made = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=4, gradient_clipping=1.0, offload_optimizer_device="cpu", offload_param_device="none", zero3_save_16bit_model=False, zero3_init_flag=False).deepspeed_config
    ours = read(ACCELERATE).changes["deepspeed"]
    assert made["zero_optimization"]["stage"] == ours["zero_optimization"]["stage"]
    for name in ("offload_optimizer", "offload_param"):
        assert made["zero_optimization"][name]["device"] == ours["zero_optimization"][name]["device"]
    assert (made["gradient_accumulation_steps"], made["gradient_clipping"]) == (4, 1.0)


def test_a_number_that_yaml_takes_for_a_text():
    pasted = read("zero_optimization:\n  stage: 2\n  reduce_bucket_size: 5e8\nbf16:\n  enabled: true\n")
    assert pasted.changes["deepspeed"]["zero_optimization"]["reduce_bucket_size"] == 500000000
    assert "zero_optimization.reduce_bucket_size" in {f.key for f in pasted.coercions}


def test_a_tools_flat_yaml():
    pasted = read("### model\nmodel_name_or_path: /data/Qwen2.5-7B\nstage: sft\ncutoff_len: 4096\nflash_attn: fa2\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\nbf16: true\ndeepspeed: examples/ds_z3.json\n")
    c = pasted.changes
    assert (c["model"], c["sequence"], c["attention"], c["micro_batch"]) == ("Qwen/Qwen2.5-7B", 4096, "flash_attention_2", 2)
    checkpoints = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}  # LLaMA-Factory's default
    assert c["trainer"] == {"per_device_train_batch_size": 2, "learning_rate": 1e-5, "bf16": True, **checkpoints}
    assert "ds_z3.json" in told("deepspeed: examples/ds_z3.json\nper_device_train_batch_size: 2\n")["deepspeed"]


ARGUMENTS = """
from transformers import TrainingArguments
training_args = Seq2SeqTrainingArguments(
    "out",
    per_device_train_batch_size=4 * 2,  # eight
    learning_rate=1e-5, bf16=True,
    gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
    deepspeed={"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}},
    report_to=__import__("os").system("touch /tmp/owned"), evaluation_strategy="no",
)
tok = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", attn_implementation="eager", torch_dtype=torch.bfloat16)
"""


def test_training_arguments_are_read_and_never_run():
    pasted = read(ARGUMENTS)
    c = pasted.changes
    assert (c["model"], c["attention"], c["micro_batch"], c["gradient_checkpointing"]) == ("meta-llama/Llama-3.2-1B", "eager", 8, {"use_reentrant": False})
    assert c["deepspeed"] == {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}
    assert c["trainer"]["eval_strategy"] == "no"
    assert [f.key for f in pasted.unread] == ["report_to"]
    setup = pasted.onto(None)
    assert resolve(setup).precision == "bf16"


def test_the_trainers_default_batch():
    pasted = read("TrainingArguments(output_dir='x', fp16=True)")
    assert pasted.changes["micro_batch"] == 8
    assert any("default of 8" in f.text for f in pasted.coercions)


def test_a_call_that_was_cut_off_keeps_what_came_before():
    assert read("args = TrainingArguments(output_dir='x', per_device_train_batch_size=2, learning_ra").changes["micro_batch"] == 2


def test_a_command_line():
    pasted = read(
        "$ PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:128 deepspeed --num_gpus=4 --num_nodes 2 train.py \\\n"
        "   --model_name_or_path meta-llama/Llama-2-7b-hf \\\n   --per_device_train_batch_size 4 --bf16 True --max_seq_length 2048 \\\n   --deepspeed ds.json --gradient_checkpointing\nthen it died"
    )
    assert pasted.launcher == "deepspeed"
    assert pasted.changes == {
        "allocator": {"expandable_segments": True, "max_split_size_mb": 128}, "world_size": 8, "gpus_per_node": 4, "model": "meta-llama/Llama-2-7b-hf", "sequence": 2048,
        "trainer": {"per_device_train_batch_size": 4, "bf16": True, "gradient_checkpointing": True}, "micro_batch": 4, "gradient_checkpointing": True,
    }


@pytest.mark.parametrize(("command", "world", "each", "launcher"), [
    ("torchrun --nproc_per_node=8 --nnodes 4 run.py --bf16", 32, 8, "torchrun"),
    ("python -m torch.distributed.launch --nproc_per_node 2 run.py --bf16", 2, 2, "torchrun"),
    ("accelerate launch --num_processes 16 --num_machines 2 run.py --bf16", 16, 8, "accelerate"),
    ("deepspeed --include localhost:0,1,5 run.py --bf16", 3, 3, "deepspeed"),
    ("CUDA_VISIBLE_DEVICES=0,1 python run.py --bf16", 2, None, "python"),
])
def test_launchers(command, world, each, launcher):
    pasted = read(command)
    assert (pasted.changes.get("world_size"), pasted.changes.get("gpus_per_node"), pasted.launcher) == (world, each, launcher)
    assert pasted.changes["trainer"] == {"bf16": True}


def test_accelerates_own_options():
    pasted = read("accelerate launch --use_deepspeed --zero_stage 3 --offload_param_device cpu --mixed_precision bf16 --num_processes 2 run.py --per_device_train_batch_size 1")
    zero = pasted.changes["deepspeed"]["zero_optimization"]
    assert zero == {"stage": 3, "offload_param": {"device": "cpu"}}
    assert pasted.changes["deepspeed"]["bf16"] == {"enabled": True}


def test_plain_python_is_told():
    assert "launched-with-python" in {f.id for f in read("python train.py --deepspeed ds.json --bf16 true").coercions}
    assert not [f for f in read("deepspeed train.py --deepspeed ds.json --bf16 true").coercions if f.id == "launched-with-python"]


def test_a_launchers_log_holds_the_command():
    pasted = read("[launch.py:324:sigkill_handler] ['/path/bin/python', '-u', 'examples/finetune.py', '--local_rank=0', '--model_name_or_path', 'gpt2', '--per_device_train_batch_size', '1', '--bf16'] exits with return code = -9")
    assert pasted.changes == {"model": "gpt2", "trainer": {"per_device_train_batch_size": 1, "bf16": True}, "micro_batch": 1}
    assert pasted.launcher == "deepspeed"


def test_everything_at_once():
    text = f"Hi all,\n```json\n{json.dumps(PLAIN)}\n```\nand\n```python\n{ARGUMENTS.replace('deepspeed={', 'x={')}```\nI run\n\n    deepspeed --num_gpus 2 train.py --bf16 true\n\nRuntimeError: CUDA out of memory. Tried to allocate 7.04 GiB (GPU 1; 79.15 GiB total capacity)\n"
    pasted = read(text)
    assert pasted.forms == ("DeepSpeed config", "TrainingArguments", "Python", "command line")
    assert pasted.changes["deepspeed"] == PLAIN
    assert (pasted.changes["micro_batch"], pasted.changes["world_size"]) == (8, 2)


def test_fragments():
    assert ds('"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}')["zero_optimization"] == {"stage": 1}
    assert ds('{"stage": 3, "offload_param": {"device": "cpu"}}') == {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert read('{"model_type": "gpt2", "n_layer": 2}').changes == {"model": {"model_type": "gpt2", "n_layer": 2}}
    assert read('{"per_device_train_batch_size": 3, "max_steps": 2}').changes["trainer"] == {"per_device_train_batch_size": 3, "max_steps": 2}


@pytest.mark.parametrize("text", ["", "hello", "{", "}", "{}", "[1, 2]", "loss: 3\nstep: 4", "GPU 0 {memory}", "f'{x}'", "dict(a=1)", "a = {'b': 1}"])
def test_what_is_no_configuration_says_nothing(text):
    assert dict(read(text).changes) == {}


def test_the_batch_of_a_config_alone():
    assert read('{"train_batch_size": 64, "gradient_accumulation_steps": 2, "zero_optimization": {}}').changes["micro_batch"] == 32
    assert read('{"train_micro_batch_size_per_gpu": 3, "zero_optimization": {}}').changes["micro_batch"] == 3
    assert "micro_batch" not in read('{"train_batch_size": "auto", "zero_optimization": {}}').changes


# --- onto a base


def test_onto_a_base_keeps_what_the_text_does_not_say():
    base = Setup(model="gpt2", micro_batch=4, sequence=512, gpu="A100-80GB", world_size=4, rank=3)
    setup = read('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}').onto(base)
    assert (setup.model, setup.micro_batch, setup.sequence, setup.gpu, setup.rank) == ("gpt2", 4, 512, "A100-80GB", 3)
    assert resolve(setup).stage == 3
    smaller = read("torchrun --nproc_per_node 2 a.py --model_name_or_path gpt2-large --bf16 --per_device_train_batch_size 2").onto(base)
    assert (smaller.model, smaller.sequence, smaller.world_size, smaller.rank, smaller.micro_batch) == ("gpt2-large", None, 2, 0, 2)


def test_without_a_base_the_text_must_name_a_model():
    with pytest.raises(BadInput, match="model"):
        read('{"zero_optimization": {}}').onto(None)


def test_no_folder_is_looked_into():
    pasted = read("deepspeed run.py --model_name_or_path /etc/secret --bf16")
    assert "model" not in pasted.changes
    assert [f.id for f in pasted.unread] == ["model-folder"]


# --- mutated

SEEDS = [json.dumps(PLAIN, indent=1), ARGUMENTS, ACCELERATE, "PYTORCH_ALLOC_CONF=a:b deepspeed --num_gpus 2 x.py --bf16 true --deepspeed d.json \\\n --a 'b", '{"stage": 2, "reduce_bucket_size": "5e8",}']
PIECES = ["{", "}", '"', "'", ",", ":", "\n", "\\", "#", "/*", "(", ")", "[", "]", "-", "1e999", "9" * 50, "auto", "null", "\x00", "\ud800", "é", "zero_optimization", "&a", "*a", "  ", "=", "--", "True"]


def test_no_mutation_breaks_the_reader():
    """BadInput is an answer; anything else reaches the person."""
    rng = random.Random(7)
    read(ACCELERATE)  # loads yaml
    started, longest = time.perf_counter(), 0.0
    for _ in range(2500):
        text = rng.choice(SEEDS)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(PIECES) + text[at + rng.randrange(12) :]
        before = time.perf_counter()
        try:
            pasted = read(text)
            pasted.onto(Setup(model="gpt2", micro_batch=1))
        except BadInput:
            pass
        longest = max(longest, time.perf_counter() - before)
    assert longest < 1, longest
    assert time.perf_counter() - started < 60


# --- what the order of lines and the launcher mean

_MODEL = "model = AutoModelForCausalLM.from_pretrained(name)\n"
_ARGUMENTS = "args = TrainingArguments('o', bf16=True, deepspeed={{'zero_optimization': {{'stage': {}}}}})\n"


@pytest.mark.parametrize(("text", "zero_init"), [
    (_MODEL + _ARGUMENTS.format(3), False),
    (_MODEL + "args = TrainingArguments('o', deepspeed='ds.json')\n", False),
    (_ARGUMENTS.format(3) + _MODEL, None),
    (_MODEL + _ARGUMENTS.format(2), None),
    ("tokenizer = AutoTokenizer.from_pretrained('gpt2')\n" + _ARGUMENTS.format(3) + _MODEL, None),
    (_MODEL, None),
])
def test_a_model_made_before_the_arguments_is_not_made_under_zero_init(text, zero_init):
    pasted = read(text)
    assert pasted.changes.get("zero_init") is zero_init
    assert any(f.id == "built-before-arguments" for f in pasted.coercions) == (zero_init is False)


@pytest.mark.parametrize(("command", "told"), [("$ python train.py", 1), ("$ python train.py --bf16 --deepspeed ds.json", 1), ("$ deepspeed train.py --bf16", 0), ("", 0)])
def test_plain_python_is_told_once(command, told):
    assert sum(f.id == "launched-with-python" for f in read(_ARGUMENTS.format(2) + command).coercions) == told


@pytest.mark.parametrize("text", [
    "ds_config = dict(zero_optimization=dict(stage=2, reduce_bucket_size=int(5e8)), bf16=dict(enabled=True), train_micro_batch_size_per_gpu=4)\nengine, *_ = deepspeed.initialize(config=ds_config)",
    "args = TrainingArguments('o', per_device_train_batch_size=4, bf16=True, deepspeed=dict(zero_optimization=dict(stage=2, reduce_bucket_size=int(5e8)), bf16=dict(enabled=True)))",
])
def test_a_config_made_with_dict(text):
    pasted = read(text)
    assert pasted.changes["deepspeed"]["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 500_000_000}
    assert pasted.changes["deepspeed"]["bf16"] == {"enabled": True} and pasted.changes["micro_batch"] == 4
    assert not pasted.unread


def test_a_dict_of_something_else_is_none():
    assert read("optimizer = dict(lr=1e-4, betas=(0.9, 0.95))").forms == ()
    told = read("ds = dict(zero_optimization=dict(stage=STAGE), train_batch_size=8)")
    assert told.changes["deepspeed"] == {"train_batch_size": 8} and told.unread[0].key == "zero_optimization" and "dict(stage=STAGE)" in told.unread[0].text
