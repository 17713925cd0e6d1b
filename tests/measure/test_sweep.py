"""Sweeps: which jobs a file says, rows that outlive a stop, one table and one chart at the end."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from explorer import cli
from explorer.errors import BadInput, CouldNotRun
from explorer.measure import sweep
from explorer.profile import Failure, Verdict
from tests.measure.jobs import LLAMA
from tests.test_profile import profile

JOB = {"model": "gpt2", "micro_batch": 8, "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}}


def changes(grid) -> list[dict]:
    return [dict(point.change) for point in sweep.points({"job": JOB, "grid": grid})]


def test_a_grid_is_every_combination_the_last_list_fastest():
    found = sweep.points({"job": JOB, "grid": {"micro_batch": [64, 128], "deepspeed.zero_optimization.stage": [2, 3]}})
    assert [(p.job["micro_batch"], p.job["deepspeed"]["zero_optimization"]["stage"]) for p in found] == [(64, 2), (64, 3), (128, 2), (128, 3)]
    assert found[1].label == "micro_batch 64, stage 3"
    assert all(p.job["deepspeed"]["bf16"] == {"enabled": True} for p in found)
    assert JOB["deepspeed"]["zero_optimization"] == {"stage": 1}


def test_grids_follow_each_other_and_no_job_comes_twice():
    grids = [{"micro_batch": [8, 16]}, {"micro_batch": [16], "deepspeed.zero_optimization.offload_optimizer.device": ["cpu"]}, {"micro_batch": [16]}]
    assert changes(grids) == [{"micro_batch": 8}, {"micro_batch": 16}, {"micro_batch": 16, "deepspeed.zero_optimization.offload_optimizer.device": "cpu"}]


def test_null_leaves_a_key_out():
    without, with_it = sweep.points({"job": JOB, "grid": {"deepspeed.bf16": [None, {"enabled": False}]}})
    assert "bf16" not in without.job["deepspeed"] and with_it.job["deepspeed"]["bf16"] == {"enabled": False}


BAD = {
    "a list": ([], "sweep: is []; give an object"),
    "a key": ({"job": JOB, "grids": {}}, "sweep.grids: is not a key of a sweep; did you mean \"grid\"?"),
    "newer": ({"schema": 2, "job": JOB, "grid": {}}, "sweep.schema: is 2; this version reads schema 1"),
    "no job": ({"grid": {"micro_batch": [1]}}, "sweep.job: is null"),
    "no grid": ({"job": JOB}, "sweep.grid: is null"),
    "no list": ({"job": JOB, "grid": {"micro_batch": 8}}, "sweep.grid.micro_batch: is 8; give a list"),
    "an empty list": ({"job": JOB, "grid": {"micro_batch": []}}, "sweep.grid.micro_batch: is []; give a list"),
    "no place": ({"job": JOB, "grid": {"model.n_layer": [1]}}, "sweep.grid.model.n_layer: has no place in the job: model is \"gpt2\", not an object"),
    "too many": ({"job": JOB, "grid": {"micro_batch": list(range(1, 51)), "sequence": list(range(1, 51))}}, "sweep.grid: gives 2500 jobs; at most 1000"),
}


@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD)
def test_what_is_no_sweep_is_one_sentence(content, words, tmp_path, capsys):
    with pytest.raises(BadInput) as caught:
        sweep.points(content)
    assert str(caught.value).startswith(words)
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(content))
    assert cli.main(["probe", "--sweep", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# --- rows


POINTS = sweep.points({"job": JOB, "grid": {"micro_batch": [1, 2, 3, 4]}})


def ran(path, stop_at=None, error=None) -> tuple[list[sweep.Row], list[int]]:
    """(rows, micro-batches that were really run)."""
    run = []

    def probe(setup):
        if setup.micro_batch == stop_at:
            raise KeyboardInterrupt
        run.append(setup.micro_batch)
        if setup.micro_batch == error:
            raise CouldNotRun("no room here")
        return profile(100 * setup.micro_batch)

    rows = []
    try:
        for row in sweep.run(POINTS, path, probe, lambda *_: None):
            rows.append(row)
    except KeyboardInterrupt:
        pass
    return rows, run


def test_a_stopped_sweep_goes_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert ran(path, stop_at=3)[1] == [1, 2]
    rows, run = ran(path)
    assert run == [3, 4]
    assert [row.profile.peak.allocated_bytes for row in rows] == [profile(100 * n).peak.allocated_bytes for n in (1, 2, 3, 4)]
    assert ran(path)[1] == []
    assert len(path.read_text().splitlines()) == 4


def test_a_row_cut_short_is_run_again_and_no_other(tmp_path):
    path = tmp_path / "rows.jsonl"
    ran(path)
    path.write_text(path.read_text()[:-20])
    assert ran(path)[1] == [4]
    assert len(path.read_text().splitlines()) == 4 and len(sweep.kept(path)) == 4


def test_what_could_not_run_is_a_row_and_is_tried_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows, run = ran(path, error=2)
    assert run == [1, 2, 3, 4] and (rows[1].error, rows[1].exit_code, rows[1].profile) == ("no room here", 5, None)
    rows, run = ran(path)
    assert run == [2] and rows[1].profile is not None


@pytest.mark.parametrize("text", ['{"a": 1}\n', "my thesis", "a,b\n1,2\n"])
def test_another_programs_file_is_left_as_it_is(tmp_path, text):
    path = tmp_path / "thesis"
    path.write_text(text)
    with pytest.raises(BadInput, match="^out: .* something else"):
        ran(path)
    assert path.read_text() == text


def test_the_table_says_what_became_of_each(tmp_path):
    rows, _ = ran(tmp_path / "rows.jsonl", error=2)
    failed = replace(rows[2].profile, verdict=Verdict(answer="does not fit", failure=Failure(phase="backward", step="first", requested_bytes=954 << 20, text="CUDA out of memory")))
    rows[2] = replace(rows[2], profile=failed)
    head, _, *lines = sweep.table(rows).splitlines()
    assert "peak allocated" in head and len({len(line) for line in (head, *lines)}) == 1
    assert "no result: no room here" in lines[1]
    assert "out of memory in backward of the first step, at a request of 954.00 MiB" in lines[2]


# --- the command, on real engines


@pytest.mark.usefixtures("needs_extra")
def test_the_command_ends_in_rows_a_table_and_a_chart(tmp_path, capsys):
    path = tmp_path / "llama.json"
    job = {"model": LLAMA, "micro_batch": 1, "sequence": 32, "deepspeed": {"bf16": {"enabled": True}}}
    path.write_text(json.dumps({"job": job, "grid": [{"micro_batch": [1, 2], "deepspeed.zero_optimization.stage": [0, 2]}, {"sequence": [4096]}]}))
    assert cli.main(["probe", "--sweep", str(path), "--json"]) == 2  # the last job is bad input, and the others have their answers
    captured = capsys.readouterr()
    answers = [json.loads(line) for line in captured.out.splitlines()]
    assert [answer.get("change") for answer in answers] == [{"micro_batch": n, "deepspeed.zero_optimization.stage": stage} for n in (1, 2) for stage in (0, 2)] + [None]
    assert all(answer["measured_on"] == "cpu" for answer in answers[:4]) and "sequence" in answers[4]["error"]
    assert answers[0]["at_peak"]["activations"] < answers[2]["at_peak"]["activations"]
    svg = (tmp_path / "llama.rows.svg").read_text()
    assert "micro_batch 2, stage 2" in svg and "Activations" in svg
    table = (tmp_path / "llama.rows.md").read_text()
    assert table.count("\n") == 7
    before = (tmp_path / "llama.rows.jsonl").read_text().splitlines()
    assert cli.main(["probe", "--sweep", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == table and captured.err.count("(measured before)") == 4
    assert (tmp_path / "llama.rows.jsonl").read_text().splitlines()[:5] == before


def test_a_command_without_jobs_says_what_it_takes(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["probe"])
    assert stopped.value.code == 2 and "--sweep" in capsys.readouterr().err
