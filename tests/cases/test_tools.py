"""Recipes of ms-swift, LLaMA-Factory, axolotl, open-instruct and TRL: what each says, and what it takes where it says nothing."""

from __future__ import annotations

import pytest

from tests.cases.shell import ids, said, zero

ALL = "all-linear"
SWIFT = "swift sft --model Qwen/Qwen2.5-0.5B-Instruct --dataset a.jsonl --split_dataset_ratio 0.01 --num_train_epochs 1"
FACTORY = (
    "### model\nmodel_name_or_path: Qwen/Qwen2.5-0.5B\ntrust_remote_code: true\n### method\nstage: sft\ndo_train: true\n"
    "finetuning_type: lora\nlora_rank: 8\nlora_target: all\n### dataset\ndataset: identity\ntemplate: qwen\ncutoff_len: 2048\n"
    "### train\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\nbf16: true\n"
)
AXOLOTL = (
    "base_model: Qwen/Qwen2.5-0.5B\ndatasets:\n  - path: some/set\n    type: alpaca\nval_set_size: 0.05\nsequence_len: 2048\n"
    "sample_packing: true\nmicro_batch_size: 2\nnum_epochs: 1\noptimizer: adamw_torch\nbf16: auto\ntf32: false\n"
)


@pytest.mark.parametrize(("command", "lora", "stage", "offloaded", "gpus"), [
    (f"{SWIFT} --train_type lora --lora_rank 16 --target_modules all-linear --deepspeed zero2", {"r": 16, "target_modules": ALL}, 2, False, 1),
    (f"NPROC_PER_NODE=4 {SWIFT} --train_type full --deepspeed zero3", None, 3, False, 4),
    (f"NPROC_PER_NODE=8 \\\nCUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \\\n{SWIFT} \\\n  --deepspeed zero2_offload", {"r": 8, "target_modules": ALL}, 2, True, 8),
    (f"NNODES=2 NPROC_PER_NODE=8 {SWIFT.replace('sft', 'pt')} --tuner_type lora --deepspeed zero3_offload", {"r": 8, "target_modules": ALL}, 3, True, 16),
])
def test_ms_swift_commands(shell, command, lora, stage, offloaded, gpus):
    answer = shell.check(f"{command} --max_length 1024 --torch_dtype bfloat16\n")
    job = answer["job"]
    assert (job["model"], job["sequence"], job["micro_batch"], job["lora"], job["world_size"]) == ("Qwen/Qwen2.5-0.5B", 1024, 1, lora, gpus)
    assert zero(answer)["stage"] == stage and (zero(answer).get("offload_optimizer", {}).get("device") == "cpu") == offloaded
    assert job["gradient_checkpointing"] == {"use_reentrant": True} or job["gradient_checkpointing"] is True
    assert answer["estimate"]["method"] == "deepspeed" and "config-file" not in ids(answer) and "paste" not in said(answer)


@pytest.mark.parametrize("text", [
    "model: Qwen/Qwen2.5-0.5B\ntrain_type: lora\nlora_rank: 4\ntarget_modules: all-linear\ndeepspeed: zero2\nmax_length: 1024\n",
    '{"model": "Qwen/Qwen2.5-0.5B", "train_type": "lora", "lora_rank": 4, "target_modules": ["all-linear"], "deepspeed": "zero2", "max_length": 1024}',
])
def test_ms_swift_files(shell, text):
    answer = shell.estimate(text, "--gpus", "2", name="args.json" if text.startswith("{") else "args.yaml")
    assert answer["code"] == 0 and answer["method"] == "deepspeed" and answer["trainable_parameters"] < answer["parameters"] / 50
    job = shell.check(trainer=text)["job"]
    assert (job["lora"], job["micro_batch"], job["deepspeed"]["zero_optimization"]["stage"]) == ({"r": 4, "target_modules": ALL}, 1, 2)


@pytest.mark.parametrize("trains", ["dpo", "kto", "grpo"])
def test_ms_swift_rlhf_says_what_is_not_modelled(shell, trains):
    answer = shell.check(f"{SWIFT.replace('sft', 'rlhf')} --rlhf_type {trains} --train_type lora --deepspeed zero2 --max_length 512\n")
    assert answer["job"]["lora"]["r"] == 8 and any(f["key"] == "rlhf_type" and "not modelled" in f["text"] for f in answer["findings"])


