"""Ten thousand mutated texts: nothing but BadInput or CouldNotRun reaches the person, nothing is run or opened, and each answer comes within a second."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from explorer.advice import doctor, oom, reading
from explorer.dsconfig.arguments import NAMES
from explorer.dsconfig.keys import ZERO
from explorer.dsconfig.read import read
from explorer.dsconfig.sections import KNOWN, REMOVED
from explorer.dsconfig.write import write
from explorer.errors import BadInput, CouldNotRun
from explorer.jsonfile import LARGEST_BYTES
from explorer.setup import Setup
from tests.advice.test_doctor import SEED_CONFIG
from tests.advice.test_oom import MESSAGES

TOUCHED = "touched-by-a-paste"
"""What every call, tag and substitution of the seeds would write, were it run."""
BASE = Setup(model="gpt2", micro_batch=1)

JSON = [
    SEED_CONFIG,
    '{"zero_optimization": {"stage": 2, "cpu_offload": "true", "reduce_bucket_size": "5e8",}, // two\n "train_batch_size": 32, "bf16": {"enabled": True}}',
    '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}, "stage3_max_live_parameters": 1e9, "sub_group_size": 1_000_000}, "optimizer": {"type": "AdamW", "params": {"lr": "1e-5", "betas": [0.9, 0.95]}}}',
    '{"model": "gpt2", "micro_batch": 4, "deepspeed": {"zero_optimization": {"stage": 1}}, "trainer": {"fp16": true}, "lora": {"r": 8, "target_modules": ["c_attn"]}, "capacity_gib": 24}',
    '{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4}',
    '{"per_device_train_batch_size": 3, "gradient_checkpointing": true, "gradient_checkpointing_kwargs": {"use_reentrant": false}, "optim": "adafactor"}',
]
YAML = [
    f"compute_environment: LOCAL_MACHINE\ndeepspeed_config:\n  gradient_accumulation_steps: 4\n  offload_optimizer_device: cpu\n  zero3_init_flag: true\n  zero_stage: 3\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 16\nextra: !!python/object/apply:os.system ['touch {TOUCHED}']\n",
    "zero_optimization:\n  stage: 2\n  reduce_bucket_size: 5e8\nbf16:\n  enabled: true\ntrain_micro_batch_size_per_gpu: 2\n",
    "### model\nmodel_name_or_path: /data/Qwen2.5-7B\ncutoff_len: 4096\nflash_attn: fa2\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\nbf16: true\ndeepspeed: examples/ds_z3.json\nlist:\n  - a\n  - &b 0x1F\n  - *b\n",
]
PYTHON = [
    f"training_args = TrainingArguments(\n    'out', per_device_train_batch_size=4 * 2,  # eight\n    learning_rate=1e-5, bf16=True, report_to=__import__('os').system('touch {TOUCHED}'),\n    deepspeed={{'zero_optimization': {{'stage': 3}}, 'bf16': {{'enabled': 'auto'}}}},\n)\n",
    f"model = AutoModelForCausalLM.from_pretrained('gpt2', attn_implementation='eager', revision=open('{TOUCHED}', 'w').name)\nmodel.gradient_checkpointing_enable(gradient_checkpointing_kwargs={{'use_reentrant': False}})\n",
    f"config = LoraConfig(r=int(16), target_modules=['c_attn', *eval(\"open('{TOUCHED}', 'w')\")], lora_alpha=0x20)\nargs = SFTConfig(max_seq_length=1_024, **{{'warmup_steps': 10 // 2, 'max_steps': -1}})\n",
]
COMMANDS = [
    f"$ PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:128 deepspeed --num_gpus=4 --num_nodes 2 train.py \\\n   --model_name_or_path gpt2-large --run_name $(touch {TOUCHED}) \\\n   --per_device_train_batch_size 4 --bf16 True --deepspeed ds.json --gradient_checkpointing\n",
    f"accelerate launch --use_deepspeed --zero_stage 3 --offload_param_device cpu --mixed_precision bf16 --num_processes 2 run.py `touch {TOUCHED}` --per_device_train_batch_size 1\n",
    "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 --nnodes 1:2 run.py --bf16 --learning_rate=1e-5 --max_seq_length 'a b'\n",
    MESSAGES[49],
]
OOM = [MESSAGES[n] for n in (1, 3, 17, 19, 21, 31, 33, 35, 37, 41, 45, 53)]
TOGETHER = [f"Hi all,\n```json\n{JSON[0]}\n```\nand\n{PYTHON[0]}\nI run\n{COMMANDS[0]}\nand get\n{OOM[0]}", f"{YAML[0]}\n{COMMANDS[1]}\n{OOM[2]}\n{PYTHON[1]}", f"> {JSON[1]}\n>> {OOM[6]}\n{PYTHON[2]}{YAML[1]}"]
KINDS = {"JSON": JSON, "YAML": YAML, "Python": PYTHON, "commands": COMMANDS, "messages": OOM, "together": TOGETHER}
EXAMPLES = {"JSON": 1500, "YAML": 1500, "Python": 1500, "commands": 1500, "messages": 1500, "together": 1000}
JOBS = 1500

PIECES = [
    "{", "}", "[", "]", "(", ")", '"', "'", '"""', ",", ":", ";", "\n", "\r", "\\", "\\\n", "#", "//", "/*", "*/", "=", "-", "--", "- ", "  ", "\t", "&a ", "*a", "!!", "? ", "|", ">", "%", "$", "`", "<br>", "&#x1b;",
    "\x00", "\x1b[31m", "\x0c", "\u2028", "\ud800", "\u202e", "\u200f", "\ufeff", "\u00a0", "“", "é", "٣", "²", "Ⅷ", "𝟗", "ß", "İ",
    "1e400", "-1e400", "9" * 5000, "0x" + "f" * 5000, "1" + "0" * 400 + ".5", "-1", "0", "1e-400", ".inf", ".nan", "NaN", "Infinity", "1:2:3", "2001-01-01", "0.1.2", "1_0", "1e5j", "b'x'", "f'{x}'", "...",
    "auto", "null", "None", "True", "yes", "none", "~", "lambda: 0", "not ", "**{}", "*x", "[" * 99, "(" * 300, "{'a':" * 99, "-" * 400, "if 1 else ", " for x in y", "<<: ",
    " GiB", " bytes", "KiB", "Tried to allocate ", "out of memory", "Process 1 has ", "zero_optimization", '"stage": ', "offload_param", "cpu_offload", "deepspeed", "TrainingArguments(", "model_name_or_path", "lora", "per_device_train_batch_size",
]


