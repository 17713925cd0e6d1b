"""Public reports of people whose jobs ran out of memory, or who misread a tool or a setting: each with its right answer.

Kinds: a, out of memory; c, estimators; d, configs. What a report says is in a test's first line; where ours is another answer, why.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from explorer.advice import doctor, oom, reading
from explorer.advice.diagnose import diagnose
from explorer.advice.effects import effects
from explorer.dsconfig import resolve
from explorer.dsconfig.read import read
from explorer.errors import BadInput
from explorer.estimator.estimate import estimate
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import GiB
from tests.advice import test_doctor, test_oom
from tests.advice.test_oom import MESSAGES

REPORTS = "a00 a02 a04 a06 a08 a10 a12 a14 a16 a18 a20 a22 a24 a26 a28 a30 a32 a33 a34 a36 a38 c02 c04 c06 c08 c10 c12 c14 d02 d04 d06 d08 d10 d12 d14 d16 d18 d20".split()
ELSEWHERE = {
    "a00": test_doctor.test_activations_are_the_cause, "a02": test_doctor.test_the_bucket_of_deepspeed_before_may_2021, "a06": test_doctor.test_a_gathered_embedding_sets_a_floor,
    "a10": test_doctor.test_logits_longer_than_the_batch, "a12": test_doctor.test_llama_7b_on_one_card_is_a_matter_of_states, "a26": test_doctor.test_mixtral_needs_sixteen_cards,
    "a28": test_doctor.test_opt_on_one_t4_and_on_more, "a30": test_doctor.test_more_offload_is_not_offered_where_everything_is_offloaded, "c14": test_doctor.test_a_tiny_model_is_the_same_at_every_stage,
    "d02": test_doctor.test_a_bucket_of_auto_is_the_hidden_size_squared, "d08": test_doctor.test_settings_that_do_nothing_are_problems, "d10": test_doctor.test_default_buckets_on_a_small_card,
    "d16": test_doctor.test_settings_that_do_nothing_are_problems,
}
"""Replayed beside what they taught the doctor."""

CPU = {"device": "cpu"}
LLAMA_7B = "meta-llama/Llama-2-7b-hf"
LLAMA_33B = {"model_type": "llama", "hidden_size": 6656, "intermediate_size": 17920, "num_hidden_layers": 60, "num_attention_heads": 52, "num_key_value_heads": 52, "vocab_size": 32000}
LLAMA_70B_4BIT = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000,
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "bfloat16"},
}
DOLLY_3B = {"model_type": "gpt_neox", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 50280, "max_position_embeddings": 2048, "rotary_pct": 0.25}
GLM_9B = {"model_type": "glm", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2, "vocab_size": 151552}
BLENDERBOT_9B = {
    "model_type": "blenderbot", "d_model": 4096, "encoder_layers": 4, "decoder_layers": 32, "encoder_attention_heads": 32, "decoder_attention_heads": 32, "encoder_ffn_dim": 16384, "decoder_ffn_dim": 16384,
    "vocab_size": 8008, "max_position_embeddings": 128,
}
OPT_13B = {"model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40, "num_attention_heads": 40, "vocab_size": 50272, "word_embed_proj_dim": 5120, "max_position_embeddings": 2048}
T5_3B = {"model_type": "t5", "d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_layers": 24, "num_heads": 32, "vocab_size": 32128}
QWEN_32B = {"model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27392, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 40, "vocab_size": 152064, "max_position_embeddings": 32768}
QWEN_VL_3B_TEXT = {"model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
CLIP_B16 = {
    "model_type": "clip", "projection_dim": 512,
    "text_config": {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 12, "projection_dim": 512, "vocab_size": 49408},
    "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "image_size": 224, "patch_size": 16, "projection_dim": 512},
}


def zero(stage: int, precision: str = "bf16", **keys: Any) -> dict[str, Any]:
    return {precision: {"enabled": True}, "zero_optimization": {"stage": stage, **keys}}


@cache
def estimated(setup: Setup) -> Profile:
    return estimate(setup, largest=False)


def answer(setup: Setup) -> str | None:
    return estimated(setup).verdict.answer


def host_of(setup: Setup) -> float:
    """GiB of one node."""
    return estimated(setup).host.per_node_bytes / GiB


def said(text: str, base: Setup | None = None) -> dict[str, Any]:
    return {remark.id: remark for remark in doctor(text, base).remarks}


def test_every_report_is_replayed():
    here = {match[1] for name in globals() if (match := re.match(r"test_([acd]\d\d)_", name))}
    assert here | ELSEWHERE.keys() == set(REPORTS)
    assert test_oom.READINGS.keys() == MESSAGES.keys() and len(MESSAGES) == 27


# --- a: out of memory


def test_a04_eight_gpus_that_share_one_model_divide_no_states():
    """DeepSpeed#237: stage 2 over eight tensor-parallel GPUs saves nothing: ZeRO divides over data-parallel ranks, and there is one."""
    shared = Setup(model=LLAMA_7B, micro_batch=1, sequence=512, gpu="V100-32GB", world_size=8, data_parallel_size=1, deepspeed=zero(2, "fp16"))
    apart = shared.replace(data_parallel_size=8)
    assert estimated(shared).at_peak["optimizer"] == pytest.approx(12 * estimated(shared).parameters, rel=1e-3)
    assert estimated(apart).at_peak["optimizer"] == pytest.approx(12 * estimated(apart).parameters / 8, rel=1e-3)
    assert answer(shared) == "does not fit"
    bound = next(f for f in resolve(shared).not_modelled if f.key == "data_parallel_size")
    assert "at most what is said" in bound.text  # how the model is split is not modelled


