"""What a person may change in a job, one function each: Setup in, Setup out, with the DeepSpeed config and the Trainer's arguments kept in agreement. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.dsconfig import resolve
from explorer.estimator.work import with_micro_batch
from explorer.jsonfile import differences
from explorer.setup import Setup

_ZERO = "zero_optimization"


def with_trainer(setup: Setup, **arguments: Any) -> Setup:
    """Some of the Trainer's arguments set, where the job has a trainer part; None removes one."""
    if setup.trainer is None:
        return setup
    trainer = {k: v for k, v in {**setup.trainer, **arguments}.items() if v is not None}
    return setup.replace(trainer=trainer)


def checkpointing(setup: Setup) -> Setup:
    """Every layer's forward once more in the backward (torch's non-reentrant form)."""
    trained = with_trainer(setup, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    return trained.replace(gradient_checkpointing=True) if setup.trainer is None else Setup.from_job({**trained.to_job(), "gradient_checkpointing": {"use_reentrant": False}})


def no_checkpointing(setup: Setup) -> Setup:
    """Every layer's activations kept until the backward."""
    return with_trainer(setup, gradient_checkpointing=None, gradient_checkpointing_kwargs=None).replace(gradient_checkpointing=False)


def reentrant(setup: Setup) -> Setup:
    """Checkpointing in torch's older form, which detaches nothing that it saves."""
    asked = {"use_reentrant": True}
    return with_trainer(setup, gradient_checkpointing=True, gradient_checkpointing_kwargs=asked).replace(gradient_checkpointing=asked)


def accumulation(setup: Setup, micro_batch: int) -> Setup:
    """A smaller micro-batch, with as many more of them in a step as keep its samples."""
    steps = resolve(setup).gradient_accumulation_steps
    more = steps * setup.micro_batch // micro_batch
    smaller = with_micro_batch(setup, micro_batch).with_deepspeed("gradient_accumulation_steps", more)
    return with_trainer(smaller, gradient_accumulation_steps=more, per_device_train_batch_size=micro_batch)


def stage(setup: Setup, number: int) -> Setup:
    """Another ZeRO stage."""
    return setup.with_deepspeed(f"{_ZERO}.stage", number)


def at_least_stage(setup: Setup, number: int) -> Setup:
    """That ZeRO stage where the job has a lower one."""
    return setup if resolve(setup).stage >= number else stage(setup, number)


def offload(setup: Setup, *parts: str) -> Setup:
    """Parts ("optimizer", "param") to host memory."""
    now = resolve(setup)
    there = {"optimizer": now.offload_optimizer, "param": now.offload_param}
    for part in parts:
        if there[part] is None:
            setup = setup.with_deepspeed(f"{_ZERO}.offload_{part}", {"device": "cpu", "pin_memory": True})
    return setup


def offload_to_nvme(setup: Setup) -> Setup:
    """The optimizer's masters and states to a disk, at stage 3; its folder is the person's to name."""
    return setup.with_deepspeed(f"{_ZERO}.offload_optimizer", {"device": "nvme", "pin_memory": True})


_OLD_OFFLOADS = {"optimizer": "cpu_offload", "param": "cpu_offload_param"}


def onto_gpu(setup: Setup, *parts: str) -> Setup:
    """Parts back from host memory."""
    for key in (key for part in parts for key in (f"offload_{part}", _OLD_OFFLOADS[part])):
        setup = setup.with_deepspeed(f"{_ZERO}.{key}", None)
    return setup


def unpinned(setup: Setup, *parts: str) -> Setup:
    """Parts in host memory that the system may page, and that no power of two rounds up."""
    for part in parts:
        written = setup.deepspeed[_ZERO].get(f"offload_{part}") or {"device": "cpu"}
        setup = onto_gpu(setup, part).with_deepspeed(f"{_ZERO}.offload_{part}", {**written, "pin_memory": False})
    return setup


def buckets(setup: Setup, elements: int) -> Setup:
    """A smaller reduce bucket, and one of it only."""
    return setup.with_deepspeed(f"{_ZERO}.reduce_bucket_size", elements).with_deepspeed(f"{_ZERO}.overlap_comm", False)


def reduce_bucket(setup: Setup, elements: int) -> Setup:
    """A smaller reduce bucket."""
    return setup.with_deepspeed(f"{_ZERO}.reduce_bucket_size", elements)


def allgather_bucket(setup: Setup, elements: int) -> Setup:
    """A smaller gather bucket, as older DeepSpeed had one."""
    return setup.with_deepspeed(f"{_ZERO}.allgather_bucket_size", elements)


def live_parameters(setup: Setup, elements: int) -> Setup:
    """Fewer weights gathered ahead at stage 3, and none kept for the next use."""
    return setup.with_deepspeed(f"{_ZERO}.stage3_max_live_parameters", elements).with_deepspeed(f"{_ZERO}.stage3_max_reuse_distance", 0)


def memory_efficient_linear(setup: Setup) -> Setup:
    """DeepSpeed's own linear function at stage 3, which saves no weight: its default."""
    return setup.with_deepspeed(f"{_ZERO}.memory_efficient_linear", True)


def optimizer(setup: Setup, optim: str) -> Setup:
    """The Trainer's `optim`, in the place of the DeepSpeed config's optimizer, whose numbers it takes over; a job without a trainer part gets one that says what the job says."""
    config = {k: v for k, v in setup.deepspeed.items() if k != "optimizer"}
    config.setdefault(_ZERO, {"stage": 0})  # accelerate wants one
    if setup.trainer is not None:
        return setup.replace(deepspeed=config, trainer={**setup.trainer, "optim": optim})
    settings = resolve(setup)
    trainer: dict[str, Any] = {"optim": optim, **_numbers(settings.config.get("optimizer")), "max_grad_norm": settings.gradient_clipping}
    if settings.precision != "fp32":
        trainer[settings.precision] = True
    if setup.gradient_checkpointing is not False:
        asked = setup.gradient_checkpointing
        trainer |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False} if asked is True else {"use_reentrant": True, **asked}}
    return setup.replace(deepspeed=config, trainer=trainer)


