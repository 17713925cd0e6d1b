"""The verdict follows the steady step until the allocator's layout repeats: jobs that die late, and jobs that live by flushing."""

from __future__ import annotations

import numpy as np
import pytest

from explorer import Setup, estimate
from explorer.estimator.allocator import Options
from explorer.estimator.estimate import events
from explorer.estimator.largest import largest_micro_batch
from explorer.estimator.stream import GATHER, Stream, Writer
from explorer.estimator.usage import MOST_STEPS, run

MiB = 1 << 20
DEFAULTS = Options()
LLAMA_1_1B = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
}
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def setup(model, zero, **more):
    config = {"bf16": {"enabled": True}, "zero_optimization": zero}
    return Setup.from_job({"model": model, "micro_batch": 4, "world_size": 8, "gpu": "H200", "deepspeed": config, **more})


def judged(*args, **more):
    return estimate(setup(*args, **more), largest=False).verdict


@pytest.mark.parametrize(
    ("model", "zero", "more"),
    [
        (LLAMA_1_1B, OFFLOADED, {"sequence": 1024, "capacity_gib": 11.96}),
        ("gpt2-large", OFFLOADED, {"capacity_gib": 14.44}),
        ("facebook/opt-1.3b", {"stage": 2}, {"capacity_gib": 12.27}),
    ],
    ids=["Llama of 1.1 B, as it was seen", "gpt2-large", "opt-1.3b"],
)
def test_a_job_that_lives_two_steps_and_dies_in_the_third_does_not_fit(model, zero, more):
    """The limit is above what the tensors take."""
    verdict = judged(model, zero, **more)
    assert verdict.answer != "fits"
    assert verdict.headroom_bytes > 0
    assert "runs out of memory in step 3: " in verdict.why
    assert verdict.failure.step == "steady"
    assert verdict.retries is None


@pytest.mark.parametrize(
    ("model", "gib"), [("google-bert/bert-large-uncased", 4.38), ("Qwen/Qwen2.5-0.5B", 15.68), ("meta-llama/Llama-3.2-1B", 18.81)], ids=["bert", "qwen", "llama"],
)
def test_a_job_that_lives_only_by_flushing_is_tight_and_slow(model, gib):
    answer = estimate(setup(model, {"stage": 3}, capacity_gib=gib), largest=False)
    assert answer.verdict.answer == "tight"
    assert answer.verdict.retries == 2
    assert answer.to_json()["verdict"]["retries"] == 2
    assert "twice in every step, which makes training slow" in answer.verdict.why
    assert sum("empties its cache twice" in note and "slow" in note for note in answer.notes) == 1


def test_a_job_with_room_flushes_nothing():
    verdict = judged("gpt2", {"stage": 2}, capacity_gib=40)
    assert (verdict.answer, verdict.retries) == ("fits", 0)
    assert judged("gpt2", {"stage": 2}, gpu=None).retries is None


def test_steps_that_never_repeat_are_said():
    verdict = judged("gpt2-large", {"stage": 3}, capacity_gib=17.15)
    assert verdict.answer == "tight"
    assert f"after {MOST_STEPS} steps the layout of its memory still changes" in verdict.why


@pytest.mark.parametrize(("model", "zero", "gib"), [("google-bert/bert-large-uncased", {"stage": 3}, 4.38), ("gpt2-large", OFFLOADED, 14.44)])
def test_the_largest_micro_batch_is_judged_the_same_way(model, zero, gib):
    """A micro-batch that lives by flushing, or dies in a late step, is none that fits."""
    job = setup(model, zero, capacity_gib=gib)
    largest = largest_micro_batch(job)
    assert 0 < largest < 4
    assert estimate(job.replace(micro_batch=largest), largest=False).verdict.answer == "fits"


# --- a repeated step is the same as one written out


def written_out(stream, times):
    """The stream with its steady step that many times, each with blocks of its own."""
    made = np.unique(np.abs(stream.order[stream.steady :]))
    made = made[np.isin(made, stream.order[stream.steady :])]
    columns = {name: [getattr(stream, name)] for name in ("bytes", "categories", "provenance", "streams")}
    carried, count, order = stream.carried(), len(stream.bytes), [stream.order]
    before = {block: int(block) for block in made.tolist()}
    for _ in range(times - 1):
        here = {block: count + i + 1 for i, block in enumerate(made.tolist())}
        old = {found: before[left] for found, left in carried.items()}
        order.append(np.array([np.sign(e) * (here.get(abs(e)) or old[abs(e)]) for e in stream.order[stream.steady :].tolist()]))
        for name, parts in columns.items():
            parts.append(getattr(stream, name)[made - 1])
        before, count = here, count + len(made)
    together = {name: np.concatenate(parts) for name, parts in columns.items()}
    return Stream(**together, owners=[""] * count, order=np.concatenate(order).astype(np.int64), marks=())


@pytest.mark.parametrize("options", [DEFAULTS, Options(expandable_segments=True), Options(max_split_bytes=64 * MiB)], ids=["default", "expandable", "split"])
@pytest.mark.parametrize("zero", [OFFLOADED, {"stage": 3}, {"stage": 2}], ids=["offloaded", "stage 3", "stage 2"])
def test_a_step_that_is_repeated_is_as_one_written_out(zero, options):
    found = events(setup("gpt2", zero))
    stream, peak = found.stream, int(found.usage.allocated.max())
    for part in (1.0, 1.03, 1.06, 1.1, 1.2, 2):
        got = run(stream, options, int(peak * part))
        times = got.steps + (got.failure is not None)
        plain = run(written_out(stream, max(1, times)), options, int(peak * part))
        assert len(plain.flushes) == len(got.flushes)
        assert (plain.failure is None) == (got.failure is None)
        assert plain.reserved.max() == got.reserved.max()
        if got.failure is not None:
            length = len(stream.order) - stream.steady
            assert plain.failure.position == got.failure.position + length * got.failure.repeat
            assert (plain.failure.allocated, plain.failure.reserved) == (got.failure.allocated, got.failure.reserved)


def test_flushes_of_the_steps_that_repeat_are_counted_alone():
    """The first step's cached 60 MiB have to go once for the second's 70; from then on each step finds them."""
    writer = Writer()
    writer.transient(60 * MiB, "")
    writer.mark(0, "first", "step")
    writer.transient(70 * MiB, "")
    writer.mark(2, "steady", "step")
    got = run(writer.stream(), DEFAULTS, 100 * MiB)
    assert got.flushes == (2,)
    assert (got.steps, got.settled, got.retries) == (2, True, 0)


def test_two_streams_that_take_turns_flush_twice_in_every_step():
    """Each stream has a pool of its own, and the limit has room for one of the two."""
    writer = Writer()
    writer.transient(60 * MiB, "")
    writer.mark(0, "first", "step")
    writer.transient(60 * MiB, "", stream=GATHER)
    writer.transient(60 * MiB, "")
    writer.mark(2, "steady", "step")
    got = run(writer.stream(), DEFAULTS, 100 * MiB)
    assert got.settled
    assert got.retries == 2