def mutated(seeds: list[str]) -> st.SearchStrategy[str]:
    """A seed with up to six cuts, each with something else in its place, which one time in eight stands there fifty times."""
    slices = [text[a:b] for text in seeds for a, b in ((0, 40), (20, 90), (-60, -1))]
    cut = st.tuples(st.integers(0, 1 << 32), st.sampled_from([*PIECES, *slices]) | st.text(max_size=4))
    return st.builds(_with_cuts, st.sampled_from(seeds), st.lists(cut, min_size=1, max_size=6))


ODD = [None, True, False, 0, 1, 2, 3, -1, 1.5, 1e9, 1e-5, 10**30, 1e300, "auto", "5e8", "true", "none", "cpu", "nvme", "", "1e400", "0x10", "\ud800", "AdamW", "bf16", [0.9, 0.95], [], {}]


def jobs() -> st.SearchStrategy[str]:
    """A job file whose keys are real and whose values may be anything."""
    odd = st.recursive(st.sampled_from(ODD), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["enabled", "type", "params", "device", "r"]), inner, max_size=2), max_leaves=3)

    def some(keys: Iterable[str], **likely: Any) -> st.SearchStrategy[dict[str, Any]]:
        return st.builds(lambda usual, strange: usual | strange, st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in likely.items()}), st.dictionaries(st.sampled_from(sorted(keys)), odd, max_size=2))

    zero = some(ZERO, stage=[0, 1, 2, 3], offload_optimizer=[{"device": "cpu"}], overlap_comm=[True], reduce_bucket_size=["auto", 1000])
    config = st.builds(lambda given, section: {"zero_optimization": section, **given}, some(KNOWN | REMOVED.keys(), bf16=[{"enabled": True}, {"enabled": "auto"}], optimizer=[{"type": "AdamW", "params": {"lr": "auto"}}, {"type": "Muon", "params": {}}]), zero)
    trainer = st.none() | some(NAMES, bf16=[True], per_device_train_batch_size=[1, 2], gradient_checkpointing=[True])
    job = some((f.name for f in fields(Setup)), gradient_checkpointing=[True], world_size=[2])
    return st.builds(lambda given, deepspeed, arguments: json.dumps({"model": "gpt2", "micro_batch": 1, "deepspeed": deepspeed, "trainer": arguments, **given}), job, config, trainer)


