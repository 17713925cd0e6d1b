"""A node's memory that ran out: what is said of it, and changes that spare it and not the GPU's."""

from __future__ import annotations

from functools import cache

import pytest

from explorer.advice import doctor
from explorer.advice.check import report
from explorer.estimator.estimate import estimate
from explorer.estimator.host import PARTS
from explorer.setup import Setup
from explorer.ui import doctor_html
from explorer.units import GiB, human

KILLED = "[INFO] [launch.py:319:sigkill_handler] Killing subprocess 4242\nsubprocess.CalledProcessError: exits with return code = -9\n"
UNLOCKED = "RuntimeError: CUDA error: out of memory\n  File \"stage_1_and_2.py\", in __init__: get_accelerator().pin_memory(self.single_partition_of_fp32_groups[i])\n"


def job(stage: int, zero: dict | None = None, **more) -> Setup:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **(zero or {})}}
    return Setup(**{"model": "meta-llama/Llama-3.2-3B", "micro_batch": 1, "sequence": 512, "gpu": "A100-80GB", "world_size": 8, "deepspeed": config, **more})


OFFLOADED = job(2, {"offload_optimizer": {"device": "cpu", "pin_memory": True}})
BOTH = job(3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, model="meta-llama/Llama-2-7b-hf", gpu="A100-40GB", world_size=2, host_ram_gib=128)


@cache
def consulted(setup: Setup, text: str = KILLED):
    return doctor(text, setup)


def per_node(fix) -> int:
    return fix.profile.host.per_node_bytes


@pytest.mark.parametrize("text", [KILLED, UNLOCKED], ids=["killed", "not locked"])
def test_what_gives_host_memory_back_comes_first_and_what_takes_more_last(text):
    found = consulted(OFFLOADED, text)
    before = found.profile.host.per_node_bytes
    assert found.message.is_host and {f.scarce for f in found.fixes} == {"host"}
    solving = [f for f in found.fixes if f.solves]
    assert {"no-offload", "unpinned-offload"} <= {f.id for f in solving}
    assert [per_node(f) for f in solving] == sorted(per_node(f) for f in solving) and per_node(solving[-1]) < before
    assert list(found.fixes[: len(solving)]) == solving and found.best is solving[0]
    raising = [f for f in found.fixes if per_node(f) > before]
    assert "stage-3-offload" in {f.id for f in raising}
    assert all(f.text.startswith(f"Does not help: host memory ran out, and this takes {human(per_node(f) - before)} more of it per node") for f in raising)


def test_without_offload_the_host_holds_what_the_libraries_take():
    """8 processes of CUDA's and NCCL's libraries and kernels, and nothing of DeepSpeed's. A Llama has 26 kinds of layer with one sample."""
    fix = next(f for f in consulted(OFFLOADED).fixes if f.id == "no-offload")
    assert fix.change == {"deepspeed": {"zero_optimization": {"offload_optimizer": None}}}
    one = sum(PARTS[name] for name in ("cuda", "nccl", "fused attention")) + 26 * PARTS["layer kind"] + round(PARTS["flat partitions"] * (1 - 26 / 60))
    assert per_node(fix) == 8 * one and fix.profile.host == estimate(fix.setup, largest=False).host


def test_old_keys_are_taken_out_too():
    old = job(2, {"cpu_offload": True})
    fix = next(f for f in consulted(old).fixes if f.id == "no-offload")
    assert "cpu_offload" not in fix.setup.deepspeed["zero_optimization"] and fix.saved_host_bytes > 0


def test_the_cause_has_the_estimates_numbers_and_asks_for_the_nodes():
    said = {r.id: r for r in consulted(OFFLOADED).remarks}
    host = consulted(OFFLOADED).profile.host
    assert said["host-estimate"].severity == "cause"
    for part in (human(host.peak_bytes), f"the 8 of one node {human(host.per_node_bytes)}", "give host_ram_gib"):
        assert part in said["host-estimate"].text
    assert "scheduler" in said["host-killed"].text and "person's kill" in said["host-killed"].text


def test_a_node_that_would_hold_the_step_sends_elsewhere():
    said = {r.id: r.text for r in consulted(OFFLOADED.replace(host_ram_gib=512)).remarks}
    assert "512 GiB would hold what the step takes" in said["host-estimate"] and "give host_ram_gib" not in said["host-estimate"]
    bare = {r.id: r.text for r in consulted(job(2)).remarks}
    assert "Nothing is offloaded" in bare["host-estimate"]


def test_what_a_known_node_holds():
    """Two processes of Llama-2-7b with all states on the host take 154 GiB: 128 GiB hold them without the weights, and no GPU of 40 GB the optimizer."""
    found = {f.id: f for f in consulted(BOTH).fixes}
    assert found["no-offload-param"].solves and per_node(found["no-offload-param"]) < 128 * GiB
    assert found["no-offload-optimizer"].answer == "does not fit" and found["no-offload-optimizer"].text.startswith("Does not help alone")
    assert found["unpinned-offload"].helps and not found["unpinned-offload"].solves and "the node's 128 GiB would not hold" in found["unpinned-offload"].text


def test_room_on_the_gpu_is_made_for_what_lay_on_the_host():
    """On 24 GB the optimizer's states fit only beside checkpointed activations."""
    crowded = OFFLOADED.replace(gpu="RTX 3090", micro_batch=8)
    found = consulted(crowded)
    alone, pair = (next(f for f in found.fixes if f.id == name) for name in ("no-offload", "gradient-checkpointing+no-offload"))
    assert not alone.solves and alone.lowers_host
    assert pair.solves and per_node(pair) == per_node(alone)


def test_the_terminal_says_which_do_not_help():
    lines = report(consulted(OFFLOADED), {}).splitlines()
    assert next(line for line in lines if "stage-3-offload:" in line).startswith("no help ")
    assert next(line for line in lines if " no-offload:" in line).startswith("fits ")


def test_the_page_lists_them_with_what_they_take_of_the_host():
    from explorer.ui.consulting import Consulting
    from explorer.ui.state import ExplorerState

    state = ExplorerState()
    consulting = Consulting(state)
    state.from_setup(OFFLOADED)
    consulting.text = KILLED
    consulting.wait()
    shown = doctor_html.advice(consulting, False)
    assert 'data-fix="no-offload"' in shown and "more host memory a node, which ran out" in shown
    assert "needs less host memory" in doctor_html.heard(consulting)
