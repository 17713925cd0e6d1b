"""What each block is called: by what the engine holds at a mark, where the address has been something else before and after."""

from __future__ import annotations

import json

import pytest

from explorer.measure import history
from explorer.measure.history import Event, Mark
from explorer.measure.runner import probe
from tests.measure.jobs import LLAMA, job

REDUCES, GATHERS = 7, 8
"""Streams."""


def named(events: list[Event], marks: list[Mark], gathers=()) -> list[str]:
    """Categories of the blocks, in order."""
    found = history.blocks(events)
    history.name_blocks(found, marks, len(events), None, gathers)
    return found.category


def mark(position: int, label: str = "", **owners: str) -> Mark:
    """Addresses as a1, a2, ... ."""
    return Mark(label, {int(name[1:]): category for name, category in owners.items()}, position)


def test_a_name_ends_with_its_block():
    events = [Event(5, 1, block=5), Event(-5, 1), Event(5, 1, block=5), Event(-5, 1)]
    assert named(events, [mark(1, a1="gathered")]) == ["gathered", "temporary"]
    assert named(events, [mark(3, a1="gathered")]) == ["temporary", "gathered"]
    assert named(events, [mark(2, a1="gathered")]) == ["temporary", "temporary"]  # nothing lives there then


def test_the_first_name_stays():
    events = [Event(5, 1, block=5)]
    assert named(events, [mark(1, a1="gradients"), mark(1, a1="comm_buffers")]) == ["gradients"]


def test_only_the_stream_that_gathers_makes_gathered_parameters():
    """The input of a reduce-scatter is made on another stream of DeepSpeed's, here where a parameter was before."""
    events = [Event(9, 1, GATHERS, 9), Event(-9, 1, GATHERS), Event(9, 1, REDUCES, 9), Event(4, 2, GATHERS, 4)]
    assert named(events, [mark(1, a1="gathered")], {GATHERS}) == ["gathered", "temporary", "gathered"]


def test_a_forward_keeps_what_it_made_but_not_what_it_gathered():
    marks = [mark(0, "forward begins"), mark(3, "forward ends")]
    events = [Event(9, 1, block=9), Event(9, 2, GATHERS, 9), Event(9, 3, block=9), Event(-9, 1), Event(-9, 2, GATHERS)]
    assert named(events, marks, {GATHERS}) == ["activations", "gathered", "temporary"]  # the last is never freed: a workspace


def test_a_marks_own_block_is_seen_but_not_counted():
    marks = [mark(-1), mark(-1)]
    size = history.mark_size(0)
    written = [Event(100, 1, block=512), Event(size, 2, block=10_240), Event(-size, 2), Event(700, 3, block=1024)]
    events = history.place(written, marks)
    found = history.blocks(events)
    assert (marks[0].position, marks[0].block, marks[1].position) == (1, 10_240, -1)
    assert history.level(found, 0, 2).tolist() == [0, 512, 1536]
    assert history.highest(found, 0, 2) == 2
    assert history.highest_with_marks(found, marks, 0, 2) == 512 + 10_240


# --- real engines


@pytest.mark.usefixtures("needs_extra")
def test_what_the_backward_gathers_is_called_gathered():
    """Stage 3 that keeps nothing gathered that it need not: the backward gathers all again, at addresses that were something else."""
    plain = job(LLAMA, 3, world_size=8).to_job()
    config = json.loads(json.dumps(plain["deepspeed"]))
    config["zero_optimization"] |= dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), 0)
    measured = probe({**plain, "deepspeed": config, "micro_batch": 1, "sequence": 16}, save=False)
    head = 2 * LLAMA["vocab_size"] * LLAMA["hidden_size"]
    assert [measured.phase(step, "backward").at_peak["gathered"] for step in ("first", "steady")] == [head, head]