@pytest.mark.parametrize(("named", "stage", "offloaded"), [
    ("examples/deepspeed/ds_z2_config.json", 2, False), ("examples/deepspeed/ds_z3_config.json", 3, False),
    ("examples/deepspeed/ds_z3_offload_config.json", 3, True), ("ds_z2.json", 2, False),
])
def test_llama_factory_yaml(shell, named, stage, offloaded):
    answer = shell.check(f"{FACTORY}deepspeed: {named}\n")
    job = answer["job"]
    assert (job["lora"], job["sequence"], job["micro_batch"]) == ({"r": 8, "target_modules": ALL}, 2048, 1)
    assert job["gradient_checkpointing"] == {"use_reentrant": True} and zero(answer)["stage"] == stage
    assert ("offload_param" in zero(answer)) == offloaded and not {"config-file", "keys-unknown", "trainer-wants-zero"} & set(ids(answer))


def test_llama_factory_commands_win_over_their_file(shell):
    command = "FORCE_TORCHRUN=1 CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train recipe.yaml per_device_train_batch_size=2 cutoff_len=1024 deepspeed=ds_z3.json\n"
    answer = shell.check(f"{command}\n{FACTORY}")
    job = answer["job"]
    assert (job["sequence"], job["micro_batch"], job["world_size"], zero(answer)["stage"]) == (1024, 2, 2, 3)
    alone = shell.check(command.replace("train recipe", "train recipe") + "--model_name_or_path Qwen/Qwen2.5-0.5B\n")
    assert "recipe.yaml is not opened" in said(alone)


@pytest.mark.parametrize(("more", "lora"), [
    ("adapter: lora\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true\n", {"r": 32, "target_modules": ALL}),
    ("adapter:\n", None),
])
def test_axolotl_yaml(shell, more, lora):
    answer = shell.check(f"{AXOLOTL}{more}gradient_checkpointing: true\ndeepspeed: deepspeed_configs/zero3_bf16_cpuoffload_params.json\n")
    job = answer["job"]
    assert (job["lora"], job["sequence"], job["micro_batch"], job["trainer"]["optim"]) == (lora, 2048, 2, "adamw_torch")
    assert zero(answer)["offload_param"]["device"] == "cpu" and "keys-unknown" not in ids(answer)


@pytest.mark.parametrize(("recipe", "double"), [
    (FACTORY + "quantization_bit: 4\nquantization_method: bitsandbytes\n", True),
    (AXOLOTL + "adapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_target_linear: true\n", True),
    (f"{SWIFT} --train_type lora --quant_bits 4 --quant_method bnb --max_length 512\n", True),
    ("$ trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --use_peft --load_in_4bit --use_bnb_nested_quant --max_length 512\n", True),
    ("$ trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --use_peft --load_in_4bit --max_length 512\n", False),
])
def test_weights_in_4_bit_under_lora_are_followed(shell, recipe, double):
    answer = shell.check(recipe)
    model = answer["job"]["model"]
    if double:
        assert model == "Qwen/Qwen2.5-0.5B-bnb-4bit"
    else:
        assert model["quantization_config"]["bnb_4bit_use_double_quant"] is False
    assert answer["estimate"]["at_peak"]["parameters"] < 0.9 * 2 * answer["estimate"]["parameters"]
    assert "not-modelled" not in [f["id"] for f in answer["findings"] if "4bit" in f["key"] or "bit" in f["key"]]


def test_what_no_tool_knows_is_listed_once(shell):
    answer = shell.check(f"{FACTORY}foo_bar: 3\nanother_one: [1, 2]\n")
    (unknown,) = [f["text"] for f in answer["findings"] if f["id"] == "keys-unknown"]
    assert "foo_bar" in unknown and "another_one" in unknown and "template" not in unknown


@pytest.mark.parametrize("script", ["open_instruct/finetune.py", "finetune.py", "-m open_instruct.finetune"])
def test_open_instruct_command(shell, script):
    answer = shell.check(
        "accelerate launch \\\n    --mixed_precision bf16 \\\n    --num_machines 1 \\\n    --num_processes 8 \\\n    --use_deepspeed \\\n"
        "    --deepspeed_config_file configs/ds_configs/stage3_no_offloading_accelerate.conf \\\n"
        f"    {script} \\\n    --model_name_or_path Qwen/Qwen2.5-0.5B --use_lora --lora_rank 64 --max_seq_length 1024 --per_device_train_batch_size 2\n"
    )
    job = answer["job"]
    assert (job["lora"]["r"], job["sequence"], job["micro_batch"], job["world_size"], zero(answer)["stage"]) == (64, 1024, 2, 8, 3)
    assert "config-file" not in ids(answer)
