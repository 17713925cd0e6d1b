"""Python as people paste it: trainers with a model's name, peft, bitsandbytes, unsloth, torch's own wrappers."""

from __future__ import annotations

import pytest

from tests.cases.shell import ids, said

MODEL = "Qwen/Qwen2.5-0.5B"
ARGS = 'args=SFTConfig(output_dir="o", per_device_train_batch_size=2, max_length=512)'


@pytest.mark.parametrize("text", [
    f'trainer = SFTTrainer(model="{MODEL}", {ARGS}, train_dataset=ds)',
    f'trainer = SFTTrainer("{MODEL}", {ARGS}, train_dataset=ds)',
    f'name = "{MODEL}"\ntrainer = SFTTrainer(\n    model=name,\n    train_dataset=load_dataset("trl-lib/Capybara", split="train"),\n    {ARGS},\n)',
    f'MODEL_ID = "{MODEL}"\nmodel = AutoModelForCausalLM.from_pretrained(MODEL_ID)\ntrainer = SFTTrainer(model=model, {ARGS})',
    f'name = "{MODEL}"\ntrainer = SFTTrainer(model=AutoModelForCausalLM.from_pretrained(name), {ARGS})',
])
def test_a_trainers_model_and_arguments(shell, text):
    job = shell.check(text)["job"]
    assert (job["model"], job["micro_batch"], job["sequence"], job["trainer"]["bf16"]) == (MODEL, 2, 512, True)
    assert job["gradient_checkpointing"] is not False


@pytest.mark.parametrize(("text", "batch"), [
    (f'trainer = DPOTrainer("{MODEL}", args=DPOConfig("o", per_device_train_batch_size=1, max_length=512), train_dataset=d)', 1),
    (f'm = AutoModelForCausalLM.from_pretrained("{MODEL}")\nt = Trainer(m, TrainingArguments("o", per_device_train_batch_size=3), data)', 3),
    (f'trainer = SFTTrainer("{MODEL}", train_dataset=ds, peft_config=LoraConfig(r=4))', 8),
])
def test_other_trainers(shell, text, batch):
    job = shell.check(text)["job"]
    assert (job["model"], job["micro_batch"]) == (MODEL, batch)


def test_a_class_of_ones_own_is_no_trainer(shell):
    answer = shell.check(f'class MyTrainer(Trainer):\n    pass\nmodel = AutoModel.from_pretrained("{MODEL}")\nargs = TrainingArguments("o")\n')
    assert answer["job"]["model"] == MODEL and answer["job"]["trainer"] == {"output_dir": "o"}


BASE = f'model = AutoModelForCausalLM.from_pretrained("{MODEL}")\nargs = TrainingArguments("o", bf16=True, per_device_train_batch_size=1)\n'


@pytest.mark.parametrize(("call", "lora"), [
    ('LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=TaskType.CAUSAL_LM)', {"r": 16, "target_modules": "all-linear"}),
    ('LoraConfig(16, ["q_proj", "v_proj"], lora_alpha=32)', {"r": 16, "target_modules": ["q_proj", "v_proj"]}),
    ("peft.LoraConfig(**settings)", {"r": 4, "target_modules": ["q_proj"]}),
])
def test_pefts_config(shell, call, lora):
    answer = shell.check(f'settings = {{"r": 4, "target_modules": ["q_proj"]}}\n{BASE}model = get_peft_model(model, {call})\n')
    assert answer["job"]["lora"] == lora and answer["estimate"]["trainable_parameters"] < answer["estimate"]["parameters"] / 20
    assert not [f for f in answer["findings"] if "task_type" in f["key"] or "lora_alpha" in f["key"]]


def test_what_is_code_in_pefts_config_is_told_with_what_is_taken(shell):
    answer = shell.check(f"{BASE}model = get_peft_model(model, LoraConfig(r=args.rank, target_modules=find_all(model)))\n")
    assert answer["job"]["lora"] == {} and "8 is taken, the default" in said(answer)


@pytest.mark.parametrize(("load", "double"), [
    ("load_in_4bit=True", False),
    ('quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)', True),
    ("quantization_config=bnb", True),
])
def test_4_bit_under_lora(shell, load, double):
    text = (
        "bnb = BitsAndBytesConfig(\n    load_in_4bit=True,\n    bnb_4bit_use_double_quant=True,\n    bnb_4bit_compute_dtype=torch.bfloat16,\n)\n" if load.endswith("=bnb") else ""
    ) + BASE.replace('")\nargs', f'", {load})\nargs') + "model = get_peft_model(model, LoraConfig(r=8, target_modules='all-linear'))\n"
    model = shell.check(text)["job"]["model"]
    assert model == f"{MODEL}-bnb-4bit" if double else model["quantization_config"]["bnb_4bit_use_double_quant"] is False


@pytest.mark.parametrize(("model", "peft", "lora"), [
    ('model_name="unsloth/Qwen2.5-0.5B", max_seq_length=1024, load_in_4bit=True', "r=8, target_modules=['q_proj']", {"r": 8, "target_modules": ["q_proj"]}),
    ('"unsloth/Qwen2.5-0.5B", max_seq_length=1024', "lora_alpha=16", {"r": 16}),
])
def test_unsloth(shell, model, peft, lora):
    answer = shell.check(
        f"model, tokenizer = FastLanguageModel.from_pretrained({model})\nmodel = FastLanguageModel.get_peft_model(model, {peft})\n"
        "trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, max_length=1024))\n"
    )
    job = answer["job"]
    assert (job["model"], job["sequence"], job["micro_batch"]) == (f"{MODEL}-bnb-4bit", 1024, 2)
    assert lora.items() <= job["lora"].items() and job["gradient_checkpointing"] is not False
    assert any(f["key"] == "unsloth" for f in answer["findings"]) and "refused" not in ids(answer)