def test_a08_a_reference_model_and_two_answers_a_prompt_are_a_bound():
    """LLaMA-Factory#1383: DPO of 7.7e9 parameters at stage 2 on eight: 2 + 2 + 14/8 bytes a parameter are 41 GiB, and the logits of two answers."""
    text = "args = DPOConfig('out', per_device_train_batch_size=1, bf16=True, gradient_checkpointing=True)\n" + json.dumps({**zero(2), "bf16": {"enabled": "auto"}})
    base = Setup(model="Qwen/Qwen2.5-7B", micro_batch=1, sequence=1024, gpu="A100-80GB", world_size=8)
    remark = said(text, base)["not-modelled"]
    assert remark.key == "DPOConfig" and "2 n sequences" in remark.text and "2 bytes a parameter on every GPU" in remark.text and "at least" in remark.text
    both = estimated(base.replace(micro_batch=2, gradient_checkpointing=True, deepspeed=zero(2)))
    known = both.peak.allocated_bytes + 2 * both.parameters
    assert 41 * GiB < known < 79 * GiB


def test_a14_vicuna_on_four_cards_of_40_gb_is_close():
    """FastChat#407 and others: 7e9 parameters on 4 × A100-40 run for some and fail for others; on eight there is room."""
    # They ran FSDP, whose fp32 gradients take 4/N bytes a parameter more than ZeRO's in 16 bit: that is the 10 % this answer leaves.
    four = Setup(model=LLAMA_7B, micro_batch=1, sequence=2048, gpu="A100-40GB", world_size=4, gradient_checkpointing=True, deepspeed=zero(3))
    profile = estimated(four)
    fp32_gradients = 2 * profile.parameters // 4
    assert profile.peak.reserved_bytes < profile.verdict.capacity_bytes < profile.peak.reserved_bytes + fp32_gradients
    assert answer(four.replace(world_size=8)) == "fits"


