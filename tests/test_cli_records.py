"""`python -m explorer records`: lists, compares, takes in and gives out; each refusal is one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from explorer import cli
from explorer.measure import records


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    code = cli.main(["records", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_list_has_every_record_with_its_date(capsys):
    code, out, err = run(capsys)
    assert (code, err) == (0, "") and len(out.splitlines()) == len(records.all())
    row = next(line for line in out.splitlines() if line.startswith("clip78-320-ckpt "))
    assert row.split() == ["clip78-320-ckpt", "2026-12-02", "H200", "10.3", "GiB", "openai/clip-vit-large-patch14,", "fp16,", "ZeRO-2,", "micro-batch", "320,", "checkpointing"]
    assert "ran out of memory" in next(line for line in out.splitlines() if line.startswith("clip78-320 "))


def test_the_list_as_json_can_be_run_again(capsys):
    code, out, _ = run(capsys, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and {row["name"] for row in rows} == {r.name for r in records.all()}
    assert all(row["shipped"] and row["job"]["micro_batch"] and row["peak"]["allocated_bytes"] and row["measured_on"] == "cuda" for row in rows)


def test_what_was_exported_can_be_imported_and_compared(capsys, tmp_path):
    _, out, _ = run(capsys, "--export", "gpt2-z2")
    assert out.encode() == (records.SHIPPED / "gpt2-z2.json").read_bytes()
    changed = json.loads(out)
    changed["setup"]["micro_batch"] = 16
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(changed))
    code, out, _ = run(capsys, "--import", str(path))
    name = out.split()[0]
    assert code == 0 and records.get(name).setup.micro_batch == 16
    code, out, _ = run(capsys, "--compare", "gpt2-z2", name)
    assert code == 0 and out.splitlines()[-1] == "micro_batch: 8 -> 16"
    code, out, _ = run(capsys, "--compare", "gpt2-z2", str(path), "--json")
    assert json.loads(out)["changes"] == {"micro_batch": [8, 16]} and json.loads(out)["peak_allocated_bytes"] == 0
    assert run(capsys, "--remove", name)[0] == 0 and not list(records.folder().glob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--import", "/nowhere/one.json"], "cannot read /nowhere/one.json: No such file"),
        (["--import", ""], "cannot read a file without a name; give a JSON file"),
        (["--export", ""], "--export is empty; give it a name, or leave it out"),
        (["--remove", ""], "--remove is empty; give it a name, or leave it out"),
        (["--compare", "gpt2-z2", ""], 'none is called ""'),
        (["--import", "README.md"], "README.md is not valid JSON"),
        (["--export", "clip78-2566"], 'none is called "clip78-2566"; did you mean "clip78-256"?'),
        (["--remove", "gpt2-z2"], "ships with the explorer"),
        (["--compare", "gpt2-z2", "pyproject.toml"], "pyproject.toml is not valid JSON"),
    ],
)
def test_what_cannot_be_is_one_sentence(capsys, monkeypatch, root, arguments, said):
    monkeypatch.chdir(root)
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 2 and said in err and len(err.splitlines()) == 1 and err.startswith("records: ")
    assert said in json.loads(out)["error"]


def test_a_record_with_a_newer_answer_is_not_kept(capsys, tmp_path):
    newer = json.loads((records.SHIPPED / "gpt2-z2.json").read_text())
    newer["profile"]["schema"] = 99
    (tmp_path / "newer.json").write_text(json.dumps(newer))
    code, out, err = run(capsys, "--import", str(tmp_path / "newer.json"))
    assert (code, out) == (2, "") and "newer version (schema 99 of its answer)" in err and not records.folder().exists()


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_damaged_record_of_one_s_own_is_said_and_the_others_are_listed(capsys, options):
    plain = run(capsys, *options)[1]
    records.folder().mkdir(parents=True)
    for name in ("cut", "foreign"):
        (records.folder() / f"{name}.json").write_text('{"kind": ' if name == "cut" else "[]")
    code, out, err = run(capsys, *options)
    assert (code, out) == (0, plain)
    cut, foreign = err.splitlines()
    assert cut.startswith(f"records: left out of {records.folder()}: cut.json is not valid JSON") and "foreign.json is not a record" in foreign


def test_one_bad_file_does_not_keep_the_others_out(capsys, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    good = str(records.SHIPPED / "gpt2-z2.json")
    code, out, err = run(capsys, "--import", str(tmp_path / "bad.json"), good)
    assert code == 2 and "bad.json" in err and len(out.splitlines()) == 1


def test_a_reader_that_has_had_enough_is_no_fault(root):
    command = f"{sys.executable} -c 'import sys; from explorer.cli import main; sys.exit(main([\"records\"]))' | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=root, env={**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"}, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and len(done.stdout.splitlines()) == 1


def test_a_probe_says_that_its_job_was_measured_before(capsys, monkeypatch, tmp_path):
    from explorer.measure import runner

    record = records.get("clip78-256")
    (tmp_path / "job.json").write_text(json.dumps(record.setup.to_job()))
    monkeypatch.setattr(runner, "probe", lambda setup, on_progress: record.profile)
    assert cli.main(["probe", str(tmp_path / "job.json"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == record.profile.to_json()
    assert "measured before, on 2026-12-02: 69.6 GiB at the peak" in err
