"""The caching allocator's model: rounding, splitting, merging, limits."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from explorer import Setup, estimate
from explorer.estimator.addresses import Addresses
from explorer.estimator.allocator import ADDRESS, AFTER, BEFORE, FREE, POOL, SEGMENT, SIZE, Options, rounded
from explorer.estimator.estimate import events
from explorer.estimator.expandable import GAP, make
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


# --- expandable segments


EXPANDABLE = Options(expandable_segments=True)


def test_expandable_segments_do_not_fragment():
    script = [30 * MiB, 30 * MiB, -2, 50 * MiB, -3, -1, 80 * MiB]
    assert usage(script).reserved[-1] == 190 * MiB
    assert usage(script, EXPANDABLE).reserved[-1] == 80 * MiB


@pytest.mark.parametrize(
    ("script", "reserved"),
    [
        ([1], 2),
        ([MiB, MiB, MiB], 4),
        ([MiB + 512], 20),
        ([21 * MiB], 40),
        ([15 * MiB, 15 * MiB], 40),
        ([1, 15 * MiB], 22),
    ],
    ids=["a small page", "two small blocks a page", "a large page", "two large pages", "blocks share pages", "a range for each pool"],
)
def test_pages_are_of_2_mib_for_small_blocks_and_20_for_large_ones(script, reserved):
    assert usage(script, EXPANDABLE).reserved[-1] == reserved * MiB


def test_each_stream_has_a_range_of_its_own():
    assert usage([30 * MiB, -1, 30 * MiB], EXPANDABLE, streams={2}).reserved[-1] == 80 * MiB


def test_every_free_block_is_unmapped_where_memory_runs_out_not_the_last_alone():
    """Three blocks of 40 MiB: the first is freed, so 40 MiB lie between the start and blocks in use. Without, that segment goes back too; a hole inside one does not."""
    script = [40 * MiB, 40 * MiB, 40 * MiB, -1, 60 * MiB]
    got = usage(script, EXPANDABLE, limit=150 * MiB)
    assert got.failure is None
    assert got.reserved[-1] == 140 * MiB
    assert got.flushes == (4,)


def test_a_hole_inside_a_segment_is_given_back_only_by_expandable_segments():
    script = [200 * MiB, -1, 80 * MiB, 40 * MiB, 80 * MiB, -2, -4, 170 * MiB]
    assert usage(script, limit=220 * MiB).failure.requested == 170 * MiB
    assert usage(script, EXPANDABLE, limit=220 * MiB).failure is None


def test_only_whole_pages_inside_a_free_block_are_unmapped():
    """30 MiB, 30 MiB, 30 MiB: the middle one covers one page from 40 to 60 MiB whole, so 20 of its 30 MiB go back."""
    allocator = make(EXPANDABLE)
    blocks = [allocator.allocate(30 * MiB, 0) for _ in range(3)]
    assert allocator.reserved == 100 * MiB
    allocator.free(blocks[1])
    allocator.release()
    assert allocator.reserved == 80 * MiB  # the page behind 90 MiB is half in use
    assert sorted(size for size, _, _ in allocator.pools[0]) == [10 * MiB, 10 * MiB]


def test_the_lowest_gap_with_room_is_mapped_first_and_free_neighbours_join():
    allocator = make(EXPANDABLE)
    first, second, third = (allocator.allocate(40 * MiB, 0) for _ in range(3))
    allocator.free(first)
    allocator.release()
    assert allocator.reserved == 80 * MiB
    again = allocator.allocate(30 * MiB, 0)
    assert again[ADDRESS] == 0
    assert allocator.reserved == 120 * MiB
    assert allocator.allocate(60 * MiB, 0)[ADDRESS] == 120 * MiB  # 10 MiB are free between: no room


def test_a_block_that_cannot_grow_is_taken_before_one_that_can():
    """The best fit in bytes is the last block, but the gap behind it lets it grow: PyTorch takes the next larger one that cannot."""
    allocator = make(EXPANDABLE)
    hole, middle, tail = allocator.allocate(60 * MiB, 0), allocator.allocate(20 * MiB, 0), allocator.allocate(40 * MiB, 0)
    allocator.free(tail)
    allocator.free(hole)
    assert allocator.allocate(40 * MiB, 0)[ADDRESS] == 0
    assert middle[ADDRESS] == 60 * MiB


def test_a_per_process_limit_is_compared_with_the_whole_request_and_the_device_with_the_pages():
    """25 of 30 MiB asked for lie free at the end: 5 are lacking, in one page of 20 MiB."""
    script = [55 * MiB, 25 * MiB, -2, 30 * MiB]
    assert usage(script, EXPANDABLE, limit=105 * MiB).flushes == (3,)
    assert usage(script, Options(expandable_segments=True, fraction=False), limit=105 * MiB).flushes == ()


LIMITED = {row["name"]: row for row in map(json.loads, (Path(__file__).parents[2] / "benchmarks/accuracy/rows.jsonl").read_text().splitlines()) if row.get("limit_of")}


@pytest.mark.parametrize("name", ["gpt2-z2@1.05", "gpt2-z2@1.10", "clipb-z1-fp16@1.05", "clipb-z1-fp16@1.10", "qwen25-z3-bf16@1.05", "qwen25-z3-bf16@1.10", "t5-z2@1.05", "vitl-z2-of64@1.05"])
def test_expandable_segments_help_jobs_that_really_ran_out_of_memory_by_fragmentation(name):
    """The limit is above what the tensors take, and each ran out of memory under it on an H200, without expandable segments."""
    row = LIMITED[name]
    setup = Setup.from_job(row["setup"])
    assert row["failure"] is not None
    assert estimate(setup, largest=False).verdict.answer in ("tight", "does not fit")
    assert estimate(setup.replace(allocator={"expandable_segments": True}), largest=False).verdict.answer == "fits"


@pytest.mark.parametrize("name", ["bert-z2@0.97", "gpt2-z2@0.97", "t5-z2@0.97"])
def test_expandable_segments_do_not_help_where_the_tensors_are_too_many(name):
    """A per-process limit below the peak."""
    setup = Setup.from_job(LIMITED[name]["setup"])
    assert estimate(setup.replace(allocator={"expandable_segments": True}), largest=False).verdict.answer != "fits"


# --- max_split_size_mb


def test_a_block_above_max_split_size_serves_requests_up_to_20_mib_smaller():
    options = Options(max_split_bytes=100 * MiB)
    assert usage([300 * MiB, -1, 281 * MiB], options).reserved[-1] == 300 * MiB
    assert usage([300 * MiB, -1, 280 * MiB], options).reserved[-1] == 580 * MiB


def test_one_large_block_goes_back_before_everything_does():
    """PyTorch first gives back one cached block that is large enough, and counts no retry."""
    options = Options(max_split_bytes=50 * MiB)
    script = [200 * MiB, 150 * MiB, 30 * MiB, -1, -2, -3, 160 * MiB]
    got = usage(script, options, limit=390 * MiB)
    assert got.flushes == ()
    assert got.reserved[-1] == (150 + 30 + 160) * MiB
    assert usage(script, limit=390 * MiB).reserved[-1] == 380 * MiB  # without, the block of 200 serves


def test_several_large_blocks_go_back_from_the_largest_on_where_none_is_large_enough():
    options = Options(max_split_bytes=50 * MiB)
    got = usage([100 * MiB, 80 * MiB, 60 * MiB, -1, -2, -3, 150 * MiB], options, limit=250 * MiB)
    assert got.flushes == ()
    assert got.reserved[-1] == (60 + 150) * MiB


# --- garbage_collection_threshold


COLLECTING = Options(collect_above=0.5)


def test_old_cached_segments_go_back_above_the_threshold():
    """Five segments of 20 to 60 MiB lie free, 200 in all of 300; the next one that does not fit collects those no younger than the average."""
    script = [20 * MiB, 30 * MiB, 40 * MiB, 50 * MiB, 60 * MiB, -1, -2, -3, -4, -5, 70 * MiB]
    assert usage(script, limit=300 * MiB).reserved[-1] == 270 * MiB
    got = usage(script, COLLECTING, limit=300 * MiB)
    assert got.reserved[-1] < 270 * MiB
    assert got.flushes == ()


def test_the_oldest_segments_are_collected_first():
    """20 MiB lay free through four searches, 60 MiB through one: the average is 2.5, so the first alone goes."""
    script = [20 * MiB, 60 * MiB, -1, 30 * MiB, 32 * MiB, 34 * MiB, -2, 70 * MiB]
    got = usage(script, Options(collect_above=0.55), limit=300 * MiB)
    assert got.reserved[-1] == (60 + 30 + 32 + 34 + 70) * MiB


@pytest.mark.parametrize(
    ("options", "limit"), [(COLLECTING, None), (Options(collect_above=0.5, fraction=False), 300 * MiB), (Options(collect_above=0.95), 300 * MiB)],
    ids=["no limit", "the card is the limit", "below the threshold"],
)
def test_nothing_is_collected_without_a_per_process_limit_or_below_the_threshold(options, limit):
    script = [20 * MiB, 30 * MiB, 40 * MiB, 50 * MiB, 60 * MiB, -1, -2, -3, -4, -5, 70 * MiB]
    assert usage(script, options, limit).reserved[-1] == 270 * MiB


# --- roundup_power2_divisions


@pytest.mark.parametrize(
    ("asked", "divisions", "counted"),
    [
        (1200 * MiB, 4, 1280 * MiB),
        (1200 * MiB, 2, 1536 * MiB),
        (1200 * MiB, 1, 1200 * MiB),
        (1024 * MiB, 4, 1024 * MiB),
        (1025 * MiB, 8, 1152 * MiB),
        (3 * MiB + 1, 4, int(3.5 * MiB)),
        (700, 4, 1024),
        (2560, 4, 2560),
        (1, 4, 512),
        (0, 4, 0),
    ],
)
def test_sizes_are_rounded_up_to_a_part_of_the_power_of_two_below(asked, divisions, counted):
    """The documentation's example: 1200 MiB with four divisions lie between 1024 and 2048: 1280."""
    assert rounded(np.array([asked]), (divisions,) * 16)[0] == counted