def test_a16_a_save_that_gathers_is_told():
    """transformers#12587: a 9e9 model trains within 16 GB and fails while saving: 16-bit weights are gathered on rank 0."""
    keys = {"offload_optimizer": CPU, "offload_param": CPU, "stage3_gather_16bit_weights_on_model_save": True}
    setup = Setup(model=BLENDERBOT_9B, micro_batch=8, sequence=128, target_sequence=128, gpu="V100-16GB", world_size=8, deepspeed=zero(3, "fp16", **keys))
    profile = estimated(setup)
    assert profile.verdict.answer == "fits"
    assert profile.peak.allocated_bytes / GiB == pytest.approx(10, abs=0.6)  # "about 10 GB of 16"
    note = next(n for n in profile.notes if "model_save" in n)
    assert f"{2 * profile.parameters / GiB:.1f} GiB more" in note and "rank 0's host" in note


def test_a18_thirty_three_billion_built_whole_on_every_rank():
    """DeepSpeed#3448: LLaMA-33B on 8 × A100-40 with 600 GB: without zero.Init the weights are on each GPU first; with it and all offloaded 585 GB are too tight."""
    base = Setup(model=LLAMA_33B, micro_batch=1, sequence=512, gpu="A100-40GB", world_size=8, host_ram_gib=600e9 / GiB, gradient_checkpointing=True, deepspeed=zero(3, offload_optimizer=CPU, offload_param=CPU))
    whole = estimated(base.replace(zero_init=False))
    assert (whole.verdict.answer, whole.peak.allocated_phase) == ("does not fit", "init")
    assert whole.peak.allocated_bytes == pytest.approx(2 * whole.parameters, rel=0.01)
    # More than 18 bytes a parameter: pinned blocks are powers of two, and each rank's own libraries take a GiB.
    assert answer(base) == "fits" and host_of(base) > base.host_ram_gib
    assert "host-too-small" in {r.id for r in diagnose(base, estimated(base))}
    less = base.replace(deepspeed=zero(3, offload_optimizer=CPU))
    assert answer(less) == "fits" and host_of(base) - host_of(less) > 2 * whole.parameters / GiB


@pytest.mark.parametrize(("model", "gpus", "gpu", "ram_gb", "config", "least", "most"), [
    (DOLLY_3B, 1, "RTX 3090", 32, zero(2, offload_optimizer=CPU), 1.2, 3),  # dolly#111: killed
    (LLAMA_7B, 8, "V100-16GB", 624, zero(3, "fp16", offload_optimizer=CPU), 0.1, 0.5),  # LMFlow#160: runs with parameters on the GPU
    # LLaMA-Factory#4629: 252 GB "full". Ours leaves 3 GiB, which the system itself takes.
    (GLM_9B, 1, "A100-80GB", 252, zero(3, offload_optimizer=CPU, offload_param=CPU), 0.97, 1.2),
])
def test_a20_the_host_that_offload_fills(model, gpus, gpu, ram_gb, config, least, most):
    """DeepSpeed#4239 and many others: exit −9 is the host's memory. Of it, as a fraction."""
    setup = Setup(model=model, micro_batch=1, sequence=512, gpu=gpu, world_size=gpus, gradient_checkpointing=True, deepspeed=config)
    assert least < host_of(setup) * GiB / (ram_gb * 1e9) < most
    assert answer(setup) == "fits"


def test_a20_minus_nine_is_not_the_gpu():
    for text in (MESSAGES[49], "[launch.py:315:sigkill_handler] Killing subprocess 1432\nexits with return code = -9", "exitcode  : -9 (pid: 77)\nSignal 9 (SIGKILL) received by PID 77"):
        remark, = reading.remarks(oom.read(text))
        assert (remark.id, remark.severity) == ("host-killed", "cause") and "not the GPU's" in remark.text


def test_a22_seventy_billion_in_4_bit_on_40_gb():
    """xtuner#88: QLoRA of 70e9 takes 55 GB with DDP and 52 with ZeRO-2, and the thread says both that stage 3 fits and that it does not."""
    # Ours at stage 2 is less, 41 GiB: their version kept fp32 norms and embeddings. The answer on 40 GB is the same.
    base = Setup(model=LLAMA_70B_4BIT, micro_batch=1, sequence=2048, gpu="A100-40GB", world_size=8, gradient_checkpointing=True, lora={"r": 64, "target_modules": "all-linear"}, deepspeed=zero(2))
    two, three = estimated(base), estimated(base.replace(deepspeed=zero(3)))
    assert two.verdict.answer == "does not fit" and two.at_peak["parameters"] > 34 * GiB
    # At stage 3 all of the 4-bit weights are on every GPU before they are divided, and the answer says what that rests on.
    assert three.peak.allocated_phase == "init" and three.peak.allocated_bytes > 34 * GiB
    assert any("bnb_4bit_quant_storage" in note for note in three.notes)


