"""No consultation contradicts itself or the message: some of the pairs of `python -m benchmarks.contradictions`, and the kinds that were found by it."""

from __future__ import annotations

import pytest

from benchmarks.contradictions.pairs import JOBS, pair
from benchmarks.contradictions.rules import contradictions
from explorer.advice import doctor
from explorer.advice.fixes import propose
from explorer.estimator.estimate import estimate
from explorer.setup import Setup


@pytest.mark.parametrize("job", range(0, JOBS, 5))
def test_pairs(job: int) -> None:
    for number in range(job, 8 * JOBS, JOBS):
        chosen = pair(number)
        assert contradictions(doctor(chosen.text, chosen.setup)) == [], f"pair {number}"


LLAMA = Setup(model="meta-llama/Llama-2-7b-hf", micro_batch=1, sequence=1024, gpu="A100-40GB", world_size=8, deepspeed={"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})


@pytest.mark.parametrize("ram", [60, 100, 120])
def test_no_fix_fits_that_the_node_cannot_hold(ram: int) -> None:
    setup = LLAMA.replace(host_ram_gib=ram, micro_batch=8)
    found = {f.id: f for f in propose(setup, estimate(setup, largest=False))}
    fix = found["stage-3-offload"]
    assert fix.profile.host.per_node_bytes > ram * 2**30
    assert fix.to_json()["verdict"] == "does not fit" and not fix.solves
    assert f"but the node's {ram} GiB would not hold the" in fix.text


IN_USE = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 39.39 GiB of which 20.00 MiB is free. Including non-PyTorch memory, this process has 39.37 GiB memory in use. "
    "Of the allocated memory {allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(("setup", "allocated", "cached"), [
    (LLAMA.replace(deepspeed={"bf16": {"enabled": True}}), "35.01 GiB", "3.80 GiB"),
    (LLAMA.replace(micro_batch=16), "30.01 GiB", "8.80 GiB"),
    (LLAMA.replace(world_size=1), "36.01 GiB", "2.80 GiB"),
], ids=["stage 0", "a batch of 16", "one GPU"])
def test_an_option_of_the_allocator_is_advised_only_where_the_job_then_fits(setup: Setup, allocated: str, cached: str) -> None:
    found = doctor(IN_USE.format(asked="128.00 MiB", allocated=allocated, cached=cached), setup)
    assert estimate(setup.replace(allocator={"expandable_segments": True}), largest=False).verdict.answer == "does not fit"
    remark = next(r for r in found.remarks if r.id == "fragmentation")
    assert "may let it through" not in remark.text and "That is no way out: by the estimate this job" in remark.text
    assert not any(f.solves for f in found.fixes if f.id == "expandable-segments")


@pytest.mark.parametrize("text", [
    "[INFO] [launch.py:316:sigkill_handler] Killing subprocess 4021\nexits with return code = -9",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory: you tried to allocate 13421772800 bytes.",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x1024 and 768x768)",
])
def test_the_gpu_is_no_cause_where_another_memory_or_none_ran_out(text: str) -> None:
    found = doctor(text, LLAMA.replace(micro_batch=16))
    assert found.profile.verdict.answer == "does not fit"
    causes = [r.id for r in found.remarks if r.severity == "cause"]
    assert causes and not any(name.startswith(("dominant", "offload", "states")) for name in causes)