def _numbers(section: Mapping[str, Any] | None) -> dict[str, Any]:
    """An optimizer's parameters of the JSON, as arguments."""
    params = (section or {}).get("params") or {}
    found = {argument: params[key] for key, argument in (("lr", "learning_rate"), ("eps", "adam_epsilon"), ("weight_decay", "weight_decay")) if key in params}
    return {**found, **dict(zip(("adam_beta1", "adam_beta2"), params.get("betas", ()), strict=False))}


def precision(setup: Setup, name: str) -> Setup:
    """16-bit weights and activations, over fp32 masters."""
    other = "fp16" if name == "bf16" else "bf16"
    config = {k: v for k, v in setup.deepspeed.items() if k not in (other, "torch_autocast")}
    config[name] = {**(config[name] if isinstance(config.get(name), Mapping) else {}), "enabled": True}
    return with_trainer(setup.replace(deepspeed=config), **{name: True, other: None})


def expandable(setup: Setup) -> Setup:
    """PyTorch's growing segments."""
    return setup.replace(allocator={"expandable_segments": True})


def split(setup: Setup, megabytes: int) -> Setup:
    """PyTorch's older remedy: large blocks are not split."""
    return setup.replace(allocator={**{k: v for k, v in setup.allocator.items() if k != "expandable_segments"}, "max_split_size_mb": megabytes})


def more_gpus(setup: Setup, factor: int) -> Setup:
    """A larger job; the batch of each GPU stays."""
    config = {k: v for k, v in setup.deepspeed.items() if k != "train_batch_size"}
    ranks = None if setup.data_parallel_size is None else setup.data_parallel_size * factor
    return setup.replace(world_size=setup.world_size * factor, data_parallel_size=ranks, deepspeed=config)


def difference(before: Setup, after: Setup) -> dict[str, Any]:
    """The keys of the job file that changed, with their new values; null for one that is gone."""
    found: dict[str, Any] = {}
    for (*above, last), value, _ in differences(after.to_job(), before.to_job()):
        section = found
        for key in above:
            section = section.setdefault(key, {})
        section[last] = value
    return found
