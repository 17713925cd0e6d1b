"""The table that proves the estimate: its arithmetic on made-up rows, the closed formulas against sums done by hand, and that no measured row is lost."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.accuracy import __main__ as command
from benchmarks.accuracy import facts, figures, formulas, llm_analysis, others, reports, rows, tables
from explorer import Setup
from explorer.errors import CouldNotRun
from explorer.profile import CATEGORIES, Host, Peak, PhaseMemory, Profile, Verdict
from explorer.units import GiB, MiB

# --- made-up rows


def profile(allocated=100, reserved=200, end=50, answer="fits", host=None, at_peak=None):
    """An estimate with these figures everywhere."""
    phase = {name: PhaseMemory(phase=name, end_allocated_bytes=end, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved) for name in ("init", "forward", "backward", "step")}
    return Profile(
        source="estimated", parameters=1, trainable_parameters=1,
        peak=Peak(allocated_bytes=allocated, allocated_phase="backward", allocated_step="steady", reserved_bytes=reserved, reserved_phase="step", reserved_step="first"),
        steps={"first": tuple(phase.values()), "steady": tuple(phase[n] for n in ("forward", "backward", "step"))},
        at_peak={**dict.fromkeys(CATEGORIES, 0), **(at_peak or {})}, host=host or Host(), outside_pytorch_bytes=10, verdict=Verdict(answer=answer),
    )


def row(name="a", allocated=100, reserved=200, end=50, failed=False, at_peak=None, host=None, capacity_gib=None, micro_batch=4, **keys):
    """A row as rows.jsonl has it."""
    sizes = {"end_allocated_bytes": end, "peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}
    data = {
        "name": name, "setup": {"model": "gpt2", "micro_batch": micro_batch, "capacity_gib": capacity_gib},
        "peak": {"allocated_bytes": allocated, "allocated_phase": "backward", "allocated_step": "steady", "reserved_bytes": reserved, "reserved_phase": "step", "reserved_step": "first"},
        "steps": {"first": [{"phase": p, **sizes} for p in ("init", "forward", "backward", "step")], "steady": [{"phase": p, **sizes} for p in ("forward", "backward", "step")]},
        "failure": {"phase": "backward"} if failed else None, "host": host or {}, "environment": {}, **keys,
    }
    return rows.Row.from_json(data if at_peak is None else {**data, "at_peak": at_peak})


def pair(measured, estimated=None, largest=None):
    return rows.Pair(row=measured, profile=estimated or profile(), largest=largest)


# --- the arithmetic


def test_median_95th_percentile_and_worst_are_of_the_errors_sizes():
    figure = figures.Figure(name="x", errors=tuple(i / 100 for i in (-4, 0, 1, -2, 3)), bars={"median": 0.02, "95th percentile": 0.035, "worst": 0.05})
    assert figure.statistics == pytest.approx({"median": 0.02, "95th percentile": 0.04, "worst": 0.04})
    assert figure.missed == ["95th percentile"]
    assert figures.Figure(name="x", errors=(), bars={"median": 0.02}).missed == []


def test_peak_allocated_and_under_estimates():
    pairs = [pair(row("a"), profile(allocated=98)), pair(row("b"), profile(allocated=99)), pair(row("c"), profile(allocated=110))]
    assert figures.peak_allocated(pairs).errors == pytest.approx((-0.02, -0.01, 0.10)) and figures.peak_allocated(pairs).worst_row == "c"
    count = figures.under_estimates(pairs)
    assert (count.count, count.rows) == (1, 3) and count.missed == ["share"]  # 1 % below is not more than 1 %


def test_every_phase_reads_its_own_figure():
    found = {f.name: f for f in figures.phases([pair(row(allocated=100, end=50), profile(allocated=101, end=49))])}
    assert found["backward, end"].errors == pytest.approx((-0.02,))
    assert found["init, peak"].errors == pytest.approx((0.01,))
    assert {name for name, f in found.items() if f.bars} == {"init, peak", "forward, end", "backward, end", "step, peak"}


def test_a_phase_that_a_run_did_not_reach_is_no_error():
    measured = row()
    measured.steps["steady"].clear()
    found = {f.name: f.errors for f in figures.phases([pair(measured)])}
    assert found["step, peak"] == () and found["init, peak"] == (0.0,)


def test_categories_are_in_parts_of_the_peak():
    found = {f.name: f for f in figures.categories([pair(row(at_peak={"gradients": 30, "temporary": 70}), profile(at_peak={"gradients": 26, "temporary": 70})), pair(row("old"))])}
    assert found["gradients"].errors == pytest.approx((-0.04,)) and found["gradients"].missed == ["median", "worst"]
    assert found["temporary"].errors == (0.0,)


def test_reserved_is_of_rows_without_a_limit():
    pairs = [pair(row("free"), profile(reserved=212)), pair(row("limited", capacity_gib=1.0), profile(reserved=400))]
    assert figures.reserved(pairs).errors == pytest.approx((0.06,))


def test_a_few_pinned_bytes_are_none_and_forgotten_pinned_memory_is_an_error():
    flags, exact, forgotten = ({"pinned_bytes": n, "resident_bytes": 100} for n in (5, GiB, GiB))
    pairs = [pair(row("a", host=flags)), pair(row("b", host=exact), profile(host=Host(pinned_bytes=GiB))), pair(row("c", host=forgotten))]
    assert figures.host_pinned(pairs).errors == (0.0, -1.0)
    imagined = pair(row("d", host={"pinned_bytes": 0, "resident_bytes": 100}), profile(host=Host(pinned_bytes=2 * MiB)))
    assert figures.host_pinned([imagined]).missed == ["worst"]
    assert figures.host_resident([pair(row(host=flags), profile(host=Host(resident_bytes=88)))]).errors == pytest.approx((-0.12,))


# --- which rows speak of what


@pytest.fixture
def kinds():
    """One row of every kind."""
    made = [
        row("plain", allocated=GiB), row("limit", capacity_gib=1.1, limit_of="plain"), row("limit-oom", capacity_gib=1.0, limit_of="plain", failed=True), row("wide", capacity_gib=2.0, limit_of="plain"),
        row("orphan", capacity_gib=1.0, failed=True), row("new", held_out=True), row("new-limit", held_out=True, limit_of="new", capacity_gib=1.0), row("most", largest=True), row("most-oom", largest=True, failed=True),
    ]
    return {r.name: r for r in made}


def names(pairs):
    return [p.row.name for p in pairs]


def test_each_row_speaks_of_what_it_is_for(kinds):
    pairs = [pair(r) for r in kinds.values()] + [rows.Pair(row=row("mute"), profile=None, error="no tape")]
    assert names(rows.accuracy(pairs)) == ["plain"]
    assert names(rows.held_out(pairs)) == ["new"]
    assert names(rows.limited(pairs)) == ["limit", "limit-oom", "wide", "orphan", "new-limit"]
    assert names(rows.largest_batches(pairs)) == ["most", "most-oom"]
    assert names(rows.without_estimate(pairs)) == ["mute"]


def test_a_limit_is_a_multiple_of_the_peak_without_it(kinds):
    ratios = {name: rows.limit_ratio(pair(r), kinds) for name, r in kinds.items()}
    assert ratios["limit"] == pytest.approx(1.1) and ratios["limit-oom"] == 1.0 and ratios["plain"] is None and ratios["orphan"] is None


@pytest.mark.parametrize(("answer", "failed", "wrong"), [("fits", True, "false fit"), ("does not fit", False, "false does-not-fit"), ("tight", True, ""), ("tight", False, ""), ("fits", False, ""), ("does not fit", True, "")])
def test_what_makes_a_verdict_wrong(kinds, answer, failed, wrong):
    measured = row("x", capacity_gib=1.04, limit_of="plain", failed=failed)
    (verdict,) = figures.judged([pair(measured, profile(answer=answer))], kinds)
    assert verdict.wrong == wrong and verdict.ratio == pytest.approx(1.04)


def test_verdicts_count_between_the_limits_that_the_bars_speak_of(kinds):
    answers = {"limit": "tight", "limit-oom": "fits", "wide": "does not fit", "orphan": "does not fit"}
    judged = figures.judged([pair(kinds[name], profile(answer=answer)) for name, answer in answers.items()], kinds)
    fits, not_fits, tight = figures.verdict_counts(judged)
    assert (fits.count, not_fits.count, tight.count, tight.rows) == (1, 0, 1, 3)  # "wide" stands at twice the peak
    assert fits.missed == ["share"] and not not_fits.missed and not tight.missed


def test_a_largest_batch_that_failed_within_todays_answer():
    within, beyond, ran = row("within", largest=True, failed=True, micro_batch=8), row("beyond", largest=True, failed=True, micro_batch=9), row("ran", largest=True, micro_batch=8)
    assert names(figures.largest_that_failed([pair(within, largest=8), pair(beyond, largest=8), pair(ran, largest=8)])) == ["within"]


def test_worst_rows_first_either_way():
    pairs = [pair(row("a"), profile(allocated=101)), pair(row("b"), profile(allocated=95)), pair(row("c"), profile(allocated=103))]
    assert names(figures.worst(pairs, 2)) == ["b", "c"]


def test_two_rows_of_one_name_are_refused(tmp_path):
    line = json.dumps({"name": "a", "setup": {}, "peak": {}, "steps": {}})
    (tmp_path / "rows.jsonl").write_text(f"{line}\n\n{line}\n")
    with pytest.raises(ValueError, match="'a'"):
        rows.read(tmp_path / "rows.jsonl")


def test_a_row_without_a_tape_says_why(monkeypatch):
    def refuse(setup, largest):
        raise CouldNotRun("no tape here")

    monkeypatch.setattr(rows, "estimate", refuse)
    assert rows.pair(row()).error == "no tape here"


# --- the real rows


def test_every_measured_row_is_in_a_table():
    """Whatever keys it has: none is left out of all of them."""
    pairs = [pair(r) for r in rows.read()]
    spoken_of = {p.row.name for chosen in (rows.accuracy, rows.held_out, rows.limited, rows.largest_batches) for p in chosen(pairs)}
    assert len(pairs) > 100
    assert not {p.row.name for p in pairs} - spoken_of


def test_every_limit_names_a_row_that_ran():
    by_name = {r.name: r for r in rows.read()}
    assert not [r.name for r in by_name.values() if r.limit_of and (r.limit_of not in by_name or by_name[r.limit_of].failed)]


def test_a_small_table_is_whole(monkeypatch):
    """Two estimates, no other tools: bars and figures stand in the text."""
    monkeypatch.setattr(tables, "others_section", lambda pairs: "")
    monkeypatch.setattr(tables, "reports_section", lambda: "")
    chosen = [r for r in rows.read() if r.name in ("gpt2-z2", "gpt2-b1")]
    made = tables.document(rows.pairs(chosen))
    line = next(text for text in made.splitlines() if text.startswith("| peak allocated | 2 |"))
    assert "median ≤ 0.5 %, 95th percentile ≤ 2 %, worst ≤ 5 %" in line
    assert "`gpt2-b1`" in made and "No rows yet." in made


def test_a_bar_that_is_missed_is_said():
    pairs = [pair(row("a"), profile(allocated=90))]
    by_name = {p.row.name: p.row for p in pairs}
    assert "peak allocated (median, 95th percentile, worst)" in tables.missed_bars(pairs, by_name)
    assert tables.missed_bars([pair(row("a", host={"resident_bytes": 100}), profile(host=Host(resident_bytes=100)))], {}) == []


def test_the_document_has_room_for_the_tables():
    text = command.DOCUMENT.read_text(encoding="utf-8")
    assert command.put(text, "THE TABLES").count("THE TABLES") == 1
    assert command.put(command.put(text, "THE TABLES"), "THEM") == command.put(text, "THEM")
    with pytest.raises(ValueError, match="no <!--"):
        command.put("# Accuracy", "THE TABLES")


# --- closed formulas


TINY = formulas.Decoder(layers=2, hidden=8, heads=2, kv_heads=1, feed_forward=32, mlp_matrices=2, vocabulary=100)


def test_megatrons_activations_by_hand():
    # s = 4, b = 3: sbh = 96. A layer 34 × 96 + 5 × 2 × 16 × 3 = 3264 + 480; outside 96 × (1 + 4 × (1 + 12.5)) = 5280.
    assert formulas.megatron_activations(TINY, batch=3, sequence=4, recompute=False, fused=False) == 2 * 3744 + 5280
    assert formulas.megatron_activations(TINY, batch=3, sequence=4, recompute=False, fused=True) == 2 * 3264 + 5280
    assert formulas.megatron_activations(TINY, batch=3, sequence=4, recompute=True, fused=False) == 2 * 192 + 5280


def test_the_cookbook_by_hand():
    # embeddings 1600, positions 32, norms 128 + 16, attention 2 × 1.5 × 2 × 64 = 384, MLP 2 × 2 × 8 × 32 = 1024.
    assert formulas.cookbook_parameters(TINY, sequence=4) == 3184
    # activations 4 × 3 × 8 × 2 × (34 + 5 × 2 × 4 / 8) = 192 × 39; states 18 bytes a parameter on one GPU.
    assert formulas.cookbook(TINY, batch=3, sequence=4, stage=2, gpus=1, checkpointing=False, mixed=True) == 3184 * 18 + 192 * 39
    # stage 3 on 4 GPUs: 18 / 4 bytes, a bucket of 10 and 20 live parameters in 2 bytes; checkpointing leaves out attention.
    assert formulas.cookbook(TINY, batch=3, sequence=4, stage=3, gpus=4, checkpointing=True, mixed=True, allgather_bucket=10, live_parameters=20) == 3184 * 4.5 + 60 + 192 * 34
    # full precision, stage 0: 4 + 4 + 12 bytes, and activations 16 × 4 + 2 + 9 × a·s/h.
    assert formulas.cookbook(TINY, batch=3, sequence=4, stage=0, gpus=4, checkpointing=False, mixed=False) == 3184 * 20 + 192 * 75


# --- other tools


def case(stage=2, precision="bf16", task="causal", optimizer="AdamW", **job):
    config = {"zero_optimization": {"stage": stage}, "optimizer": {"type": optimizer, "params": {"lr": 1e-5}}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    config["zero_optimization"] |= job.pop("zero", {})
    setup = Setup(model="gpt2", micro_batch=2, deepspeed=config, **job)
    known = {"task": task, "parameters": 2851_000_000, "largest_layer": 32_899_072, "accelerate_bytes": 400, "shape": {"layers": 2, "hidden": 8, "heads": 2, "kv_heads": 1, "feed_forward": 32, "mlp_matrices": 2, "vocabulary": 100, "experts": 0}}
    measured = row()
    return others.Case(rows.Row.from_json({"name": "x", "setup": setup.to_job(), "peak": measured.peak, "steps": {}}), known)


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
BOTH = {**OFFLOADED, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(("asked", "host_gb", "gpu_gb"), [({"zero": OFFLOADED}, 127.48, 5.31), ({"stage": 3, "zero": BOTH}, 71.71, 0.12), ({"stage": 3, "zero": OFFLOADED}, 63.74, 0.79), ({"stage": 3}, 1.47, 6.10)])
def test_deepspeeds_functions_are_asked_as_its_own_documentation_does(asked, host_gb, gpu_gb):
    """t5-3b (2851 M parameters, largest layer 32128 × 1024) on 8 GPUs: the print-outs of DeepSpeed's docs/code-docs/source/memory.rst, in its GB (2^30)."""
    pytest.importorskip("deepspeed")
    host, gpu = others.deepspeed_needs(case(world_size=8, **asked))
    assert host / GiB == pytest.approx(host_gb, abs=0.05) and gpu / GiB == pytest.approx(gpu_gb, abs=0.005)