def _with_cuts(text: str, cuts: list[tuple[int, str]]) -> str:
    for number, put in cuts:
        at, length, times = number % (len(text) + 1), number // 7 % 40, 50 if number % 8 == 7 else 1
        text = text[:at] + put * times + text[at + length :]
    return text


# --- what is asked of every answer


def answered(text: str) -> None:
    """The text through every reader, onto a job, and out again."""
    message = oom.read(text)
    said = [message.to_json(), [remark.to_json() for remark in reading.remarks(message)]]
    pasted = read(text)
    said += [pasted.understood, [[f.key, f.text] for f in (*pasted.coercions, *pasted.unread)]]
    json.dumps(said)
    write(pasted.onto(BASE))


FORBIDDEN = ("exec", "open", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "import", "pickle.", "urllib.")
_done: list[str] | None = None


def _watch(event: str, arguments: tuple) -> None:
    """Python's own record of what a program does (sys.addaudithook); `compile` is how a text is read, and not in it."""
    if _done is not None and event.startswith(FORBIDDEN):
        _done.append(f"{event} {arguments!r:.200}")


sys.addaudithook(_watch)  # there is no taking it back: it looks away outside `nothing_done`


@contextmanager
def nothing_done() -> Iterator[None]:
    """Fails where anything was executed, opened, imported or connected to."""
    global _done
    _done = []
    try:
        yield
    finally:
        did, _done = _done, None
    assert not did


