"""`python -m explorer check`: its files, and what it answers where one cannot be read."""

from __future__ import annotations

import io
import json

import pytest

from explorer import cli

STAGE_2 = b'{"zero_optimization": {"stage": 2}}'
KEYS = {"oom", "findings", "fixes", "config"}


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


def test_standard_input_cannot_be_two_of_them(capsys, monkeypatch):
    stdin(monkeypatch, STAGE_2)
    code, found, err = check(capsys, "--config", "-", "--oom", "-")
    assert code == 2 and "one of the files only" in found["error"] and len(err.splitlines()) == 1


def test_a_closed_standard_input_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    code, found, _ = check(capsys, "--config", "-")
    assert code == 2 and "standard input is closed" in found["error"]
