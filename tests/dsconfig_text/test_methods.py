"""LoRA, FSDP and DDP as recipes of training tools write them."""

from __future__ import annotations

import pytest

from explorer.dsconfig.read import read

TRL = "accelerate launch sft.py --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 1"
FACTORY = "model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct\nstage: sft\nper_device_train_batch_size: 1\ncutoff_len: 2048\n"
AXOLOTL = "base_model: NousResearch/Llama-2-7b-hf\nsequence_len: 4096\nmicro_batch_size: 2\nbf16: auto\n"
ALL = "all-linear"


@pytest.mark.parametrize(("text", "lora"), [
    (f"{TRL} --use_peft --lora_r 16 --lora_target_modules all-linear", {"r": 16, "target_modules": ALL}),
    (f"{TRL} --use_peft --lora_r 64 --lora_alpha 16", {"r": 64}),
    (f"{TRL} --use_peft", {"r": 16}),
    (f"{FACTORY}finetuning_type: lora\nlora_rank: 8\nlora_target: all\n", {"r": 8, "target_modules": ALL}),
    (f"{FACTORY}finetuning_type: lora\nlora_target: q_proj,v_proj\n", {"r": 8, "target_modules": ["q_proj", "v_proj"]}),
    (f"{FACTORY}finetuning_type: full\n", None),
    (f"{AXOLOTL}adapter: qlora\nlora_r: 32\nlora_target_linear: true\n", {"r": 32, "target_modules": ALL}),
    (f"{AXOLOTL}adapter: lora\nlora_r: 8\nlora_target_modules:\n- q_proj\n- v_proj\n", {"r": 8, "target_modules": ["q_proj", "v_proj"]}),
    (AXOLOTL, None),
])
def test_lora_is_read_from_every_tools_arguments(text, lora):
    pasted = read(text)
    assert pasted.changes.get("lora") == lora
    assert not [f for f in pasted.unread if "lora" in f.key or f.key in ("adapter", "finetuning_type", "use_peft")]


@pytest.mark.parametrize(("options", "stage", "offloaded"), [
    ("FULL_SHARD", 3, False), ("SHARD_GRAD_OP", 2, True), ("2", 2, False), ("NO_SHARD", 0, False),
])
def test_accelerates_fsdp_is_the_nearest_zero_under_its_own_name(options, stage, offloaded):
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n"
        f"  fsdp_sharding_strategy: {options}\n  fsdp_offload_params: {str(offloaded).lower()}\n"
        "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
    )
    changes = read(text).changes
    zero = changes["deepspeed"]["zero_optimization"]
    assert (changes["method"], zero["stage"], changes["world_size"]) == ("fsdp", stage, 8)
    assert ("offload_optimizer" in zero) == offloaded and changes["deepspeed"]["bf16"] == {"enabled": True}


def test_accelerates_multi_gpu_is_ddp():
    changes = read("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 4\n").changes
    assert changes["method"] == "ddp" and changes["deepspeed"]["zero_optimization"]["stage"] == 0