def test_a24_long_sequences_are_no_matter_of_zero():
    """LLaMA-Factory#3259: 32e9 parameters, 32,768 tokens, all offloaded, checkpointed: logits and checkpoints alone take 60 to 80 GiB."""
    setup = Setup(model=QWEN_32B, micro_batch=1, sequence=32768, gpu="A100-80GB", world_size=8, attention="flash_attention_2", gradient_checkpointing=True, deepspeed=zero(3, offload_optimizer=CPU, offload_param=CPU))
    profile = estimated(setup)
    assert answer(setup) == "does not fit"
    assert profile.at_peak["activations"] + profile.at_peak["temporary"] > 0.9 * profile.peak.allocated_bytes
    moved = profile.peak.allocated_bytes - profile.at_peak["activations"] - profile.at_peak["temporary"]
    assert moved < 3 * GiB  # all that offload could still move


def test_a32_quantized_weights_are_loaded_whole_before_stage_3_divides_them():
    """trl#4100, DeepSpeed#5617: GRPO with a model in 4 bit under stage 3: every GPU loads it whole."""
    text = "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-7B', load_in_4bit=True)\nargs = GRPOConfig('out', per_device_train_batch_size=1, bf16=True)\n" + json.dumps(zero(3, offload_param=CPU))
    told = {f.key: f.text for f in read(text).unread}
    assert "whole weights are taken" in told["load_in_4bit"] and "give the LoRA too" in told["load_in_4bit"]
    assert "generates its own answers" in told["GRPOConfig"] and "at least" in told["GRPOConfig"]  # and a22 has the weights whole at init


def test_a33_clip_on_32_gb_at_256_and_512():
    """MetaCLIP#47: ViT-B/16 takes 26 of 32 GB at 256 a GPU, fails at 512, and fits there with checkpointing."""
    # open_clip's attention is the fused one. Their 26 GB count the context, which is 1.3 GiB here beside PyTorch's 24.4.
    base = Setup(model=CLIP_B16, micro_batch=256, gpu="V100-32GB", world_size=8, deepspeed=zero(0, "fp16"))
    assert (estimated(base).peak.allocated_bytes + estimated(base).outside_pytorch_bytes) / GiB == pytest.approx(26, abs=0.5)
    larger = base.replace(micro_batch=512)
    assert [answer(s) for s in (base, larger, larger.replace(gradient_checkpointing=True))] == ["fits", "does not fit", "fits"]


def test_a34_a_frozen_tower_keeps_no_activations():
    """Chinese-CLIP#33: 256 a GPU of 32 GB with the vision tower frozen, 36 with both."""
    both = Setup(model="openai/clip-vit-large-patch14", micro_batch=36, gpu="V100-32GB", attention="eager", world_size=128, deepspeed=zero(0, "fp16"))
    frozen = both.replace(micro_batch=256, trainable=("text_model*", "text_projection*", "logit_scale"))
    assert [answer(s) for s in (both, frozen, both.replace(micro_batch=256))] == ["fits", "fits", "does not fit"]


def test_a36_the_text_of_several_images_is_a_bound():
    """Qwen-VL-Series-Finetune#51: five images of 768 pixels are 752 tokens each, and four times as many patches in the vision tower."""
    text = Setup(model=QWEN_VL_3B_TEXT, micro_batch=1, sequence=4096, gpu="A100-80GB", world_size=8, deepspeed=zero(2))
    profile = estimated(text)
    assert 4096 >= 5 * round((768 / 28) ** 2)
    assert profile.verdict.answer == "fits" and profile.at_peak["activations"] > 20 * GiB  # the text alone: the rest of 80 is the tower's


