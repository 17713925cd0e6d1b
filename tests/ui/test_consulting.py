"""From a paste to the cause, a fix and its real step, as state: no browser, no kernel; the doctor and the estimates are the real ones."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from explorer import advice as doctors
from explorer.measure.runner import accelerator
from explorer.setup import Setup
from explorer.ui import doctor_html
from explorer.ui.consulting import ITSELF, Consulting, File, files
from explorer.ui.state import ExplorerState
from explorer.ui.texts import ENGLISH
from explorer.units import GiB
from tests.browser.conftest import TINY

CASE = (Path(__file__).parent / "clip-stage2.txt").read_text(encoding="utf-8")
"""The question this project began with: a config and a message, as they were asked."""
TOO_LARGE = {"model": "openai/clip-vit-large-patch14", "micro_batch": 320, "gpu": "A100-80GB", "deepspeed": {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "zero_optimization": {"stage": 2}}}


def opened(setup: Setup | None = None) -> Consulting:
    state = ExplorerState(setup)
    made = Consulting(state)
    state.wait_estimate()
    return made


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def paste(consulting: Consulting, text: str) -> None:
    consulting.text = text
    consulting.wait(60)


def fix(consulting: Consulting, name: str):
    return next(f for f in consulting.advice.fixes if f.id == name)


@pytest.fixture(scope="module")
def pasted() -> Consulting:
    """The page with the case pasted; the tests that share it put the controls back."""
    made = opened()
    paste(made, CASE)
    return made


# --- the case this began with


def test_the_cause_is_said_and_what_it_rests_on(pasted):
    first = pasted.advice.remarks[0]
    assert (first.id, first.severity) == ("dominant-activations", "cause")
    profile = pasted.advice.profile
    assert profile.at_peak["activations"] > 0.9 * profile.peak.allocated_bytes
    assert pasted.state.estimate.verdict.answer == "does not fit"


def test_offloading_parameters_will_not_fit_it_and_checkpointing_will(pasted):
    offload, checkpointing = fix(pasted, "stage-3-offload"), fix(pasted, "gradient-checkpointing")
    assert offload.answer == "does not fit" and not offload.helps and 0 < offload.saved_bytes < 2 * GiB
    assert checkpointing is pasted.advice.best
    assert checkpointing.saved_bytes > 0.8 * pasted.advice.profile.peak.allocated_bytes


def test_the_controls_have_moved_and_say_from_where(pasted):
    state = pasted.state
    moved = {move.control: (move.before, move.after) for move in pasted.moves}
    assert moved["world_size"] == (1, 2)  # the message is GPU 1's
    assert moved["reduce_bucket_size"] == (None, 200_000_000)
    assert all(getattr(state, name) == after for name, (_, after) in moved.items())
    assert state.problem is None and pasted.in_use == ITSELF and not pasted.outdated
    assert pasted.text == CASE


def test_what_is_applied_is_what_was_promised(pasted):
    promised = fix(pasted, "gradient-checkpointing")
    pasted.apply("gradient-checkpointing")
    pasted.wait()
    assert pasted.state.gradient_checkpointing and pasted.in_use == "gradient-checkpointing" and not pasted.outdated
    assert pasted.state.estimate.peak == promised.profile.peak
    pasted.apply(ITSELF)
    pasted.wait()
    assert not pasted.state.gradient_checkpointing and pasted.in_use == ITSELF


def test_undo_puts_everything_back_and_use_brings_it_again(pasted):
    pasted.undo()
    pasted.wait()
    assert (pasted.state.micro_batch, pasted.state.precision, pasted.state.world_size) == (64, "fp16", 1)
    assert pasted.undone and pasted.advice is None  # what stood there before fits
    assert pasted.text == CASE and pasted.pasted is not None
    pasted.use()
    pasted.wait()
    assert pasted.in_use == ITSELF and not pasted.undone and fix(pasted, "gradient-checkpointing").answer == "fits"


def test_a_batch_set_by_hand_is_answered_anew_with_the_message(pasted):
    pasted.state.micro_batch = 300
    assert pasted.outdated and pasted.advice.setup.micro_batch != 300
    pasted.wait()
    assert pasted.advice.setup.micro_batch == 300 and pasted.in_use == ITSELF and not pasted.outdated
    assert "fragmentation" in {r.id for r in pasted.advice.remarks}
    pasted.state.gpu = "H200"  # which the message's card is not
    pasted.wait()
    assert pasted.advice is None or pasted.advice.setup.gpu == "H200"
    pasted.use()
    pasted.wait()


def test_typing_on_starts_from_the_same_job(pasted):
    paste(pasted, CASE + "\nTrainingArguments(output_dir='o', per_device_train_batch_size=300)\n")
    assert pasted.state.micro_batch == 300
    assert {m.control: m.before for m in pasted.moves}["micro_batch"] == 64
    paste(pasted, CASE)
    assert pasted.state.micro_batch != 300
    assert {m.control: m.before for m in pasted.moves}["micro_batch"] == 64


def test_the_page_says_it(pasted):
    assert "DeepSpeed config" in doctor_html.said(pasted)
    assert "7.04 GiB" in doctor_html.reading(pasted)
    shown = doctor_html.advice(pasted, has_accelerator=True)
    rows = re.findall(r'<tr data-fix="([^"]*)"', shown)
    assert rows[:2] == ["", "gradient-checkpointing"] and "stage-3-offload" in rows
    assert rows.index("stage-3-offload") > shown[: shown.index("ex-useless")].count("data-fix")
    assert "zero_optimization.stage" in doctor_html.more(pasted)
    assert "are activations" in doctor_html.heard(pasted) and "Gradient checkpointing makes it fit" in doctor_html.heard(pasted)
    pasted.state.micro_batch = 16  # which fits: what was said of the larger job is of no use
    pasted.wait()
    assert doctor_html.advice(pasted, True) == doctor_html.heard(pasted) == ""
    pasted.use()
    pasted.wait()


# --- without a paste


def test_a_job_that_does_not_fit_is_helped_and_one_that_fits_is_let_alone():
    consulting = opened(Setup.from_job(TOO_LARGE))
    consulting.wait()
    assert fix(consulting, "gradient-checkpointing").answer == "fits"
    consulting.apply("gradient-checkpointing")
    consulting.wait()
    assert consulting.in_use == "gradient-checkpointing" and consulting.advice is not None  # the others stay at hand
    consulting.state.micro_batch = 16
    consulting.wait()
    assert consulting.advice is None and consulting.in_use is None


def test_nothing_is_sought_while_a_control_moves(monkeypatch):
    asked = []
    monkeypatch.setattr(doctors.consultation, "consult", lambda setup, *rest, **more: asked.append(setup.micro_batch) or pytest.fail("sought") if setup.micro_batch != 340 else doctors.consultation.Consultation(message=rest[1], pasted=rest[0], setup=setup))
    consulting = opened(Setup.from_job(TOO_LARGE | {"micro_batch": 330}))
    for n in range(331, 341):
        consulting.state.micro_batch = n
        consulting.state.wait_estimate()
    consulting.wait()
    assert consulting.advice.setup.micro_batch == 340 and asked == []


# --- what is no help


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello, it does not work", "Nothing of a configuration or an error"),
        ("\0\0<script>alert(1)</script>\ud800", "Nothing of a configuration or an error"),
        ("{" * 200_000, "Nothing of a configuration or an error"),
        ("x" * ((1 << 20) + 1), "over 1 MiB"),
    ],
    ids=["words", "NULs and half a character", "braces", "too much"],
)
def test_what_says_nothing_moves_nothing(text, said):
    consulting = opened()
    before = consulting.state.values()
    paste(consulting, text)
    assert said in doctor_html.said(consulting)
    assert consulting.state.values() == before and consulting.text == text and not consulting.busy
    paste(consulting, "")
    assert doctor_html.said(consulting) == "" and consulting.pasted is None


def test_a_refused_config_is_a_sentence():
    consulting = opened()
    paste(consulting, '{"zero_optimization": {"stage": 7}}')
    assert consulting.state.stage == "2" and "stage" in consulting.problem
    assert any("stage" in r.text for r in consulting.pasted.remarks if r.severity == "problem")


def test_where_deepspeed_would_have_stopped_is_told_and_everything_shown_is_escaped():
    consulting = opened()
    paste(consulting, '{"<script>alert(1)</script>": "<img src=x onerror=alert(2)>", "zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8", "<kbd>": 1,}} CUDA out of memory. Tried to allocate 2.00 GiB <svg>')
    assert consulting.state.reduce_bucket_size == 500_000_000
    reading = doctor_html.reading(consulting)
    assert "DeepSpeed would have stopped here" in reading and "&lt;kbd&gt; is no key" in reading and "reduce_bucket_size" in reading
    for shown in (reading, doctor_html.advice(consulting, True), doctor_html.more(consulting), doctor_html.files((File(name="<img>", content="<script>"),))):
        assert not re.search(r"<(script|img|kbd|svg)\b", shown)
    assert "&lt;script&gt;" in doctor_html.more(consulting)


def test_every_fix_has_words_of_its_own(root):
    source = (root / "explorer" / "advice" / "candidates.py").read_text(encoding="utf-8")
    names = [*re.findall(r'Candidate\("([\w-]+)"', source), "stage-1", "stage-2", "stage-3", "fp16", "bf16"]
    assert len(names) > 12
    assert not [name for name in names if f"fix.{name}" not in ENGLISH]


def test_a_remark_with_a_key_reads_as_a_sentence():
    consulting = opened(Setup.from_job(TOO_LARGE))
    paste(consulting, "python train.py --per_device_train_batch_size 4 --deepspeed ds.json")
    shown = doctor_html.advice(consulting, True)
    assert "Deepspeed names the file ds.json" in shown and "Launcher: the script is started with plain python" in shown


def test_a_change_is_said_in_keys():
    assert doctor_html.change_words({"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}}}) == "stage 3 · offload_param cpu"
    assert doctor_html.change_words({"gradient_checkpointing": {"use_reentrant": False}, "trainer": {"gradient_checkpointing": True}}) == "gradient_checkpointing true"


# --- out again


def test_the_files_say_what_the_controls_say():
    consulting = opened(Setup.from_job(TOO_LARGE))
    assert consulting.files == ()  # nobody looks
    consulting.files_open = True
    consulting.state.stage = "3"
    found = {file.name: file.content for file in consulting.files}
    assert json.loads(found["ds_config.json"])["zero_optimization"]["stage"] == 3
    assert "per_device_train_batch_size=320" in found["training_args.py"]
    assert list(found)[:3] == ["ds_config.json", "training_args.py", "model.py"]
    assert found["model.py"].startswith("model = CLIPModel.from_pretrained('openai/clip-vit-large-patch14', attn_implementation='sdpa')")
    consulting.state.gradient_checkpointing = True
    changed = {file.name: file.content for file in consulting.files}
    assert "gradient_checkpointing_enable" in changed["model.py"]
    assert 'data-name="model.py"' in doctor_html.files(consulting.files)
    assert found["launch.sh"] == "deepspeed --num_gpus 1 train.py\n"
    assert "environment.sh" not in found
    assert "expandable_segments:True" in files(Setup.from_job(TOO_LARGE | {"allocator": {"expandable_segments": True}}))[-1].content


# --- a real step of a fix


def probed(consulting: Consulting, name: str) -> None:
    consulting.probe(name)
    assert consulting.in_use == name
    until(lambda: consulting.state.probe_status.state != "running", 300)
    assert consulting.state.probe_status.state == "done", consulting.state.probe_status.text


def test_a_fix_is_applied_and_run_here():
    if accelerator() is None:
        pytest.skip("nothing here can run DeepSpeed")
    job = {"model": json.loads(TINY), "micro_batch": 64, "capacity_gib": 0.1, "deepspeed": {"zero_optimization": {"stage": 0}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}}
    consulting = Consulting(ExplorerState(Setup.from_job(job)))
    consulting.state.wait_estimate(120)
    consulting.wait()
    probed(consulting, "smaller-micro-batch")
    measured = consulting.state.measured
    assert measured.setup.micro_batch < 64 and measured.profile.source == "measured"
    assert f"measured {doctor_html.human(measured.profile.peak.allocated_bytes)}" in doctor_html.advice(consulting, True)


def test_checkpointing_is_confirmed_on_the_gpu(pasted):
    if accelerator() != "cuda":
        pytest.skip("no GPU here: the case's fix needs one")
    probed(pasted, "gradient-checkpointing")
    promised, took = fix(pasted, "gradient-checkpointing").profile.peak.allocated_bytes, pasted.state.measured.profile.peak.allocated_bytes
    assert abs(took - promised) <= 0.02 * took