@contextmanager
def only_a_sentence() -> Iterator[None]:
    """BadInput and CouldNotRun are answers, and their sentences can be written anywhere."""
    try:
        yield
    except (BadInput, CouldNotRun) as answer:
        str(answer).encode()


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What is imported or read once, is by now."""
    for seeds in KINDS.values():
        for text in seeds:
            with only_a_sentence():
                answered(text)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to be in, where nothing may appear."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


# --- ten thousand


def test_there_are_ten_thousand() -> None:
    assert sum(EXAMPLES.values()) + JOBS >= 10_000


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_breaks_a_reader(kind: str) -> None:
    run(mutated(KINDS[kind]), EXAMPLES[kind], answered)


def test_no_value_breaks_a_reader() -> None:
    run(jobs(), JOBS, answered)


def test_no_text_breaks_the_doctor() -> None:
    run(mutated(TOGETHER), 25, lambda text: json.dumps(doctor(text, BASE).to_json()), watched=False)


def run(texts: st.SearchStrategy[str], examples: int, answer: Callable[[str], object], watched: bool = True) -> None:
    """Hypothesis, the same texts every time."""

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(texts)
    def each(text: str) -> None:
        with only_a_sentence():
            if watched:
                with nothing_done():
                    answer(text)
            else:
                answer(text)

    each()


def of(piece: str, before: str = "", after: str = "") -> str:
    """A text of the largest size that is read, of one piece without end."""
    room = LARGEST_BYTES - len(before) - len(after)
    return before + (piece * (room // len(piece) + 1))[:room] + after


def numbered(form: str, before: str, after: str) -> str:
    return before + ",".join(form.format(n) for n in range(20_000)) + after


LARGE = {
    "braces": of("{"), "brackets": of("[({"), "quotes": of("\""), "backslashes": of("\\"), "NULs": of("\x00"), "lone surrogates": of("\ud800"), "right to left": of("\u202e\u200f"), "blank": of(" "), "empty lines": of("\n"), "digits": of("9"), "a number": of("9", '{"zero_optimization": {"stage": '), "one word": of("a"),
    "objects in objects": of('{"zero_optimization":'), "objects beside objects": of('{"zero_optimization":{"stage":2}}\n'), "one key": of('"stage": 2, ', '{"zero_optimization": {'), "half a comment": of("/* *", "{"), "log of losses": of("{'loss': 0.5, 'epoch': 1.0}\n"),
    "unknown keys": numbered('"stage3_max_{0}": {0}', '{"zero_optimization": {', "}}"), "unknown arguments": numbered('"learning_{0}": {0}', '{"per_device_train_batch_size": 1, ', "}"),
    "calls in calls": of("TrainingArguments("), "arguments": of("a=1, ", "TrainingArguments("), "calls": of("TrainingArguments(bf16=True)\n"), "dicts in dicts": of("dict(zero_optimization="), "dicts": of("dict(zero_optimization=dict(stage=2)), "), "minus": of("-", "TrainingArguments(a=", "1)"),
    "YAML": of("bf16: true\n"), "YAML's brackets": of("  a: [\n", "zero_optimization:\n"), "one line of YAML": of("x ", "deepspeed_config: "),
    "commands": of("python a.py --bf16\n"), "options": of("--a ", "deepspeed a.py "), "continued": of("\\\n", "deepspeed a.py "), "prompts": of("> \n"), "variables": of("A=1 "), "lists": of("['a', 'b', 'c']"),
    "requests": of("Tried to allocate 1.00 GiB "), "messages": of(MESSAGES[17]), "processes": of("Process 1 has 1.00 GiB memory in use. ", "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 2.00 GiB"), "colours": of("\x1b[31m"), "marks of trouble": of("NCCL pin_memory "),
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_a_mebibyte_gets_an_answer_or_a_sentence(text: str) -> None:
    with only_a_sentence(), nothing_done():
        answered(text)


@pytest.mark.parametrize("text", [
    '{"zero_optimization": {"stage": 1e400, "reduce_bucket_size": ' + "9" * 5000 + "}}", "TrainingArguments(learning_rate=1e400, max_steps=" + "9" * 5000 + ")", "TrainingArguments(max_steps=0x" + "f" * 5000 + ")", "TrainingArguments(max_steps=f(0x" + "f" * 5000 + "))",
    "TrainingArguments(a=" + "-" * 900 + "x)", "TrainingArguments(max_steps=9**9**9**9)", "per_device_train_batch_size: 0x" + "f" * 5000, "zero_optimization: " + "[" * 400, "zero_optimization: &a [*a]", "LoraConfig(r=0x" + "f" * 5000 + ")",
    '{"zero_optimization": {"stage": int(1e400), "reduce_bucket_size": int(1.2.3), "overlap_comm": 1.2.3}}', "deepspeed a.py --per_device_train_batch_size " + "9" * 5000, "CUDA out of memory. Tried to allocate " + "9" * 5000 + ".00 GiB", "['python', '\ud800', '--bf16', '\\N{']",
], ids=lambda text: text[:30].encode("ascii", "replace").decode())
def test_numbers_and_nests_beyond_all_measure(text: str) -> None:
    with only_a_sentence(), nothing_done():
        answered(text)


def test_what_is_larger_is_refused() -> None:
    for reader in (read, oom.read):
        with pytest.raises(BadInput, match="over 1 MiB"):
            reader(of("a") + "a")


def test_what_would_be_run_is_noticed() -> None:
    """The watch sees what it is there for."""
    for code in ("open('/dev/null')", "__import__('os').system('true')", "exec('')"):
        with pytest.raises(AssertionError), nothing_done():
            eval(code)
