"""The largest that fits: the boundary is one, a family is the catalog's, and a proof says what two real steps said."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from explorer import cli
from explorer.advice import largest
from explorer.errors import BadInput, CouldNotRun
from explorer.estimator.estimate import estimate
from explorer.profile import Failure, Verdict
from explorer.setup import Setup
from explorer.units import GiB
from tests.catalog.tiny import TINY


def job(model: str, gpu: str | None = "A10", stage: int = 2, **more) -> Setup:
    return Setup(model=model, micro_batch=8, gpu=gpu, deepspeed={"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}, **more)


def answer(setup: Setup) -> str | None:
    return estimate(setup, largest=False).verdict.answer


CASES = [
    (job("meta-llama/Llama-3.2-1B", "A100-40GB", gradient_checkpointing=True), "sequence"),
    (job("google-t5/t5-base"), "target_sequence"),
    (job("gpt2"), "micro_batch"),
]


@pytest.mark.parametrize(("setup", "axis"), CASES, ids=lambda v: v if isinstance(v, str) else v.model)
def test_it_fits_with_that_and_less_and_not_with_one_more(setup, axis):
    n = largest.largest(setup, axis)
    assert 1 < n < 1 << 19
    assert answer(largest.with_value(setup, axis, n + 1)) in ("tight", "does not fit")
    assert {answer(largest.with_value(setup, axis, m)) for m in {n, n - 1, n // 2, n // 7}} == {"fits"}


def test_it_ends_where_the_models_positions_do():
    assert largest.largest(job("gpt2", "A100-80GB"), "sequence") == 1024
    assert largest.bounds(job("openai/clip-vit-large-patch14"), "sequence") == (1, 77)


def test_where_nothing_fits_it_is_one_below_the_least():
    setup = job("meta-llama/Llama-2-7b-hf")
    assert largest.largest(setup, "micro_batch") == 0
    assert largest.largest(setup, "sequence") == 1  # a language model's loss needs two tokens
    with pytest.raises(BadInput, match="nothing fits"):
        largest.prove(setup, "micro_batch", 0)


def test_without_a_card_nothing_is_the_largest():
    assert largest.largest(job("gpt2", None), "sequence") is None


def test_an_axis_that_the_model_lacks_is_named():
    with pytest.raises(BadInput, match="sequence: is no length of google/vit-large"):
        largest.largest(job("google/vit-large-patch16-224"), "sequence")


def test_a_family_is_the_catalogs_smallest_first():
    members = largest.family(job("gpt2-medium"))
    assert [(m.model, m.answer) for m in members] == [
        ("distilgpt2", "fits"), ("gpt2", "fits"), ("gpt2-medium", "does not fit"), ("gpt2-large", "does not fit"), ("gpt2-xl", "does not fit"),
    ]
    assert largest.largest_model(members) == "gpt2"
    assert members[1].profile.peak == estimate(job("gpt2"), largest=False).peak


def test_a_pasted_config_has_the_family_of_its_type():
    assert [m.model for m in largest.family(job(TINY["Llama"]))][:2] == ["meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B"]


def test_a_member_that_cannot_take_the_setup_says_why():
    members = {m.model: m for m in largest.family(job("meta-llama/Llama-3.2-1B", "B200", sequence=8192))}
    assert "beyond the 4096 positions" in members["meta-llama/Llama-2-7b-hf"].why
    assert members["meta-llama/Llama-3.1-8B"].profile is not None


# --- a proof


def measured(answers: dict[int, str]):
    """A probe whose verdicts are these, by micro-batch: what a GPU would say."""
    def run(setup: Setup):
        profile = estimate(setup, largest=False)
        failure = Failure(phase="backward", step="first", requested_bytes=1 << 30, text="CUDA out of memory.") if answers[setup.micro_batch] == "does not fit" else None
        return replace(profile, verdict=Verdict(answer=answers[setup.micro_batch], capacity_bytes=20 * GiB, headroom_bytes=0, failure=failure))
    return run


@pytest.mark.parametrize(("answers", "holds", "words"), [
    ({16: "fits", 17: "does not fit"}, True, "Proven by a real step: micro batch 16 ran, 17 ran out of memory in backward."),
    ({16: "fits", 17: "fits"}, False, "Micro batch 16 ran, and 17 too: the estimate keeps a margin"),
    ({16: "does not fit", 17: "does not fit"}, False, "Not so: micro batch 16 ran out of memory in backward."),
])
def test_what_two_steps_say(answers, holds, words):
    proof = largest.prove(job("gpt2"), "micro_batch", 16, measured(answers))
    assert proof.holds is holds and proof.text.startswith(words)
    json.dumps(proof.to_json())


def test_at_the_end_of_the_positions_there_is_no_more_to_try():
    proof = largest.prove(job("gpt2"), "sequence", 1024, measured({8: "fits"}))
    assert proof.beyond is None and proof.holds
    assert proof.text.endswith("the model takes no more than 1,024.")


# --- in the shell


def check(tmp_path, capsys, setup: dict, *options: str) -> tuple[int, dict]:
    (tmp_path / "job.json").write_text(json.dumps(setup))
    code = cli.main(["check", "--job", str(tmp_path / "job.json"), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_check_says_it_only_where_it_is_asked(tmp_path, capsys):
    setup = job("openai/clip-vit-base-patch32").to_job()
    _, plain = check(tmp_path, capsys, setup)
    assert set(plain) == {"oom", "findings", "fixes", "config", "job", "estimate"}
    _, asked = check(tmp_path, capsys, setup, "--largest")
    assert set(asked) - set(plain) == {"largest"}
    assert asked["largest"]["model"] == "openai/clip-vit-large-patch14"
    assert asked["largest"]["sequence"] == 77 and asked["largest"]["micro_batch"] > 8


def test_a_proof_that_cannot_be_run_loses_nothing_else(tmp_path, capsys, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise CouldNotRun("there is no GPU here")

    monkeypatch.setattr("explorer.advice.check.probe", refuse)
    code, found = check(tmp_path, capsys, job("gpt2").to_job(), "--prove", "micro_batch")
    assert (code, found["proof"]["holds"], found["proof"]["text"], found["error"]) == (5, None, "Not run: there is no GPU here.", "there is no GPU here")
    assert found["fixes"] and found["job"].endswith("job.json")


@pytest.mark.parametrize(("change", "axis", "code", "words"), [
    ({"gpu": None}, "micro_batch", 2, "gpu: is not given"),
    ({}, "target_sequence", 2, "is no length of gpt2"),
    ({"capacity_gib": 0.5}, "micro_batch", 5, "no micro_batch fits"),
])
def test_what_there_is_nothing_to_prove_of_is_no_success(tmp_path, capsys, monkeypatch, change, axis, code, words):
    monkeypatch.setattr("explorer.advice.check.probe", lambda *_, **__: pytest.fail("nothing to run"))
    given, found = check(tmp_path, capsys, job("gpt2").to_job() | change, "--prove", axis)
    assert given == code and words in found["error"] and words in found["proof"]["text"]


def test_without_a_job_nothing_is_proven(capsys, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert cli.main(["check", "--config", str(tmp_path / "ds.json"), "--prove", "micro_batch", "--json"]) == 5
    found = json.loads(capsys.readouterr().out)
    assert found["proof"] is None and "name a --job" in found["error"]