def test_a38_a_hybrid_engine_is_a_bound():
    """DeepSpeedExamples#368: an actor of 13e9, its reference and critic and the hybrid engine take 55 GB a GPU; on 40 they fail."""
    setup = Setup(model=OPT_13B, micro_batch=4, sequence=512, gpu="A100-40GB", world_size=8, gradient_checkpointing=True, deepspeed={**zero(3, "fp16"), "hybrid_engine": {"enabled": True}})
    bound = next(f for f in resolve(setup).not_modelled if f.key == "hybrid_engine.enabled")
    assert "at least" in bound.text
    profile = estimated(setup)
    generating = 2 * profile.parameters  # gathered whole to generate, while masters and moments stay
    assert profile.at_peak["optimizer"] + generating > profile.verdict.capacity_bytes


# --- c: estimators


def test_c02_the_states_of_every_stage():
    """DeepSpeed#5102, #5099: t5-3b on eight by both of DeepSpeed's formulas for stage 2: 4P + 16P/8, printed as 15.93, and 2P + 18P/8."""
    profiles = [estimated(Setup(model=T5_3B, micro_batch=1, sequence=64, target_sequence=16, world_size=8, deepspeed=zero(stage, "fp16"))) for stage in range(4)]
    p = profiles[0].parameters
    assert p == pytest.approx(2851e6, rel=1e-3)
    parameters, optimizer = ([profile.at_peak[name] / p for profile in profiles] for name in ("parameters", "optimizer"))
    assert parameters == pytest.approx([2, 2, 2, 2 / 8], rel=0.02)
    assert optimizer == pytest.approx([12, 12 / 8, 12 / 8, 12 / 8], rel=0.02)
    # The newer formula counts the step's fp32 gradients; its rest is one sub-result of the norm. The older one was 4 GiB too much.
    assert (2 * p + 18 * p / 8) < profiles[2].peak.allocated_bytes < 1.08 * (2 * p + 18 * p / 8) < 4 * p + 16 * p / 8
    assert profiles[3].peak.allocated_bytes > 18 * p / 8  # their stage 3 is a floor


def test_c04_a_tool_that_is_not_there_is_no_memory():
    """accelerate#2980: an old accelerate has no estimate-memory."""
    text = "accelerate <command> [<args>]: error: argument {config,env,launch,test}: invalid choice: 'estimate-memory' (choose from 'config', 'env', 'launch', 'test')"
    assert oom.read(text).kind == "none" and not reading.remarks(oom.read(text))
    assert said(text).keys() == {"no-job"}


def test_c06_what_is_not_divided_must_fit_on_one_card():
    """LLaMA-Factory#2379, axolotl#998: tables of totals were read as if 2 × 24 GB held 32: weights are whole on every card below stage 3."""
    def weights(stage: int, gpus: int) -> float:
        profile = estimated(Setup(model=LLAMA_7B, micro_batch=1, sequence=512, gpu="RTX 4090", world_size=gpus, gradient_checkpointing=True, deepspeed=zero(stage, offload_optimizer=CPU)))
        return profile.phase("steady", "forward").at_peak["parameters"] / profile.parameters
    assert weights(2, 2) == weights(2, 8) == pytest.approx(2, rel=0.01)
    assert weights(3, 8) == pytest.approx(2 / 8, rel=0.1)


def test_c08_the_hosts_side():
    """DeepSpeed#3606, #912: the estimator's host memory for stage 2 with offload, P × max(4N, 16) × 1.5, is 127 GiB for t5-3b on eight; stage 3 takes less."""
    # Theirs is eight fp32 copies while the model is loaded, half as much again as a margin. Ours is what DeepSpeed keeps, and each process's libraries.
    base = Setup(model=T5_3B, micro_batch=1, sequence=64, target_sequence=16, world_size=8, deepspeed=zero(2, "fp16", offload_optimizer=CPU))
    p = estimated(base).parameters
    kept = 16 * p / GiB
    assert kept < host_of(base) < p * 4 * 8 * 1.5 / GiB
    assert host_of(base.replace(deepspeed=zero(3, "fp16", offload_optimizer=CPU))) <= host_of(base)


