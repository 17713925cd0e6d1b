"""The command line's contract: exit codes, one JSON object a line, one sentence for bad input."""

from __future__ import annotations

import io
import json

import pytest

from explorer import cli
from explorer.errors import CouldNotRun
from explorer.setup import Setup

FITS = {"model": "gpt2", "micro_batch": 4, "gpu": "A100-80GB", "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}}
TOO_LARGE = {**FITS, "micro_batch": 64, "gpu": "T4"}
NO_CARD = {k: v for k, v in FITS.items() if k != "gpu"}
BAD = {**FITS, "micro_bach": 3}


@pytest.fixture
def files(tmp_path):
    """Write jobs (objects, or text as it is) and return their paths."""

    def write(*jobs):
        paths = []
        for i, job in enumerate(jobs):
            path = tmp_path / f"job{i}.json"
            path.write_text(job if isinstance(job, str) else json.dumps(job))
            paths.append(str(path))
        return paths

    return write


@pytest.mark.parametrize(
    ("jobs", "code"),
    [
        ([FITS], 0),
        ([NO_CARD], 0),
        ([TOO_LARGE], 3),
        ([FITS, TOO_LARGE], 3),
        ([TOO_LARGE, BAD, FITS], 2),
        (["{"], 2),
        (["[]"], 2),
        ([""], 2),
    ],
)
def test_the_exit_code_is_the_worst_of_the_jobs(files, capsys, jobs, code):
    paths = files(*jobs)
    assert cli.main(["estimate", *paths, "--json"]) == code
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(jobs)
    for path, job, line in zip(paths, jobs, lines, strict=True):
        bad = job is BAD or isinstance(job, str)
        assert ("error" in line) == bad
        assert not bad or line["job"] == path


FLAGS = ["--model", "gpt2", "--stage", "3", "--gpus", "8", "--gpu", "A100-80GB", "--micro-batch", "4"]


def test_flags_are_a_job(capsys):
    more = ["--sequence", "512", "--checkpointing", "--offload-optimizer", "cpu", "--optimizer", "adam"]
    assert cli.main(["estimate", *FLAGS, *more, "--json"]) == 0
    typed = json.loads(capsys.readouterr().out)
    job = {**FITS, "world_size": 8, "sequence": 512, "gradient_checkpointing": True, "deepspeed": {
        "bf16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}}
    assert typed["peak"] == cli._estimate(Setup.from_job(job)).to_json()["peak"] and typed["method"] == "deepspeed"


def test_a_deepspeed_json_in_the_place_of_a_job(files, capsys):
    (path,) = files({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    assert cli.main(["estimate", path, "--model", "gpt2", "--micro-batch", "4", "--gpu", "A100-80GB", "--gpus", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak"] == cli._estimate(Setup.from_job(FITS)).to_json()["peak"]
    assert cli.main(["estimate", path, "--json"]) == 2
    assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("gpus", "x"), ("stage", "4"), ("micro-batch", "1e400"), ("host-ram", "nan"), ("precision", "int3"), ("optimizer", "adm"), ("gpu", "Z9")])
def test_a_bad_flag_is_one_sentence_that_names_it(capsys, flag, value):
    assert cli.main(["estimate", "--model", "gpt2", f"--{flag}", value, "--json"]) == 2
    assert flag in capsys.readouterr().err.splitlines()[0]


def test_what_could_not_run_is_worse_than_what_does_not_fit(files, capsys, monkeypatch):
    plain = cli._estimate

    def estimate(setup):
        if setup.gpu is None:
            raise CouldNotRun("no tape")
        return plain(setup)

    monkeypatch.setattr(cli, "_estimate", estimate)
    assert cli.main(["estimate", *files(TOO_LARGE, NO_CARD), "--json"]) == 5
    assert cli.main(["estimate", *files(TOO_LARGE, NO_CARD, BAD), "--json"]) == 2
    assert "no tape" in capsys.readouterr().err


def test_bad_input_is_one_sentence_on_standard_error(files, capsys):
    (path,) = files(BAD)
    assert cli.main(["estimate", path, "--json"]) == 2
    captured = capsys.readouterr()
    (sentence,) = captured.err.splitlines()
    assert "micro_bach" in sentence
    assert "micro_batch" in sentence
    assert "Traceback" not in sentence


def test_a_job_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(FITS)))
    assert cli.main(["estimate", "-", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["source"] == "estimated"
    assert sum(answer["at_peak"].values()) == answer["peak"]["allocated_bytes"]


def test_standard_input_that_is_no_text(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe{}"), encoding="utf-8"))
    assert cli.main(["estimate", "-", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": "job: standard input is not text in UTF-8", "job": "-"}


def test_a_fault_of_ours_leaves_the_other_jobs_their_answers(files, capsys, monkeypatch):
    plain = cli._estimate

    def estimate(setup):
        if setup.gpu is None:
            raise ZeroDivisionError("two\nlines")
        return plain(setup)

    monkeypatch.setattr(cli, "_estimate", estimate)
    paths = files(NO_CARD, FITS)
    assert cli.main(["estimate", *paths, "--json"]) == 5
    captured = capsys.readouterr()
    fault, answer = (json.loads(line) for line in captured.out.splitlines())
    assert fault["job"] == paths[0] and "fault of the explorer" in fault["error"] and "\n" not in fault["error"]
    assert answer["verdict"]["answer"] == "fits"
    assert "Traceback" in captured.err


def test_an_option_that_is_empty_is_not_one_left_out(files, capsys):
    (path,) = files(FITS)
    assert cli.main(["check", "--job", path, "--oom", "", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"] == "--oom is empty; give it a name, or leave it out"
    assert captured.err.splitlines() == ["check: --oom is empty; give it a name, or leave it out"]


def test_a_file_that_is_not_there_is_bad_input(capsys, tmp_path):
    path = str(tmp_path / "none.json")
    assert cli.main(["estimate", path, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["job"] == path


def test_without_json_bad_input_prints_no_answer(files, capsys):
    assert cli.main(["estimate", *files(BAD)]) == 2
    assert capsys.readouterr().out == ""


def test_the_dashboard_gets_the_arguments_that_follow(monkeypatch):
    from explorer.ui import serve

    got = []
    monkeypatch.setattr(serve, "serve", got.append)
    assert cli.main(["dashboard", "--port=9999", "--no-browser"]) == 0
    assert got == [["--port=9999", "--no-browser"]]


def test_a_probe_is_answered_in_the_same_form(files, capsys, monkeypatch):
    """Tight is worse than fitting, and the worst code wins, whatever the order."""
    import dataclasses

    plain = cli._estimate

    def probe(setup):
        profile = plain(setup)
        answer = "tight" if setup.micro_batch == 4 else profile.verdict.answer
        return dataclasses.replace(profile, verdict=dataclasses.replace(profile.verdict, answer=answer))

    monkeypatch.setattr(cli, "_probe", probe)
    small = {**FITS, "micro_batch": 1}
    for jobs, code in (([small], 0), ([FITS, small], 4), ([small, FITS, TOO_LARGE], 3)):
        assert cli.main(["probe", *files(*jobs), "--json"]) == code
        assert len(capsys.readouterr().out.splitlines()) == len(jobs)


def test_without_json_a_table_for_people(files, capsys):
    assert cli.main(["estimate", *files(FITS)]) == 0
    out = capsys.readouterr().out
    for word in ("peak allocated", "activations", "fits", "largest micro-batch"):
        assert word in out


def test_the_largest_micro_batch_fits_and_the_verdict_follows_the_batch(files, capsys):
    cli.main(["estimate", *files(FITS), "--json"])
    largest = json.loads(capsys.readouterr().out)["largest_micro_batch"]
    assert largest > FITS["micro_batch"]
    assert cli.main(["estimate", *files({**FITS, "micro_batch": largest}), "--json"]) == 0
    assert cli.main(["estimate", *files({**FITS, "micro_batch": 2 * largest}), "--json"]) == 3


def test_a_command_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["frobnicate"])
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"deepspeed": {"zero_optimization": None}}, "deepspeed.zero_optimization"),
        ({"deepspeed": {"gradient_clipping": 10**400}}, "deepspeed.gradient_clipping"),
        ({"micro_batch": 10**12}, "micro_batch"),
    ],
)
def test_what_once_was_a_fault_of_ours_is_bad_input(files, capsys, change, field):
    assert cli.main(["estimate", *files({**FITS, **change}), "--json"]) == 2
    assert field in json.loads(capsys.readouterr().out)["error"]


def test_a_byte_order_mark_is_read_over(files, capsys):
    assert cli.main(["estimate", *files("\ufeff" + json.dumps(FITS)), "--json"]) == 0
    assert "error" not in json.loads(capsys.readouterr().out)


def test_a_folder_is_no_job(tmp_path, capsys):
    assert cli.main(["estimate", str(tmp_path), "--json"]) == 2
    assert "not a file" in capsys.readouterr().err


# --- the largest micro-batch


@pytest.mark.parametrize("stage", [1, 2])
def test_the_largest_micro_batch_is_the_same_wherever_the_search_starts(stage):
    """On a T4 ten samples fit, eight do, and nine hang on fragmentation: the answer is eight."""
    from explorer.estimator.largest import largest_micro_batch
    from explorer.setup import Setup

    job = {"model": "gpt2", "gpu": "T4", "deepspeed": {"fp16": {"enabled": True}, "zero_optimization": {"stage": stage}}}
    assert {largest_micro_batch(Setup(micro_batch=start, **job)) for start in (1, 3, 8, 30, 1000)} == {8}


def test_every_micro_batch_up_to_the_largest_fits():
    from explorer.estimator.estimate import estimate
    from explorer.estimator.largest import largest_micro_batch

    job = {"model": "bert-base-uncased", "gpu": "T4", "deepspeed": {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}}
    answers = [estimate({**job, "micro_batch": n}, largest=False).verdict.answer for n in range(36, 43)]
    assert answers == ["fits"] * 6 + ["tight"]
    assert estimate({**job, "micro_batch": 43}, largest=False).verdict.answer == "fits"
    from explorer.setup import Setup

    assert largest_micro_batch(Setup(micro_batch=64, **job)) == 41


def test_the_trainers_batch_size_follows_the_search(files, capsys):
    job = {**FITS, "trainer": {"per_device_train_batch_size": 4, "bf16": True}}
    assert cli.main(["estimate", *files(job), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest_micro_batch"] > 4


def test_host_memory_that_is_not_there_is_a_note(files, capsys):
    job = {**FITS, "gpus_per_node": 8, "world_size": 8, "deepspeed": {**FITS["deepspeed"], "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}}
    cli.main(["estimate", *files({**job, "host_ram_gib": 8}, {**job, "host_ram_gib": 512}, job), "--json"])
    small, large, unsaid = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert small["host"]["per_node_bytes"] > 8 << 30
    assert [sum("host_ram_gib is 8" in note for note in answer["notes"]) for answer in (small, large, unsaid)] == [1, 0, 0]
    assert small["verdict"] == large["verdict"] == unsaid["verdict"]


# --- where a job may come from


def test_a_pipe_with_a_name_is_read(tmp_path, capsys):
    import os
    import threading

    pipe = tmp_path / "job"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=(json.dumps(FITS),), daemon=True).start()
    assert cli.main(["estimate", str(pipe), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["answer"] == "fits"


@pytest.mark.parametrize(("content", "words"), [(" " * (1 << 21), "too large"), ("", "is empty"), ("null", "is null; give a JSON object"), ("5", "is 5; give a JSON object"), ('{"model": "gpt2", "model": "t5"}', 'gives "model" twice')])
def test_what_standard_input_may_hold_instead(capsys, monkeypatch, content, words):
    monkeypatch.setattr("sys.stdin", io.StringIO(content))
    assert cli.main(["estimate", "-", "--json"]) == 2
    assert words in json.loads(capsys.readouterr().out)["error"]


def test_a_closed_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert cli.main(["estimate", "-"]) == 2
    assert "standard input is closed" in capsys.readouterr().err


def test_endless_and_empty_devices(capsys):
    for device, words in (("/dev/zero", "too large"), ("/dev/null", "is empty")):
        assert cli.main(["estimate", device]) == 2
        assert words in capsys.readouterr().err


def test_stopping_is_quiet(files, capsys, monkeypatch):
    def stop(setup):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_estimate", stop)
    assert cli.main(["estimate", *files(FITS)]) == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize("text", ["gp\ud800t2", "\u001b[31mred", "\u202egpt2", "a\u0000b", "x" * 100_000])
@pytest.mark.parametrize("job", [{"model": None}, {"gpu": None}, {"attention": None}, {"deepspeed": {"optimizer": {"type": None}}}, {"deepspeed": {"zero_optimization": {"stage": None}}}])
def test_a_persons_text_comes_back_printable_and_short(files, capsys, text, job):
    def filled(value):
        return {k: filled(v) for k, v in value.items()} if isinstance(value, dict) else text

    assert cli.main(["estimate", *files({**FITS, **filled(job)}), "--json"]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.isprintable() and len(line) < 700
    assert json.loads(captured.out)["error"] in line


def test_a_terminal_without_utf_8_gets_its_answer(files):
    import os
    import subprocess
    import sys

    (path,) = files({**NO_CARD, "deepspeed": {"é": 1}})
    done = subprocess.run([sys.executable, "-m", "explorer", "estimate", path], capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and rb"\xe9: is not a key that DeepSpeed knows" in done.stdout and done.stderr == b""


# --- jobs with a slip of the pen, by the hundred

_SLIPS = [None, True, False, 0, -1, 2, 3, 1.5, 2.0, 1e300, 10**12, 10**30, 2**31, "", "auto", "x", "5e8", "fp32", [], [1], {}, {"a": 1}, {"enabled": True}, {"": None}, "\ud800", "\x00\n", [[[]]], float("nan")]


def _places(value, place=()):
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*place, key)
        yield from _places(inner, (*place, key))


def _slip(job, rng):
    """One to three values of a job, or of keys that DeepSpeed and the Trainer know, replaced or taken out."""
    from explorer.dsconfig.arguments import NAMES
    from explorer.dsconfig.keys import ZERO
    from explorer.dsconfig.sections import KNOWN, REMOVED, SECTIONS

    section = rng.choice(sorted(SECTIONS))
    further = [("deepspeed", rng.choice(sorted({*KNOWN, *REMOVED}))), ("deepspeed", "zero_optimization", rng.choice(sorted(ZERO))), ("deepspeed", section, rng.choice(sorted(SECTIONS[section]))), ("trainer", rng.choice(sorted(NAMES)))]
    for _ in range(rng.choice((1, 1, 2, 3))):
        *parents, last = rng.choice([*_places(job), *further])
        at = job
        for key in parents:
            if isinstance(at, dict) and not isinstance(at.get(key), dict | list):
                at[key] = {}
            at = at[key]
        if rng.random() < 0.15 and isinstance(at, dict):
            at.pop(last, None)
        else:
            at[last] = rng.choice(_SLIPS)


def test_no_slip_of_the_pen_ends_in_a_traceback(monkeypatch):
    """Each is answered with numbers, or refused in one printable line that names its field."""
    import copy
    import random
    import time

    from explorer.catalog import find_model
    from explorer.errors import BadInput
    from explorer.estimator import tapes
    from explorer.estimator.estimate import estimate

    def no_worker(*_):
        raise CouldNotRun("no tape at hand")

    monkeypatch.setattr(tapes, "_record", no_worker)
    jobs = [
        {**FITS, "world_size": 8, "deepspeed": {**FITS["deepspeed"], "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999]}}}},
        {"model": "t5-base", "micro_batch": 2, "sequence": 64, "target_sequence": 32, "capacity_gib": 20, "trainer": {"bf16": True, "optim": "adamw_torch"}, "deepspeed": {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}},
        {"model": dict(find_model("gpt2").config), "micro_batch": 4, "gradient_checkpointing": {"use_reentrant": False}, "allocator": {"expandable_segments": True, "max_split_size_mb": 128}, "host_ram_gib": 64, "rank": 0, "gpu": "A100-80GB"},
    ]
    rng, outcomes, end = random.Random(7), {"answered": 0, "refused": 0}, time.monotonic() + 6
    while time.monotonic() < end and sum(outcomes.values()) < 1500:
        job = copy.deepcopy(rng.choice(jobs))
        _slip(job, rng)
        try:
            json.dumps(estimate(job, largest=False).to_json(), allow_nan=False)
            outcomes["answered"] += 1
        except BadInput as error:
            assert error.field and str(error).isprintable() and len(str(error)) < 950
            outcomes["refused"] += 1
        except CouldNotRun:
            pass
    assert min(outcomes.values()) > 10


# --- check


def test_check_answers_a_job_with_its_message(tmp_path, capsys):
    (tmp_path / "job.json").write_text(json.dumps({"model": "openai/clip-vit-large-patch14", "micro_batch": 320, "deepspeed": {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}}))
    (tmp_path / "oom.txt").write_text("CUDA out of memory. Tried to allocate 7.04 GiB (GPU 1; 79.15 GiB total capacity; 68.07 GiB already allocated; 5.90 GiB free; 72.14 GiB reserved in total by PyTorch)")
    assert cli.main(["check", "--job", str(tmp_path / "job.json"), "--oom", str(tmp_path / "oom.txt"), "--json"]) == 3
    (line,) = capsys.readouterr().out.splitlines()
    answer = json.loads(line)
    assert answer["oom"]["requested_bytes"] == 7559142441 and answer["oom"]["device_index"] == 1
    assert answer["findings"][0]["id"] == "dominant-activations"
    best = answer["fixes"][0]
    assert (best["id"], best["change"], best["verdict"]) == ("gradient-checkpointing", {"gradient_checkpointing": True}, "fits")
    assert answer["config"]["train_batch_size"] == 640
    assert cli.main(["check", "--job", str(tmp_path / "job.json"), "--oom", str(tmp_path / "oom.txt")]) == 3
    assert "gradient-checkpointing: " in capsys.readouterr().out


@pytest.mark.parametrize(("config", "code", "word"), [
    ('{"zero_optimization": {"stage": 2}}', 0, None),
    ('{"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}}', 2, "5e8"),
    ('{"zero_optimization": {"stage": 2}, // two\n}', 2, "comments"),
    ('{"zero_optimization": {"stage": 9}}', 2, "stage"),
    ("nothing", 2, "holds no DeepSpeed config"),
])
def test_check_is_a_preflight(tmp_path, capsys, config, code, word):
    (tmp_path / "ds.json").write_text(config)
    assert cli.main(["check", "--config", str(tmp_path / "ds.json"), "--json"]) == code
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert ("error" in answer) == (word is not None)
    assert word is None or word in captured.err and len(captured.err.splitlines()) == 1


def test_check_puts_config_and_arguments_together(tmp_path, capsys):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}')
    (tmp_path / "args.json").write_text('{"bf16": true, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}')
    (tmp_path / "job.json").write_text('{"model": "gpt2", "micro_batch": 1, "gpu": "A100-80GB"}')
    paths = [f"--{name}={tmp_path / file}" for name, file in (("config", "ds.json"), ("trainer", "args.json"), ("job", "job.json"))]
    assert cli.main(["check", *paths, "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["bf16"]["enabled"], config["train_batch_size"]) == (True, 8)


def test_check_of_nothing_is_bad_input(capsys):
    assert cli.main(["check"]) == 2
    assert "name a --config" in capsys.readouterr().err
    assert cli.main(["check", "--oom", "/no/such/file"]) == 2
