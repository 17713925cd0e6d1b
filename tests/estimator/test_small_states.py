"""bitsandbytes' 8-bit states: what its own classes make, and what that leaves of a job's optimizer memory."""

from __future__ import annotations

import pytest

from explorer.dsconfig import resolve
from explorer.errors import BadInput
from explorer.estimator.estimate import estimate
from explorer.setup import Setup

NOT_SPLIT = 4 << 20
"""What a few of PyTorch's blocks are larger than was asked for: it splits off no rest below 1 MiB."""


def job(optim: str, model: str = "meta-llama/Llama-3.2-1B", stage: int = 2, world_size: int = 8, **more) -> Setup:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    return Setup(model=model, micro_batch=1, world_size=world_size, trainer={"optim": optim, "bf16": True}, deepspeed={**config, **more})


def states(setup: Setup) -> int:
    return estimate(setup, largest=False).phase("steady", "forward").at_peak["optimizer"]


@pytest.mark.parametrize(("optim", "elements", "n_bytes"), [
    ("adamw_bnb_8bit", 4095, (16380, 16380)),  # below min_8bit_size
    ("adamw_bnb_8bit", 4096, (4096, 4096, 64, 64)),
    ("adamw_8bit", 1_000_001, (1_000_001, 1_000_001, 15_628, 15_628)),  # 3907 blocks
    ("lion_8bit", 4096, (4096, 64)),
    ("rmsprop_bnb_8bit", 4096, (4096, 64)),
    ("lion_32bit", 4096, (16384,)),
])
def test_states_of_one_master(optim, elements, n_bytes):
    assert resolve(job(optim)).optimizer.state_bytes(elements) == n_bytes


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "lion_8bit", "rmsprop_bnb_8bit", "lion_32bit"])
def test_states_are_those_of_bitsandbytes_own_classes(optim):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch = pytest.importorskip("torch")
    ours = resolve(job(optim)).optimizer
    for elements in (100, 4096, 1_000_001):
        master = torch.nn.Parameter(torch.zeros(elements))
        theirs = getattr(bitsandbytes.optim, ours.implementation.rpartition(".")[2])([master], optim_bits=ours.state_bits)
        theirs.init_state(theirs.param_groups[0], master, 0, 0)
        made = theirs.state[master]
        assert tuple(made[k].nbytes for k in ("state1", "state2", "absmax1", "absmax2") if k in made) == ours.state_bytes(elements)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_bytes_an_element_stay_of_eight(stage):
    """Two moments of 4 bytes become two of 1 and their maxima, 4 / 256 each; the masters stay, and so does all else."""
    setup = job("adamw_torch", stage=stage)
    own = estimate(setup, largest=False).trainable_parameters / 8
    assert states(setup) - states(job("adamw_bnb_8bit", stage=stage)) == pytest.approx(own * (8 - 2 - 2 * 4 / 256), abs=NOT_SPLIT)


def test_paged_states_are_a_bound():
    texts = [f.text for f in resolve(job("paged_adamw_8bit")).not_modelled]
    assert len(texts) == 1 and "managed memory" in texts[0] and "at most" in texts[0]
    assert states(job("paged_adamw_8bit")) == states(job("adamw_bnb_8bit"))


def test_without_masters_the_trainer_keeps_embeddings_in_fp32():
    """`register_module_override` finds an embedding by its own tensor; under ZeRO, and over fp32 masters, the optimizer is given others."""
    plain = Setup(model="gpt2", micro_batch=1, trainer={"optim": "adamw_bnb_8bit"}, deepspeed={"zero_optimization": {"stage": 0}})
    assert ["at least" in f.text for f in resolve(plain).not_modelled] == [True]
    assert not resolve(plain.with_deepspeed("zero_optimization.stage", 2)).not_modelled


def test_under_offload_accelerate_takes_cpu_adam():
    offloaded = job("adamw_bnb_8bit").with_deepspeed("zero_optimization.offload_optimizer", {"device": "cpu"})
    optimizer = resolve(offloaded).optimizer
    assert (optimizer.implementation, optimizer.state_bits) == ("DeepSpeedCPUAdam", 32)


def test_a_master_that_its_kernels_cannot_count_is_refused():
    """6.7e9 elements in one flat partition; on four GPUs it is 1.7e9, below 2^31."""
    with pytest.raises(BadInput, match="2³¹"):
        estimate(job("adamw_bnb_8bit", "meta-llama/Llama-2-7b-hf", world_size=1), largest=False)
    estimate(job("adamw_bnb_8bit", "meta-llama/Llama-2-7b-hf", world_size=4), largest=False)
    estimate(job("adamw_bnb_8bit", "meta-llama/Llama-2-7b-hf", world_size=1, stage=3), largest=False)  # in sub-groups of 1e9