def test_each_size_has_its_own_divisions():
    divisions = (1,) * 8 + (2, 4) + (8,) * 6
    sizes = np.array([200, 300, 600, 1100]) * MiB
    assert (rounded(sizes, divisions) == np.array([200, 384, 640, 1152]) * MiB).all()


def test_rounding_lets_near_sizes_share_a_segment():
    script = [130 * MiB, -1, 150 * MiB]
    assert usage(script).reserved[-1] == 280 * MiB
    assert usage(script, Options(divisions=(4,) * 16)).reserved[-1] == 160 * MiB


# --- where the driver puts segments


def test_chunks_are_mapped_downwards_and_segments_fill_them_from_the_top():
    device = Addresses()
    first = device.take(500 * MiB)
    second = device.take(600 * MiB)
    assert second < first
    assert device.take(12 * MiB) == first - 12 * MiB  # 512 MiB were mapped for the first: the smallest hole that fits
    assert device.take(8 * MiB) == second - 8 * MiB  # 608 for the second


def test_an_empty_chunk_goes_back_and_its_place_is_taken_again():
    device = Addresses()
    high, low = device.take(512 * MiB), device.take(512 * MiB)
    device.give(high, 512 * MiB)
    assert device.take(480 * MiB) == high + 32 * MiB
    assert device.take(640 * MiB) < low