@pytest.mark.parametrize("outside", [{"stage": 0}, {"stage": 1}, {"precision": "fp32"}, {"optimizer": "SGD"}, {"trainable": ("lm_head*",)}, {"stage": 3, "zero": {"offload_param": {"device": "cpu"}}}])
def test_deepspeed_is_not_asked_outside_its_domain(outside):
    assert others.deepspeed_needs(case(**outside)) is None


def test_accelerate_is_asked_for_one_gpu_only():
    pytest.importorskip("accelerate")
    assert others.accelerate_needs(case(stage=0)) == 800  # two moments of fp32 size are its largest part in mixed precision
    assert others.accelerate_needs(case(stage=0, precision="fp32")) == 1600
    assert others.accelerate_needs(case(world_size=2)) is None and others.accelerate_needs(case(zero=OFFLOADED)) is None


def test_formulas_of_decoders_are_not_asked_of_other_models():
    assert others.cookbook_needs(case()) and others.megatron_needs(case()) and others.llm_analysis_question(case())
    assert not any(ask(case(task="masked")) for ask in (others.cookbook_needs, others.megatron_needs, others.llm_analysis_question))
    assert others.megatron_needs(case(zero=OFFLOADED)) and others.cookbook_needs(case(zero=OFFLOADED)) is None


