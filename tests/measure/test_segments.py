"""Block sizes from a trace: read to the byte, whatever was split, merged, deferred, given back or mapped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from explorer.estimator.allocator import ADDRESS, POOL, SIZE, Options, rounded
from explorer.estimator.expandable import make
from explorer.measure import segments
from explorer.units import KiB, MiB

BASE = 0x7F00_0000_0000


def entry(action: str, address: int, size: int, stream: int = 0) -> dict[str, Any]:
    """As PyTorch writes it."""
    return {"action": action, "addr": BASE + address, "size": size, "stream": stream}


def taken(*trace: dict[str, Any], before: tuple[dict[str, Any], ...] = (), options: Options | None = None) -> list[int]:
    """The block of each allocation."""
    return [event.block for event in segments.read(trace, before, options or Options()) if event.size > 0]


def test_a_request_is_rounded_and_the_rest_of_its_segment_kept():
    assert taken(entry("segment_alloc", 0, 2 * MiB), entry("alloc", 0, 1), entry("alloc", 512, 513), entry("alloc", 1536, 512)) == [512, 1024, 512]


def test_a_rest_of_a_mebibyte_or_less_stays_with_a_large_block():
    assert taken(entry("segment_alloc", 0, 20 * MiB), entry("alloc", 0, 19 * MiB)) == [20 * MiB]
    assert taken(entry("segment_alloc", 0, 20 * MiB), entry("alloc", 0, 19 * MiB - 512)) == [19 * MiB - 512]
    assert taken(entry("segment_map", 0, 20 * MiB), entry("alloc", 0, 20 * MiB - 512), options=Options(expandable_segments=True)) == [20 * MiB - 512]


def test_neighbours_merge_once_their_frees_are_completed():
    first, second = entry("alloc", 0, 4 * MiB), entry("alloc", 4 * MiB, 4 * MiB)
    freed = [entry(action, address, 4 * MiB) for address in (0, 4 * MiB) for action in ("free_requested", "free_completed")]
    whole = entry("alloc", 0, 19 * MiB + 512)
    assert taken(entry("segment_alloc", 0, 20 * MiB), first, second, *freed, whole)[-1] == 20 * MiB
    assert taken(entry("segment_alloc", 0, 20 * MiB), first, second, *freed[:3], entry("alloc", 0, 3 * MiB + 512))[-1] == 4 * MiB


def test_segments_that_touch_stay_apart():
    trace = [entry("segment_alloc", 0, 20 * MiB), entry("segment_alloc", 20 * MiB, 20 * MiB), entry("alloc", 0, 19 * MiB + 512)]
    assert taken(*trace)[-1] == 20 * MiB
    regained = [entry("segment_free", 0, 20 * MiB), entry("segment_free", 20 * MiB, 20 * MiB), entry("segment_alloc", 0, 40 * MiB), entry("alloc", 0, 39 * MiB + 512)]
    assert taken(*trace[:2], *regained) == [40 * MiB]


def test_what_was_there_before_the_trace():
    block = [{"size": 12 * MiB, "state": "active_allocated"}, {"size": 8 * MiB, "state": "inactive"}]
    held = {"address": BASE, "total_size": 20 * MiB, "is_expandable": False, "blocks": block}
    assert taken(entry("alloc", 12 * MiB, 7 * MiB + 512), before=(held,)) == [8 * MiB]
    assert taken(entry("free_requested", 0, 11 * MiB), entry("free_completed", 0, 11 * MiB), entry("alloc", 0, 19 * MiB + 512), before=(held,)) == [20 * MiB]


def test_pages_given_back_from_within_a_free_block():
    expandable = Options(expandable_segments=True)
    begun = [entry("segment_map", 0, 10 * MiB), entry("alloc", 0, MiB + 512), entry("segment_unmap", 2 * MiB, 8 * MiB)]
    assert taken(*begun, entry("segment_map", 2 * MiB, 2 * MiB), entry("alloc", MiB + 512, 3 * MiB - 512), options=expandable)[-1] == 3 * MiB - 512


def test_memory_is_asked_for_until_its_free_is_completed():
    trace = [entry("alloc", 0, 100), entry("free_requested", 0, 100), entry("alloc", 512, 50), entry("free_completed", 0, 100), entry("alloc", 0, 70)]
    assert segments.requested_peak(trace) == 150
    assert [event.size for event in segments.read(trace, (), Options())] == [100, -100, 50, 70]


@pytest.mark.parametrize(("settings", "options"), [
    ({"max_split_size": -1, "expandable_segments": False}, Options()),
    ({"max_split_size": 40 * MiB, "expandable_segments": False}, Options(max_split_bytes=40 * MiB)),
    ({"max_split_size": -1, "expandable_segments": True}, Options(expandable_segments=True)),
    ({"max_split_size": -1, "roundup_power2_divisions": {"1": 2, "4": 8, "2": 4}}, Options(divisions=(2, 4, 8))),
])
def test_the_allocators_options_are_its_own(settings, options):
    """PyTorch writes no limit as −1."""
    assert segments.options({"allocator_settings": settings}) == options


def test_an_oom_entry_has_no_address():
    assert taken({"action": "oom", "device_free": 0, "size": 1, "stream": 0}, entry("segment_alloc", 0, 2 * MiB), entry("alloc", 0, 512)) == [512]


# --- random runs


class Machine:
    """The allocator's own model writes a trace: its segments laid side by side, as cudaMalloc may."""

    def __init__(self, options: Options, rng: random.Random) -> None:
        self.allocator, self.rng = make(options), rng
        self.device = Device(self, rng)
        self.allocator.addresses = self.device
        self.trace: list[dict[str, Any]] = []
        self.expected: list[int] = []
        self.live: list[tuple[list, int]] = []
        self.pending: list[tuple[list, int]] = []
        if options.expandable_segments:
            self.watch_pages()

    def watch_pages(self) -> None:
        """Pages as they are mapped and unmapped: of each pool in a range of its own."""
        plain_map, plain_unmap = self.allocator._map, self.allocator._unmap

        def mapping(gap: list, size: int, key: int) -> list:
            start, before = gap[ADDRESS], self.allocator.reserved
            block = plain_map(gap, size, key)
            self.trace.append(entry("segment_map", self.address(start, key), self.allocator.reserved - before))
            return block

        def unmapping(block: list, key: int) -> None:
            before, page = self.allocator.reserved, (20, 2)[key & 1] * MiB
            first = -(-block[ADDRESS] // page) * page
            plain_unmap(block, key)
            if self.allocator.reserved < before:
                self.trace.append(entry("segment_unmap", self.address(first, key), before - self.allocator.reserved))

        self.allocator._map, self.allocator._unmap = mapping, unmapping

    def address(self, at: int, key: int) -> int:
        return at + (key << 50 if self.allocator.options.expandable_segments else 0)

    def ask(self, requested: int, stream: int) -> None:
        size = int(rounded(np.array([requested]), self.allocator.options.divisions)[0])
        block = self.allocator.allocate(size, stream)
        self.trace.append(entry("alloc", self.address(block[ADDRESS], block[POOL]), requested, stream))
        self.expected.append(block[SIZE])
        self.live.append((block, requested))

    def request_free(self) -> None:
        block, requested = self.live.pop(self.rng.randrange(len(self.live)))
        self.trace.append(entry("free_requested", self.address(block[ADDRESS], block[POOL]), requested))
        self.pending.append((block, requested))
        if self.rng.random() < 0.7:
            self.complete_free(len(self.pending) - 1)

    def complete_free(self, number: int) -> None:
        block, requested = self.pending.pop(number)
        self.trace.append(entry("free_completed", self.address(block[ADDRESS], block[POOL]), requested))
        self.allocator.free(block)

    def release(self) -> None:
        self.allocator.release()


class Device:
    """cudaMalloc anywhere, right before or behind another segment too."""

    def __init__(self, machine: Machine, rng: random.Random) -> None:
        self.machine, self.rng = machine, rng
        self.held: dict[int, int] = {}

    def take(self, size: int) -> int:
        used = sorted((at, at + n) for at, n in self.held.items())
        free = [end for end in (0, *(end for _, end in used)) if all(end + size <= begin or end >= finish for begin, finish in used)]
        address = self.rng.choice(free)
        self.held[address] = size
        self.machine.trace.append(entry("segment_alloc", address, size))
        return address

    def give(self, address: int, size: int) -> None:
        assert self.held.pop(address) == size
        self.machine.trace.append(entry("segment_free", address, size))


def requests(rng: random.Random) -> Iterator[int]:
    """Small, middling and large ones, many of the same size."""
    usual = [rng.randrange(1, 64 * MiB) for _ in range(8)]
    while True:
        yield rng.choice([rng.randrange(1, 4 * KiB), rng.randrange(1, MiB + 1), rng.randrange(MiB + 1, 10 * MiB), rng.randrange(10 * MiB, 90 * MiB), *usual])


@pytest.mark.parametrize("options", [Options(), Options(expandable_segments=True), Options(max_split_bytes=40 * MiB), Options(divisions=(4,) * 16)], ids=["plain", "expandable", "max_split_size", "roundup"])
@pytest.mark.parametrize("seed", range(4))
def test_every_block_of_a_random_run_is_read_to_the_byte(options: Options, seed: int) -> None:
    rng = random.Random(seed)
    machine, sizes = Machine(options, rng), requests(rng)
    for _ in range(800):
        chance = rng.random()
        if chance < 0.005:
            machine.release()
        elif chance < 0.1 and machine.pending:
            machine.complete_free(rng.randrange(len(machine.pending)))
        elif chance < 0.5 and machine.live or len(machine.live) > 60:
            machine.request_free()
        else:
            machine.ask(next(sizes), rng.choice([0, 0, 0, 1]))
    events = segments.read(machine.trace, (), options)
    assert [event.block for event in events if event.size > 0] == machine.expected
    assert any(block - event.size > 100 * KiB for event, block in zip((e for e in events if e.size > 0), machine.expected, strict=True)) == (not options.expandable_segments)
    changes = accumulate(e["size"] if e["action"] == "alloc" else -e["size"] for e in machine.trace if e["action"] in ("alloc", "free_completed"))
    assert segments.requested_peak(machine.trace) == max(changes)
