"""The scripts: what setting up does and says, what make starts, and the check on a clean machine; and the README in the shell."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


# --- setting up


def setup(folder: Path, extras: str = "probe", **environment: str) -> subprocess.CompletedProcess[str]:
    """tools/setup.sh on a copy of the few files it reads."""
    for name in ("pyproject.toml", "constraints.txt", "tools/setup.sh"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VENV", "VENV_FLAGS")}
    return subprocess.run(["sh", "tools/setup.sh", extras], cwd=folder, env={**clean, **environment}, capture_output=True, text=True, check=False)


def stand_in(path: Path, body: str) -> Path:
    """A small program in a program's place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_no_python_at_all_is_one_sentence(tmp_path):
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python"):
        stand_in(tmp_path / "bin" / name, "exit 1")
    done = setup(tmp_path, PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert done.returncode == 1
    assert done.stderr.strip().startswith("Cannot set up: no Python 3.11 or newer was found") and "\n" not in done.stderr.strip()


PIP = """case "$*" in
*"import torch"*) exit 1 ;;
*) echo "$*" >> "$LOG_OF_CALLS"; %s ;;
esac"""


@pytest.mark.parametrize(
    ("pip_says", "sentence"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full."),
        ("Temporary failure in name resolution", "pip could not get a package; is there a network, and does pip reach a package index?"),
        ("something else", "pip failed."),
    ],
)
def test_what_pip_failed_of_is_said(tmp_path, pip_says, sentence):
    stand_in(tmp_path / ".venv" / "bin" / "python", PIP % f"echo '{pip_says}'; exit 1")
    done = setup(tmp_path, LOG_OF_CALLS=str(tmp_path / "calls"))
    assert done.returncode == 1
    assert f"Cannot set up: {sentence} All it said is in .venv/setup.log." in done.stderr


def test_pytorch_comes_first_and_then_deepspeed_without_isolation(tmp_path):
    calls = tmp_path / "calls"
    stand_in(tmp_path / ".venv" / "bin" / "python", PIP % "exit 0")
    assert setup(tmp_path, "probe,test", LOG_OF_CALLS=str(calls)).returncode == 0
    asked = [re.sub(r".*-c \S+ ", "", line) for line in calls.read_text().splitlines() if "pip install" in line]
    assert asked[0] == "torch" and asked[2:] == ["--no-build-isolation deepspeed", "-e .[probe,test]"]


def test_a_pytorch_that_is_there_is_kept(tmp_path):
    kept = tmp_path / "kept"
    body = f'case "$*" in *"print(torch"*) echo 2.11.0 ;; *pip*) for a; do case "$a" in /*) cat "$a" >> "{kept}" ;; esac; done ;; esac'
    stand_in(tmp_path / ".venv" / "bin" / "python", body)
    assert "Keeping PyTorch 2.11.0" in setup(tmp_path).stdout
    constraints = kept.read_text()
    assert "transformers==" in constraints and not re.search(r"^torch==", constraints, re.MULTILINE)


def test_what_is_set_up_is_set_up_again_only_when_something_changed(tmp_path):
    calls = tmp_path / "calls"
    stand_in(tmp_path / ".venv" / "bin" / "python", PIP % "exit 0")
    environment = {"LOG_OF_CALLS": str(calls)}
    assert "Set up in .venv" in setup(tmp_path, **environment).stdout
    calls.unlink()
    started = time.monotonic()
    again = setup(tmp_path, **environment)
    assert (again.returncode, again.stdout, calls.exists()) == (0, "", False)
    assert time.monotonic() - started < 2
    assert "Set up in .venv" in setup(tmp_path, **environment, VENV_FLAGS="--system-site-packages").stdout


def test_what_runs_the_tests_runs_the_dashboard(tmp_path):
    calls = tmp_path / "calls"
    stand_in(tmp_path / ".venv" / "bin" / "python", PIP % "exit 0")
    assert setup(tmp_path, "probe,test", LOG_OF_CALLS=str(calls)).returncode == 0
    calls.unlink()
    assert setup(tmp_path, "probe", LOG_OF_CALLS=str(calls)).stdout == "" and not calls.exists()


def test_make_starts_the_dashboard_and_the_tests(tmp_path):
    def recipe(target: str, *variables: str) -> str:
        return subprocess.run(["make", "-n", target, *variables], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    dashboard = recipe("dashboard", "PORT=9001", "VENV=/tmp/v", "ARGS=--no-browser")
    assert "tools/setup.sh probe\n" in dashboard and '"/tmp/v/bin/python" -m explorer dashboard --port=9001 --no-browser' in dashboard
    tests = recipe("test", "ARGS=-k rules")
    assert "tools/setup.sh probe,test" in tests and "-m pytest -k rules" in tests


# --- the check on a clean machine


def machine(folder: Path, **programs: str) -> dict[str, str]:
    """A PATH with everything that .ci/run looks for, and these programs in place of the real ones."""
    for name, body in {"chromium": "exit 0", "g++": "exit 0", "fc-list": "echo a font", "apt-get": f'echo "$*" >> {folder}/apt', "make": "exit 0", **programs}.items():
        stand_in(folder / "bin" / name, body)
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("code", "closing"),
    [(0, "===== 3 passed in 1.00s ====="), (0, "3 passed, 1 skipped in 61.00s (0:01:01)"), (1, "===== 1 failed, 2 passed in 1.00s ====="), (2, "no tests ran in 0.01s")],
)
def test_ci_ends_as_the_tests_do_and_quotes_their_last_line(tmp_path, code, closing):
    environment = machine(tmp_path, make=f'echo "ran $*"; echo "{closing}"; exit {code}')
    done = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "ran test" in done.stdout and done.stdout.splitlines()[-1] == f"make test: {closing} (exit code {code})"
    assert not (tmp_path / "apt").exists(), "nothing was missing, and yet something was installed"


def test_ci_installs_only_what_is_missing(tmp_path):
    environment = machine(tmp_path, **{"fc-list": "exit 0"})
    assert subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, check=False).returncode == 0
    asked = (tmp_path / "apt").read_text().splitlines()
    assert asked[0].startswith("update") and asked[1].endswith("--no-install-recommends fontconfig fonts-dejavu-core")


