"""The caching allocator's model: rounding, splitting, merging, limits."""

from __future__ import annotations

import pytest

from explorer import Setup
from explorer.estimator.allocator import Options
from explorer.estimator.estimate import events
from explorer.estimator.stream import GATHER, Writer
from explorer.estimator.usage import run, run_under

MiB = 1 << 20


DEFAULTS = Options()


def usage(script, options=DEFAULTS, limit=None, streams=()):
    """Play (+bytes: allocate, −k: free the k-th block)."""
    writer = Writer()
    for i, step in enumerate(script):
        if step > 0:
            writer.allocate(step, "temporary", "", stream=GATHER if i in streams else 0)
        else:
            writer.free(-step)
    return run(writer.stream(), options, limit)


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (21 * MiB, 21 * MiB, 22 * MiB),
    ],
)
def test_rounding(asked, allocated, reserved):
    got = usage([asked])
    assert got.reserved[-1] == reserved
    assert got.allocated[-1] in (allocated, reserved)


def test_a_small_rest_of_a_large_block_is_not_split_off():
    got = usage([32 * MiB, -1, 31 * MiB + 512])
    assert got.allocated[-1] == 32 * MiB


def test_a_large_rest_is():
    got = usage([32 * MiB, -1, 30 * MiB])
    assert got.allocated[-1] == 30 * MiB
    assert got.reserved[-1] == 32 * MiB


def test_neighbours_merge():
    got = usage([4 * MiB, 4 * MiB, 4 * MiB, -1, -2, 8 * MiB])
    assert got.reserved[-1] == 20 * MiB


def test_streams_have_pools_of_their_own():
    assert usage([30 * MiB, -1, 30 * MiB]).reserved[-1] == 30 * MiB
    assert usage([30 * MiB, -1, 30 * MiB], streams={2}).reserved[-1] == 60 * MiB


def test_a_limit_releases_cached_segments_before_it_fails():
    got = usage([30 * MiB, -1, 40 * MiB], limit=50 * MiB)
    assert got.failure is None
    assert got.reserved[-1] == 40 * MiB
    failed = usage([30 * MiB, 40 * MiB], limit=50 * MiB)
    assert failed.failure.requested == 40 * MiB
    assert failed.failure.allocated == 30 * MiB


def test_blocks_above_max_split_size_are_kept_whole():
    got = usage([300 * MiB, -1, 60 * MiB], Options(max_split_bytes=200 * MiB))
    assert got.reserved[-1] == 360 * MiB


def test_expandable_segments_do_not_fragment():
    script = [30 * MiB, 30 * MiB, -2, 50 * MiB, -3, -1, 80 * MiB]
    assert usage(script).reserved[-1] == 190 * MiB
    assert usage(script, Options(expandable_segments=True)).reserved[-1] == 80 * MiB


@pytest.mark.parametrize("options", [DEFAULTS, Options(expandable_segments=True), Options(max_split_bytes=64 * MiB)], ids=["defaults", "expandable", "max_split"])
@pytest.mark.parametrize("deepspeed", [{"stage": 2}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}], ids=["stage 2", "stage 3"])
def test_several_limits_at_once_are_each_as_alone(options, deepspeed):
    """From one that nothing passes to one that changes nothing, runs part and go on as if they had never been one."""
    found = events(Setup.from_job({"model": "gpt2", "micro_batch": 8, "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": deepspeed}}))
    peak = int(found.usage.allocated.max())
    limits = [None, *(int(peak * part) for part in (0.3, 0.8, 1.0, 1.01, 1.02, 1.05, 1.1, 1.15, 1.3, 2))]
    together = run_under(found.stream, options, limits)
    for limit in limits:
        alone = run(found.stream, options, limit)
        assert (together[limit].allocated == alone.allocated).all()
        assert (together[limit].reserved == alone.reserved).all()
        assert (together[limit].failure and vars(together[limit].failure)) == (alone.failure and vars(alone.failure))
    assert len({id(usage) for usage in together.values()}) > 3
