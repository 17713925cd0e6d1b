"""The compiled player does what Python's does, event by event."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer import Setup, estimate
from explorer.estimator import compiled, usage
from explorer.estimator.allocator import Options
from explorer.estimator.estimate import events
from explorer.estimator.stream import Writer
from explorer.estimator.usage import run_under

MiB = 1 << 20
ZERO = {"stage 2": {"stage": 2}, "stage 3": {"stage": 3}, "offloaded": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}


def same(stream, options, limits, releases=frozenset()):
    """Play it both ways; what came out, once it is equal."""
    assert compiled.plays(options)
    fast, plain = (run_under(stream, options, limits, releases, compiled=way) for way in (True, False))
    assert fast.keys() == plain.keys()
    for limit, a in fast.items():
        b = plain[limit]
        for name in ("allocated", "reserved", "sizes"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
        for name in ("flushes", "steps", "settled", "retries"):
            assert getattr(a, name) == getattr(b, name), name
        assert (a.failure and vars(a.failure)) == (b.failure and vars(b.failure))
    return fast


SIZES = st.one_of(st.integers(0, 3 * MiB), st.integers(0, 60 * MiB), st.sampled_from([MiB, MiB + 1, 10 * MiB - 512, 10 * MiB, 21 * MiB, 30 * MiB]))
EVENT = st.tuples(st.booleans(), SIZES, st.integers(0, 2), st.integers(0, 1 << 16))


@settings(max_examples=400, deadline=None)
@given(
    init=st.lists(EVENT, max_size=30), first=st.lists(EVENT, max_size=60), steady=st.lists(EVENT, max_size=60), split=st.sampled_from([None, 20 * MiB, 64 * MiB]),
    limits=st.lists(st.integers(2, 700), min_size=1, max_size=5, unique=True), released=st.sets(st.integers(1, 150), max_size=3), repeats=st.booleans(),
)
def test_random_events(init, first, steady, split, limits, released, repeats):
    """Any stream, with a steady step that ends with what it began with, or without one."""
    writer, alive = Writer(), []

    def write(script, kept):
        for allocates, size, stream, which in script:
            if allocates or not len(alive) > kept:
                if block := writer.allocate(size, "temporary", "", stream=stream):
                    alive.append(block)
            else:
                writer.free(alive.pop(kept + which % (len(alive) - kept)))

    write(init + first, 0)
    kept, start = len(alive), len(writer.order)
    if repeats:
        writer.mark(0, "first", "step")
        write(steady, kept)
        writer.free(*alive[kept:])
        writer.mark(start, "steady", "step")
    positions = frozenset(p for p in released if p <= len(writer.order) and writer.order[p - 1] > 0)
    same(writer.stream(), Options(max_split_bytes=split), [None, *(limit * MiB for limit in limits)], positions)


@pytest.mark.parametrize("split", [None, 128], ids=["default", "max_split_size_mb"])
@pytest.mark.parametrize("zero", ZERO.values(), ids=ZERO)
@pytest.mark.parametrize("model", ["gpt2", "openai/clip-vit-base-patch32", "google-t5/t5-base"])
def test_real_jobs_near_their_limit(model, zero, split):
    job = {"model": model, "micro_batch": 4, "world_size": 8, "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": zero}}
    found = events(Setup.from_job(job))
    peak = int(found.usage.allocated.max())
    limits = [None, *(int(peak * part) for part in (0.5, 0.97, 1.0, 1.01, 1.03, 1.06, 1.1, 1.2))]
    got = same(found.stream, Options(max_split_bytes=split and split * MiB), limits)
    assert any(one.failure for one in got.values())
    assert any(one.flushes for one in got.values())


def test_without_wasmtime_python_does_it(monkeypatch):
    setup = Setup.from_job({"model": "gpt2", "micro_batch": 4, "gpu": "H200", "capacity_gib": 6, "deepspeed": {"bf16": {"enabled": True}}})
    fast = estimate(setup, largest=False)
    monkeypatch.setattr(compiled, "_module", lambda: None)
    assert not compiled.plays(Options())
    assert estimate(setup, largest=False) == fast


def test_options_that_it_does_not_know_are_left_to_python():
    assert not compiled.plays(Options(expandable_segments=True))
    assert not compiled.plays(Options(collect_above=0.8))
    assert compiled.plays(Options(collect_above=0.8, fraction=False)), "PyTorch collects under a per-process limit only"


def test_where_there_is_no_room_for_more_blocks_python_goes_on(monkeypatch):
    """Ever larger requests leave more cached segments than the machine keeps count of."""
    writer, began = Writer(), []
    for i in range(5000):
        writer.transient((20 + 2 * i) * MiB, "")
    plain = run_under(writer.stream(), Options(), [None], compiled=False)[None]
    monkeypatch.setattr(usage, "Player", lambda *given: began.append(1) or _player(*given))
    assert run_under(writer.stream(), Options(), [None])[None].reserved.max() == plain.reserved.max()
    assert began


_player = usage.Player


def test_threads_do_not_disturb_each_other():
    """Each has an instance of its own: a page estimates in several."""
    setups = [Setup.from_job({"model": model, "micro_batch": n, "gpu": "H200", "capacity_gib": 4, "deepspeed": {"bf16": {"enabled": True}}}) for model in ("gpt2", "google-bert/bert-base-uncased") for n in (1, 2, 4)]
    alone = [estimate(setup, largest=False) for setup in setups]
    got: dict[int, list] = {}

    def work(i):
        got[i] = [estimate(setups[i], largest=False) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(setups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(got[i] == [alone[i]] * 5 for i in range(len(setups)))


def test_the_code_that_ships_is_compiled_from_the_source_beside_it():
    """`make core` compiles it and notes both."""
    for line in (compiled.CODE.parent / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((compiled.CODE.parent / name).read_bytes()).hexdigest() == digest, f"{name}: run make core"