def test_c10_the_lines_of_see_memory_usage():
    """DeepSpeed#4700: after offload MA is 0.58 GB and CA 26.71: the cache of loading, given out again, and not in use."""
    message = oom.read("[utils.py:803:see_memory_usage] MA 0.58 GB         Max_MA 0.58 GB         CA 26.71 GB         Max_CA 27 GB\nCPU Virtual Memory:  used = 80.1 GB, percent = 31.9%")
    assert not message.is_gpu and (message.allocated.bytes, message.reserved.bytes) == (round(0.58 * GiB), round(26.71 * GiB))
    remark, = reading.remarks(message)
    assert (remark.id, remark.severity) == ("memory-report", "hint") and "26.13 GiB" in remark.text and "empty_cache" in remark.text and "zero.Init" in remark.text


def test_c10_an_error_among_such_lines_comes_first():
    lines = "MA 0.58 GB Max_MA 0.58 GB CA 26.71 GB Max_CA 27 GB\n"
    assert oom.read(lines + MESSAGES[1]).requested is not None
    assert oom.read(lines + MESSAGES[49]).kind == "host"


def test_c12_config_arguments_and_length_before_the_run():
    """transformers#16987 asks for it: memory from config, arguments and length, with a warning before it happens."""
    arguments = "TrainingArguments('out', per_device_train_batch_size=64, bf16=True)\n" + json.dumps({**zero(2), "bf16": {"enabled": "auto"}})
    found = doctor(arguments, Setup(model="gpt2-large", micro_batch=1, sequence=1024, gpu="A10"))
    assert found.profile.verdict.answer == "does not fit" and "activations" in found.remarks[0].text
    assert found.best.answer == "fits"


# --- d: configs


@pytest.mark.parametrize("written", ['"5e8"', "5e8", "5E+8", "500_000_000", "500000000.0", '"500000000"', '"0.5B"'])
def test_d04_a_bucket_in_any_hand(written):
    """ArcticTraining#165: YAML makes a text of 5e8, and DeepSpeed refuses it."""
    for text in (f'{{"zero_optimization": {{"stage": 2, "reduce_bucket_size": {written}}}}}', f"zero_optimization:\n  stage: 2\n  reduce_bucket_size: {written}\n"):
        assert resolve(read(text).onto(Setup(model="gpt2", micro_batch=1))).reduce_bucket_size == 500_000_000


def test_d06_switches_in_quotes_and_old_keys():
    """DeepSpeed#745, #912: "true" in quotes, cpu_offload of 2021, and a slip of the pen."""
    text = '{"fp16": {"enabled": "true"}, "zero_optimization": {"stage": 2, "cpu_offload": "true", "overlap_comm": "true", "allgather_partitions": "true", "reduce_bucket_size": 200000000.0, "stage3_param_persitance_threshold": 1e5}}'
    pasted = read(text)
    settings = resolve(pasted.onto(Setup(model="gpt2", micro_batch=1)))
    assert (settings.precision, settings.overlap_comm, settings.reduce_bucket_size, settings.param_persistence_threshold) == ("fp16", True, 200_000_000, 100_000)
    assert settings.offload_optimizer.device == "cpu"
    # "true" in quotes is taken by DeepSpeed itself, and so needs no word.
    assert [f.key.rpartition(".")[2] for f in pasted.coercions] == ["cpu_offload", "stage3_param_persitance_threshold"]
    old = read('{"zero_optimization": {"stage": 3, "cpu_offload_params": true}}').changes["deepspeed"]["zero_optimization"]
    assert old["offload_param"] == {"device": "cpu"}


