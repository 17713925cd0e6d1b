"""Where each number comes from: every buffer has a place, every place is in DeepSpeed's source, the parts sum to the peak."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from explorer import Setup, estimate
from explorer.estimator.sources import COORDINATOR, ENGINE, PARTITION, PLACES

DEEPSPEED = importlib.util.find_spec("deepspeed")
AW = {"type": "AdamW", "params": {"lr": 1e-5}}
CPU = {"device": "cpu"}


def job(precision: str, stage: int, zero: dict | None = None, more: dict | None = None, **keys) -> dict:
    config = {"optimizer": AW, "zero_optimization": {"stage": stage, **(zero or {})}, **({precision: {"enabled": True}} if precision != "fp32" else {}), **(more or {})}
    return {"model": "gpt2", "micro_batch": 2, "deepspeed": config, **keys}


JOBS = {
    "stage 0 fp32": job("fp32", 0),
    "stage 0 fp16, fused": job("fp16", 0),
    "stage 0 bf16, another optimizer": job("bf16", 0, more={"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}),
    "bf16 optimizer": job("bf16", 1, more={"data_types": {"grad_accum_dtype": "fp32"}}),
    "stage 1": job("bf16", 1, world_size=8),
    "stage 2": job("bf16", 2),
    "stage 2, offloaded": job("fp16", 2, {"offload_optimizer": CPU}),
    "stage 2, fp32 accumulation": job("bf16", 2, more={"data_types": {"grad_accum_dtype": "fp32"}}, world_size=8),
    "stage 3": job("bf16", 3, world_size=8),
    "stage 3, offloaded": job("bf16", 3, {"offload_optimizer": CPU, "offload_param": CPU}),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_parts_sum_to_the_peak(name):
    profile = estimate(Setup.from_job(JOBS[name]), largest=False, sources=True)
    assert sum(s.n_bytes for s in profile.sources) == profile.peak.allocated_bytes
    for category, n_bytes in profile.at_peak.items():
        assert sum(s.n_bytes for s in profile.sources if s.category == category) == n_bytes


@pytest.mark.parametrize("name", JOBS)
def test_every_buffer_of_deepspeeds_has_a_function(name):
    """Not only what is alive at the peak."""
    from explorer.estimator.sources import place
    from explorer.estimator.stream import PROVENANCES
    from explorer.estimator.work import Work
    from explorer.profile import CATEGORIES

    work = Work(Setup.from_job(JOBS[name]), None)
    own = {p.name for p in work.tape.model_parameters()}
    for block, owner in enumerate(work.stream.owners):
        if PROVENANCES[work.stream.provenance[block]] == "derived" and owner not in own:
            assert ", " in place(work.rules, CATEGORIES[work.stream.categories[block]], owner)
            assert any(owner in PLACES[file] for file in (work.rules.source, ENGINE, COORDINATOR)), owner


@pytest.mark.skipif(DEEPSPEED is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("file", [*PLACES, PARTITION])
def test_the_functions_are_in_deepspeeds_source(file):
    text = (Path(DEEPSPEED.origin).parent / file).read_text()
    named = set(PLACES.get(file, {}).values()) | {COORDINATOR: {"fetch_sub_module"}, PARTITION: {"_partition_param"}, ENGINE: {"_configure_distributed_model"}}.get(file, set())
    for function in named:
        assert re.search(rf"^ *def {function}\(", text, re.MULTILINE), function


def test_the_command_prints_them_when_asked(capsys, tmp_path):
    from explorer.cli import main

    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOBS["stage 2"]))
    main(["estimate", str(path), "--json"])
    main(["estimate", str(path), "--json", "--sources"])
    plain, asked = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert "sources" not in plain
    assert asked.pop("sources")[0]["n_bytes"] > 0
    assert plain == asked