def test_autocast_is_not_taken_for_16_bit_weights():
    job = case().setup.to_job()
    job["deepspeed"] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 2}}
    mixed = others.Case(rows.Row.from_json({"name": "x", "setup": job, "peak": {}, "steps": {}}), case().facts)
    assert mixed.autocast and others.deepspeed_needs(mixed) is None and others.megatron_needs(mixed) is None


def test_twice_and_half_are_equally_far():
    assert others.farness(0.5) == pytest.approx(others.farness(2.0)) and others.farness(0.0) == math.inf
    line = others.Line(tool="t", of="x", said=(0.9, 0.3, 2.0), ours=(1.0, 1.0, 1.0), names=("a", "b", "c"))
    assert line.names[line.worst] == "b"


def test_what_llm_analysis_said_answers_what_is_asked_today():
    """Every stored answer belongs to a question of today's rows: a changed question would leave it unused."""
    asked = {llm_analysis.text(q) for q in others.llm_analysis_questions()}
    assert asked and set(llm_analysis.load()) <= asked


def test_the_facts_name_the_models_parameters_as_the_catalog_does():
    from explorer.catalog import models

    counted = {f["name"]: f["parameters"] for f in facts.load().values()}
    known = {m.name: m.parameters for m in models() if m.name in counted and m.parameters}
    assert len(known) > 10 and {name: counted[name] for name in known} == known


# --- published measurements


def test_every_report_can_be_set_up_and_says_why_it_may_differ():
    listed = json.loads(reports.REPORTS.read_text(encoding="utf-8"))
    assert len({r["id"] for r in listed}) == len(listed)
    for report in listed:
        assert Setup.from_job(report["job"]) and report["source"] and report["why"]
        assert all(read["what"] in reports.READINGS and read["bytes"] > MiB for read in report["read"])


def test_a_reading_within_our_range_is_no_error():
    made = {"id": "a", "what": "", "source": "", "reading": "unsaid", "why": ""}
    errors = [reports.Reading(reported_bytes=n, ours_bytes=(100, 120), **made).error for n in (110, 125, 80)]
    assert errors == pytest.approx([0.0, -0.04, 0.25])
    assert reports.Reading(reported_bytes=1, ours_bytes=None, **made).error is None