def test_d12_the_step_of_some_releases_visits_the_gpu():
    """DeepSpeed#5301 to #7309: from 0.14.1 to 0.16.9 an offloaded step copies the fp32 masters to the GPU: 25 GiB of a 7e9 model on one."""
    base = Setup(model=LLAMA_7B, micro_batch=1, sequence=512, gpu="A100-80GB", deepspeed=zero(2, "fp16", offload_optimizer=CPU))
    def step(version: str) -> int:
        return estimated(base.replace(deepspeed_version=version)).phase("steady", "step").peak_allocated_bytes
    p = estimated(base).parameters
    assert step("0.14.1") - step("0.14.0") == step("0.16.9") - step("0.16.10") == pytest.approx(4 * p, rel=0.01)


def test_d14_a_bucket_of_nothing_is_refused():
    """DeepSpeed#8266, #4875: 0 hangs or fails; a bucket larger than the model is taken."""
    with pytest.raises(BadInput, match="reduce_bucket_size"):
        resolve(Setup(model="gpt2", micro_batch=1, deepspeed=zero(2, reduce_bucket_size=0)))
    larger = Setup(model="gpt2", micro_batch=1, sequence=128, deepspeed=zero(2, reduce_bucket_size=10**9))
    assert estimated(larger).phase("steady", "backward").at_peak["comm_buffers"] == pytest.approx(2 * 10**9, rel=0.01)


@pytest.mark.parametrize(("version", "overlap", "told"), [("0.14.4", True, True), ("0.14.4", False, False), ("0.16.0", True, False), (None, True, False)])
def test_d14_small_buckets_and_overlap_in_one_release(version, overlap, told):
    """DeepSpeed#6351: in 0.14 a smaller bucket with overlap_comm gave a worse loss, or NaN."""
    base = Setup(model="gpt2", micro_batch=1, sequence=128, deepspeed_version=version)
    remarks = effects(setup := base.replace(deepspeed=zero(2, overlap_comm=overlap, reduce_bucket_size=10**7)), estimated(setup), None)
    assert any(r.id == "overlap-of-0.14" for r in remarks) == told


def test_d18_an_evaluation_is_told_with_its_bound():
    """transformers#8476 and others: a job that trains fails when it evaluates: logits of the whole set are put together."""
    arguments = "TrainingArguments('out', per_device_train_batch_size=1, per_device_eval_batch_size=16, eval_strategy='steps', bf16=True{})"
    def note(more: str) -> str:
        return next(n for n in estimated(read(arguments.format(more)).onto(Setup(model="gpt2", micro_batch=1))).notes if "evaluation" in n)
    assert "16 samples" in note("") and "with compute_metrics the Trainer keeps every batch's predictions too" in note("")
    kept = note(", include_for_metrics=['loss']")
    assert "16 samples" in kept and "predictions" in kept and "eval_accumulation_steps" in kept


def test_d20_loaded_in_bf16_the_masters_are_fp32_all_the_same():
    """accelerate's guide, trl#1980: torch_dtype changes nothing of 4 + 4 + 4 bytes a parameter."""
    text = "model = AutoModelForCausalLM.from_pretrained('gpt2-large', torch_dtype=torch.bfloat16)\n" + json.dumps({**zero(1), "train_micro_batch_size_per_gpu": 1})
    setup = read(text).onto(Setup(model="gpt2", micro_batch=1)).replace(sequence=128)
    assert estimated(setup).at_peak["optimizer"] == pytest.approx(12 * estimated(setup).parameters, rel=1e-3)
    # What halves them is a setting of its own, which DeepSpeed takes with an offloaded optimizer alone; then ours is an upper bound.
    halved = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "zero_optimization": {"stage": 2, "offload_optimizer": CPU}}
    bound = next(f for f in resolve(setup.replace(deepspeed=halved)).not_modelled if f.key == "bf16.bf16_master_weights_and_grads")
    assert "at most" in bound.text
    with pytest.raises(BadInput, match="offload"):
        resolve(setup.replace(deepspeed={"bf16": halved["bf16"], "zero_optimization": {"stage": 2}}))
