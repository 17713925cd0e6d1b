"""`python -m explorer check`: its files, and what it answers where one cannot be read."""

from __future__ import annotations

import io
import json
import os
import pty

import pytest

from explorer import cli

STAGE_2 = b'{"zero_optimization": {"stage": 2}}'
KEYS = {"oom", "findings", "fixes", "config", "job", "estimate"}


def check(capsys, *options: str) -> tuple[int, dict, str]:
    code = cli.main(["check", *options, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize(("option", "content", "words"), [
    ("config", None, "config: cannot read"),
    ("config", b"\xff{}\xfe", "is not text in UTF-8; save it so and give it to --config again"),
    ("trainer", b"per_device_train_batch_size=\xe9", "is not text in UTF-8; save it so and give it to --trainer again"),
    ("config", b" " * (1 << 20) + b"{}", "is over 1 MiB"),
    ("config", b"", "holds no DeepSpeed config"),
    ("oom", b"", "oom: "),
    ("oom", b" \r\n", "is empty; give the out-of-memory message"),
    ("job", b"\xff", "is not text in UTF-8"),
    ("job", b"{", "job: "),
    ("job", b'{"micro_batch": 1}', "model"),
])
def test_a_file_that_cannot_be_read_is_named_and_the_answer_keeps_its_form(tmp_path, capsys, option, content, words):
    (tmp_path / "good.json").write_bytes(STAGE_2)
    file = tmp_path / f"given-{option}"
    if content is not None:
        file.write_bytes(content)
    others = [] if option == "config" else ["--config", str(tmp_path / "good.json")]
    code, found, err = check(capsys, *others, f"--{option}", str(file))
    assert code == 2 and words in found["error"] and len(err.splitlines()) == 1
    assert set(found) == KEYS | {"error", "job"} and found["job"] == str(file)
    assert found["fixes"] == [] and found["oom"]["kind"] == "none" and found["findings"][0]["text"] == found["error"]
    if content is None or option == "oom":
        assert str(file) in found["error"]


def test_a_message_that_was_read_is_answered_beside_a_config_that_was_not(tmp_path, capsys):
    (tmp_path / "oom.txt").write_bytes(b"caf\xe9\nCUDA out of memory. Tried to allocate 2.00 GiB\n")
    code, found, _ = check(capsys, "--oom", str(tmp_path / "oom.txt"), "--config", str(tmp_path / "none.json"))
    assert (code, found["oom"]["requested_bytes"], found["job"]) == (2, 2 << 30, str(tmp_path / "none.json"))


@pytest.mark.parametrize(("option", "content"), [("config", STAGE_2), ("job", b'{"model": "gpt2", "micro_batch": 1, "gpu": "A10"}'), ("oom", b"CUDA out of memory. Tried to allocate 2.00 GiB"), ("trainer", b"TrainingArguments(bf16=True)")])
def test_standard_input_is_one_of_the_files(capsys, monkeypatch, option, content):
    stdin(monkeypatch, content)
    code, found, err = check(capsys, f"--{option}", "-")
    assert code == 0 and set(found) == KEYS, err


FLAGS = ("--model", "gpt2", "--gpus", "8", "--gpu", "A10", "--stage", "2", "--lora", "16")


def test_flags_fill_in_what_files_do_not_say(tmp_path, capsys):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    code, found, err = check(capsys, "--config", str(tmp_path / "ds.json"), *FLAGS)
    job = found["job"]
    assert (code, job["model"], job["world_size"], job["lora"]["r"]) == (0, "gpt2", 8, 16), err
    assert job["deepspeed"]["zero_optimization"]["stage"] == 3, "the file's own stage stays"
    assert any("--stage is 2, but the file says 3" in f["text"] for f in found["findings"])
    assert found["estimate"]["method"] == "deepspeed" and found["estimate"]["verdict"]["answer"] == "fits"


def test_a_pasted_whole_on_standard_input(capsys, monkeypatch):
    text = "torchrun --nproc_per_node 4 t.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --bf16 True\n"
    stdin(monkeypatch, text.encode() + b"CUDA out of memory. Tried to allocate 2.00 GiB")
    code, found, _ = check(capsys)
    assert found["oom"]["requested_bytes"] == 2 << 30 and found["job"]["micro_batch"] == 2
    assert found["job"]["world_size"] == 4


def test_an_unknown_world_size_is_the_first_note(capsys, monkeypatch):
    stdin(monkeypatch, b"")
    _, found, _ = check(capsys, "--model", "gpt2", "--gpu", "A10", "--stage", "3")
    first = next(f["text"] for f in found["findings"] if f["severity"] == "note")
    assert "With 1 GPU: fits" in first and "With 8 GPUs: fits" in first


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, capsys, kind):
    path = tmp_path / "pipe" if kind == "pipe" else os.ttyname(pty.openpty()[1])
    if kind == "pipe":
        os.mkfifo(path)
    for option in ("config", "trainer", "oom", "job"):
        code, found, err = check(capsys, f"--{option}", str(path))
        assert code == 2 and f"is a {kind}" in found["error"] and len(err.splitlines()) == 1


def test_standard_input_cannot_be_two_of_them(capsys, monkeypatch):
    stdin(monkeypatch, STAGE_2)
    code, found, err = check(capsys, "--config", "-", "--oom", "-")
    assert code == 2 and "one of the files only" in found["error"] and len(err.splitlines()) == 1


def test_a_closed_standard_input_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    code, found, _ = check(capsys, "--config", "-")
    assert code == 2 and "standard input is closed" in found["error"]