# --- what the documents say


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_are_named_exist(name):
    for path in re.findall(r"`((?:explorer|tests|benchmarks|notebooks|tools|docs)/[\w./-]*)`", (ROOT / name).read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), f"{name} names {path}, which is not there"


def test_the_readmes_job_runs_in_the_shell(tmp_path):
    (job,) = re.findall(r"^```json\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "job.json").write_text(job)
    done = subprocess.run([sys.executable, "-m", "explorer", "estimate", tmp_path / "job.json", "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["verdict"]["answer"] == "fits" and sum(answer["at_peak"].values()) == answer["peak"]["allocated_bytes"]


RECORD_OF_ROW = ("clip-z2off-64", "clip-z3offboth-64", "clip78-256", "clip78-320-ckpt", "llama1b-z2", "llama1b-z3", "llama1b-z2-r0of8")


def test_the_readmes_table_is_what_is_estimated_and_recorded():
    from explorer import estimate
    from explorer.measure import records
    from explorer.units import gib

    rows = re.findall(r"\| ([\d.]+) GiB \| ([\d.]+) GiB \|", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(rows) == len(RECORD_OF_ROW)
    for (estimated, measured), name in zip(rows, RECORD_OF_ROW, strict=True):
        record = records.load(records.SHIPPED / f"{name}.json")
        assert f"{gib(record.profile.peak.allocated_bytes):.2f}" == measured, name
        assert f"{gib(estimate(record.setup, largest=False).peak.allocated_bytes):.2f}" == estimated, name
