"""Each wrapper's rules against DeepSpeed's own allocations, in bytes per trainable parameter.

The figures were read off DeepSpeed 0.19.8's real code: sixteen equal layers without activations, every tensor traced
(init peak/end, backward peak/end, step peak, of a steady step).
"""

from __future__ import annotations

import pytest

from explorer.dsconfig import resolve
from explorer.estimator.replay import wrapper
from explorer.estimator.rules.base import Job
from explorer.estimator.stream import Writer
from explorer.estimator.tape import Parameter
from explorer.setup import Setup

LAYERS, EACH = 16, 1 << 20
P = LAYERS * EACH


def run(config: dict, world_size: int = 1, rank: int = 0, accumulation: int = 1) -> dict[str, tuple[float, float]]:
    """Phase → (peak, end) in bytes per parameter, of init and of the second step."""
    config = {"gradient_accumulation_steps": accumulation, **config}
    config["zero_optimization"] = {"reduce_bucket_size": EACH, **config.get("zero_optimization", {})}
    setup = Setup(model="linear", micro_batch=1, world_size=world_size, rank=rank, deepspeed=config)
    settings = resolve(setup)
    job = Job(settings=settings, parameters=tuple(Parameter(f"{i}", EACH, True) for i in range(LAYERS)), buffers_bytes=0, modules=(), direct=())
    writer = Writer()
    rules = wrapper(settings)(job, writer)
    readings = {}

    def read(name: str, start: int) -> None:
        live = peak = 0
        for i, event in enumerate(writer.order):
            live += writer.bytes[event - 1] if event > 0 else -writer.bytes[-event - 1]
            peak = max(peak, live) if i >= start else live
        readings[name] = (peak / P, live / P)

    rules.init()
    read("init", 0)
    for _ in range(2):
        for micro in range(accumulation):
            start = len(writer.order)
            rules.before_micro(micro)
            for i in reversed(range(LAYERS)):
                rules.gradient(i, writer.allocate(settings.model_bytes * EACH, "gradients", f"{i}"))
            rules.after_backward()
            read(f"backward {micro}", start)
        start = len(writer.order)
        rules.step()
        read("step", start)
    return readings


BF16, FP16, FP32 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}, {}
FUSED = {"optimizer": {"type": "AdamW", "params": {}}}
FOREACH = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}

TABLE = [
    # name, config, stage, N, init peak, init end, backward peak, step peak
    ("stage 0 bf16 FusedAdam", {**BF16, **FUSED}, 0, 1, 18, 14, 18.0, 24.0),
    ("stage 0 bf16 torch foreach", {**BF16, **FOREACH}, 0, 1, 24, 14, 18.0, 24.0),
    ("stage 0 fp32", {**FP32, **FUSED}, 0, 1, 4, 4, 20.0, 16.0),
    ("stage 1 bf16", {**BF16, **FUSED}, 1, 1, 10, 6, 18.0, 22.0),
    ("stage 1 bf16 of 8", {**BF16, **FUSED}, 1, 8, 4, 2.5, 5.75, 4.50),
    ("stage 1 fp32 of 8", {**FP32, **FUSED}, 1, 8, 8, 4.5, 10.0, 6.50),
    ("stage 2 bf16 FusedAdam", {**BF16, **FUSED}, 2, 1, 10, 6, 16.2, 22.0),
    ("stage 2 bf16 torch foreach", {**BF16, **FOREACH}, 2, 1, 10, 6, 16.2, 22.0),
    ("stage 2 bf16 of 8", {**BF16, **FUSED}, 2, 8, 4, 2.5, 4.0, 4.50),
    ("stage 2 fp32", {**FP32, **FUSED}, 2, 1, 12, 8, 20.5, 24.0),
    ("stage 2 fp32 of 8", {**FP32, **FUSED}, 2, 8, 8, 4.5, 6.5, 6.50),
    ("stage 3 bf16 FusedAdam", {**BF16, **FUSED}, 3, 1, 10, 8, 16.3, 22.0),
    ("stage 3 bf16 torch foreach", {**BF16, **FOREACH}, 3, 1, 10, 8, 16.3, 24.0),
    ("stage 3 fp32", {**FP32, **FUSED}, 3, 1, 12.25, 12.25, 20.5, 24.0),
]


@pytest.mark.parametrize(("name", "config", "stage", "world_size", "init_peak", "init_end", "backward", "step"), TABLE, ids=[row[0] for row in TABLE])
def test_table(name, config, stage, world_size, init_peak, init_end, backward, step):
    got = run({**config, "zero_optimization": {"stage": stage}}, world_size)
    assert got["init"][0] == pytest.approx(init_peak, abs=0.26)
    assert got["init"][1] == pytest.approx(init_end, abs=0.26)
    assert got["backward 0"][0] == pytest.approx(backward, abs=0.26)
    assert got["step"][0] == pytest.approx(step, abs=0.26)


def test_accumulation_keeps_a_second_set_of_gradients():
    got = run({**BF16, **FUSED, "zero_optimization": {"stage": 2}}, accumulation=3)
    assert got["backward 0"][0] == pytest.approx(16.3, abs=0.2)
    assert got["backward 1"][0] == pytest.approx(18.3, abs=0.2)
    assert got["step"][0] == pytest.approx(22.0, abs=0.1)


def test_overlap_takes_a_second_bucket():
    one = run({**BF16, **FUSED, "zero_optimization": {"stage": 2, "reduce_bucket_size": P}}, 8)
    two = run({**BF16, **FUSED, "zero_optimization": {"stage": 2, "reduce_bucket_size": P, "overlap_comm": True}}, 8)
    assert two["backward 0"][0] - one["backward 0"][0] == pytest.approx(2.0)


def test_the_last_rank_pays_for_its_gradients_at_the_most_activations():
    """It owns the last layers, whose gradients come first."""
    config = {**BF16, **FUSED, "zero_optimization": {"stage": 2}}
    assert run(config, 8, 7)["backward 0"][0] > run(config, 8, 0)["backward 0"][0] - 1e-9


def test_offload_leaves_the_parameters_and_one_buffer():
    got = run({**BF16, **FUSED, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    assert got["init"][1] == pytest.approx(2 + 2 / LAYERS)
    assert got["step"][1] == got["init"][1]


def test_offload_counts_pinned_blocks_as_powers_of_two():
    setup = Setup(model="linear", micro_batch=1, deepspeed={**BF16, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    settings = resolve(setup)
    odd = Parameter("odd", 3 << 20, True)
    writer = Writer()
    rules = wrapper(settings)(Job(settings=settings, parameters=(odd,), buffers_bytes=0, modules=(), direct=()), writer)
    rules.init()
    assert rules.host.pinned_bytes == 16 * 2**20 * 2 + 8 * 2**20 * 2
    assert rules.host.pageable_bytes == 8 * odd.numel