@pytest.mark.parametrize("seed", range(5))
def test_random_segments_never_overlap_and_all_holes_come_back(seed):
    device, rng, held = Addresses(), random.Random(seed), {}
    start = list(device.holes)
    for _ in range(600):
        if held and rng.random() < 0.5:
            address = rng.choice(list(held))
            device.give(address, held.pop(address))
        else:
            size = rng.choice([2, 20, 20, rng.randrange(10, 700, 2), 32, 64]) * MiB
            held[device.take(size)] = size
        spans = sorted([(a, a + n) for a, n in held.items()] + [(a, a + n) for a, n in device.holes])
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    other, before = device.copy(), (list(device.holes), list(device.starts))
    for address, size in held.items():
        device.give(address, size)
    assert (device.holes, device.starts) == (start, [])
    assert (other.holes, other.starts) == before


# --- whatever happens


ALL = {
    "defaults": DEFAULTS, "expandable": EXPANDABLE, "expandable, card": Options(expandable_segments=True, fraction=False), "split": Options(max_split_bytes=64 * MiB),
    "collect": Options(collect_above=0.6), "expandable and split": Options(expandable_segments=True, max_split_bytes=64 * MiB), "split and collect": Options(max_split_bytes=64 * MiB, collect_above=0.7),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(5))
