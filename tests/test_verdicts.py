"""benchmarks/verdicts.py: what it makes of runs in the form that limits.py writes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "verdicts.py"
SETUP = {"model": "gpt2", "micro_batch": 4, "gpu": "H200", "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}}


@pytest.fixture(scope="module")
def verdicts():
    import sys

    spec = importlib.util.spec_from_file_location("verdicts", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["verdicts"] = module
    spec.loader.exec_module(module)
    return module


def row(name, gib, lived, retries=(0, 0, 0, 0, 0)):
    """A run: its limit, whether it lived, and PyTorch's counter after it was made ready and after each step."""
    steps = [{"alive": True, "num_alloc_retries": n} for n in retries]
    failure = None if lived else {"phase": "backward", "step": 2, "text": "CUDA out of memory."}
    return {"name": name, "factor": 1.0, "setup": SETUP, "limit_bytes": int(gib * 2**30), "lived": lived, "failure": failure, "steps": steps}


def test_each_run_stands_beside_its_verdict(verdicts, tmp_path):
    """The limits are far from the job's peak of about 9 GiB, so what each is called is no question."""
    rows = [row("wide", 60, True), row("narrow", 2, False), row("wide, died", 60, False), row("narrow, lived", 2, True), row("wide, flushed", 60, True, (0, 2, 4, 6, 8))]
    path = tmp_path / "limits.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in [*rows, {"name": "broken", "error": "ended with status 9"}, {**rows[0], "name": "no limit", "limit_bytes": None}]))
    judged = [verdicts.judge(r) for r in verdicts.read([path])]
    assert [one.wrong for one in judged] == ["", "", "called fits, ran out of memory", "called does not fit, lived", "called fits, lived by flushing"]
    assert judged[2].died_in == 3
    assert len(verdicts.missed(judged)) == 3
    assert verdicts.table(judged).splitlines()[2:] == ["| fits | 1 | 1 | 1 |", "| tight | 0 | 0 | 0 |", "| does not fit | 1 | 0 | 1 |"]
    assert not verdicts.missed(judged[:2])


def test_flushes_of_the_first_steps_alone_are_no_life_by_flushing(verdicts):
    assert not verdicts.judge(row("settles", 60, True, (0, 3, 4, 4, 4, 4))).flushed
