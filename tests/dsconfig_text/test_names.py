"""Names that a pasted script gives to values: `BATCH = 32` and where it is used; what is code is told, with what is taken in its place."""

from __future__ import annotations

import time

import pytest

from explorer.dsconfig.literals import Bindings
from explorer.dsconfig.read import read
from explorer.errors import BadInput
from explorer.setup import Setup

_USE = "args = TrainingArguments('o', per_device_train_batch_size=BATCH)\n"


def found(text: str) -> dict[str, str]:
    pasted = read(text)
    return {f.key: f.text for f in (*pasted.coercions, *pasted.unread)}


@pytest.mark.parametrize("text", [
    f"BATCH = 32\n{_USE}", f"BATCH=32  # a GPU\n{_USE}", f"BATCH: int = 4 * 8\n{_USE}", f"HALF = 16\nBATCH = HALF * 2\n{_USE}", f"BATCH = 8\nBATCH = 32\n{_USE}", f">>> BATCH = 32\n>>> {_USE}",
    "def main():\n    BATCH = 32\n    " + _USE, f"def other():\n    batch = 4\nBATCH = 32\n{_USE}",
    "common = dict(per_device_train_batch_size=32, bf16=True)\nargs = TrainingArguments('o', **common)\n", "n = 32\ncommon = {\n    'per_device_train_batch_size': n,\n}\nargs = TrainingArguments('o', **common)\n",
    f"train(\n    BATCH=4,\n)\nBATCH = 32\ntrain(\n    BATCH=BATCH,\n)\n{_USE}",
])
def test_a_name_is_what_the_text_says(text: str) -> None:
    pasted = read(text)
    assert pasted.changes["micro_batch"] == pasted.changes["trainer"]["per_device_train_batch_size"] == 32
    assert not pasted.unread and not [f for f in pasted.coercions if f.key == "per_device_train_batch_size"]


@pytest.mark.parametrize("text", [
    _USE, f"BATCH = int(sys.argv[1])\n{_USE}", f"BATCH = 32\nif small:\n    BATCH = 4\n{_USE}", f"BATCH = 32\nBATCH *= 2\n{_USE}", f"{_USE}BATCH = 32\n", f"BATCH = BATCH\n{_USE}", f"def other():\n    BATCH = 4\n{_USE}",
    "args = TrainingArguments('o', per_device_train_batch_size=cfg.batch)",
])
def test_a_batch_that_cannot_be_read_is_no_default(text: str) -> None:
    pasted, said = read(text), found(text)
    assert "micro_batch" not in pasted.changes and "default of 8" not in str(said)
    assert "is no value but code" in said["per_device_train_batch_size"] and "the job's own batch stays" in said["per_device_train_batch_size"]
    assert pasted.onto(Setup(model="gpt2", micro_batch=5)).micro_batch == 5


def test_arguments_unread_as_a_whole_may_hold_the_batch() -> None:
    said = found("args = TrainingArguments('o', **cfg)")
    assert "may be in what is not read" in said["per_device_train_batch_size"] and "is cfg" in said["**"]


def test_what_is_taken_in_the_place_of_code_is_told() -> None:
    said = found("args = SFTConfig('o', gradient_accumulation_steps=n, gradient_checkpointing=g, max_length=k)")
    assert "1 is taken, the default" in said["gradient_accumulation_steps"] and "true is taken" in said["gradient_checkpointing"] and "1024 is taken" in said["max_length"]


def test_a_models_name() -> None:
    assert read("model_name = 'gpt2'\nmodel = AutoModelForCausalLM.from_pretrained(model_name)\n").changes["model"] == "gpt2"
    assert "is cfg.model" in found("model = AutoModelForCausalLM.from_pretrained(cfg.model)")["model"]
    assert "model" not in found("model = AutoModelForCausalLM.from_pretrained(cfg.model)\ntokenizer = AutoTokenizer.from_pretrained('gpt2')\n")


def test_a_config_in_python_with_names_in_it() -> None:
    text = "STAGE = 3\nds_config = {\n    'zero_optimization': {'stage': STAGE, 'overlap_comm': True},  # three\n    'train_micro_batch_size_per_gpu': BS,\n}\nargs = TrainingArguments('o', bf16=True, deepspeed=ds_config)\n"
    pasted = read(text)
    assert pasted.changes["deepspeed"] == {"zero_optimization": {"stage": 3, "overlap_comm": True}}
    slips = [(f.key, f.text) for f in pasted.coercions if f.id == "not-json"]
    assert slips == [("line 3 of the DeepSpeed config", "gives \"train_micro_batch_size_per_gpu\" as BS, which is no value; it is left out")]
    assert read(text.replace("BS", "4")).changes["micro_batch"] == 4
    assert not [f for f in read(text.replace("BS", "4")).coercions if f.id == "several-configs"]


def test_json_has_the_lines_of_its_own_object() -> None:
    assert [f.key for f in read("Hi,\n\nthis is mine:\n{\n  'zero_optimization': {\"stage\": 2}}").coercions if f.id == "not-json"] == ["line 2 of the DeepSpeed config"]
    assert [f.key for f in read("\n{\n  'zero_optimization': {\"stage\": 2}}").coercions if f.id == "not-json"] == ["line 3"]


def test_names_grow_to_nothing() -> None:
    """Lists of lists of lists, sums of sums, and brackets without end: soon over, and never run."""
    started = time.perf_counter()
    for line in ("a{0} = [a{1}, a{1}, a{1}, a{1}]\n", "a{0} = a{1} + a{1}\n", "a{0} = {{'per_device_train_batch_size': a{1}, 'x': a{1}}}\n", "a{0} = ((((a{1}\n", "a{0} = dict(x=a{1}, y=a{1})\n"):
        text = "a0 = 1\n" + "".join(line.format(i + 1, i) for i in range(3000)) + "args = TrainingArguments('o', per_device_train_batch_size=a40)\n" * 300
        try:
            read(text).onto(Setup(model="gpt2", micro_batch=1))
        except BadInput:
            pass
    assert time.perf_counter() - started < 10


def test_a_name_of_another_functions_is_not_ours() -> None:
    bindings = Bindings("a = 1\ndef f():\n    b = 2\ndef g():\n    c = 3\n    call()\n")
    assert set(bindings.before(bindings.text.index("call"))) == {"a", "c"}