def test_random_requests_leave_a_sound_state(name, seed):
    options, rng, limit = ALL[name], random.Random(seed), 900 * MiB
    allocator, live = make(options, (limit,)), []
    usual = [rng.randrange(1, 90 * MiB) // 512 * 512 + 512 for _ in range(6)]
    for _ in range(1500):
        chance = rng.random()
        if chance < 0.01:
            allocator.release()
            assert not any(_releasable(block, options) for _, _, block in _free(allocator))
        elif live and chance < 0.5:
            allocator.free(live.pop(rng.randrange(len(live))))
        else:
            size = rng.choice([rng.randrange(1, 9) * 512, rng.randrange(1, 2048) * 512, rng.randrange(1, 20000) * 512, *usual])
            before = allocator.reserved
            block = allocator.allocate(size, rng.choice([0, 0, 0, 1]))
            if block is None:
                assert before + size > limit - 20 * MiB or allocator.reserved + size > limit
                continue
            assert block[SIZE] >= size
            live.append(block)
    _check(allocator, live, options)
    for block in live:
        allocator.free(block)
    _check(allocator, [], options)
    allocator.release()
    assert allocator.reserved == 0
    assert not _free(allocator)


def _free(allocator):
    return [entry for pool in allocator.pools.values() for entry in pool]


def _releasable(block, options):
    if not options.expandable_segments:
        return block[BEFORE] is None and block[AFTER] is None
    page = (20, 2)[block[POOL] & 1] * MiB
    return -(-block[ADDRESS] // page) * page + page <= block[ADDRESS] + block[SIZE]


def _check(allocator, live, options):
    """Chains are whole and do not overlap, free neighbours are one, what is reserved is what the blocks cover."""
    blocks = {id(block): block for block in (*live, *(entry[2] for entry in _free(allocator)))}
    for size, address, block in _free(allocator):
        assert (size, address) == (block[SIZE], block[ADDRESS])
        assert block[FREE]
    covered = 0
    for block in blocks.values():
        covered += block[SIZE]
        after = block[AFTER]
        if after is not None:
            assert after[BEFORE] is block
            assert after[ADDRESS] == block[ADDRESS] + block[SIZE]
            assert not (block[FREE] and after[FREE])
            assert id(after) in blocks or after[SEGMENT] == GAP
    assert covered == allocator.reserved
    if not options.expandable_segments:
        assert allocator.reserved <= allocator.limits[-1]
        spans = sorted((block[ADDRESS], block[ADDRESS] + block[SIZE]) for block in blocks.values())
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    else:
        for key, gaps in allocator.gaps.items():
            page = (20, 2)[key & 1] * MiB
            assert all(gap[ADDRESS] % page == 0 and gap[SEGMENT] == GAP for _, gap in gaps)
            assert all(gap[AFTER] is None or gap[AFTER][SEGMENT] != GAP for _, gap in gaps)


@pytest.mark.parametrize("options", ALL.values(), ids=ALL)
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
        assert together[limit].flushes == alone.flushes
        assert (together[limit].failure and vars(together[limit].failure)) == (alone.failure and vars(alone.failure))
    assert len({id(usage) for usage in together.values()}) > 3
