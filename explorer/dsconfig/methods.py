"""FSDP and DDP as the nearest ZeRO: what they are called, and the DeepSpeed config that stands for them. No torch.

torch/distributed/fsdp (`ShardingStrategy`), accelerate/utils/dataclasses.py (`FullyShardedDataParallelPlugin`),
transformers/training_args.py (`fsdp`, `fsdp_config`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from explorer.setup import Setup

_STAGES = {
    "FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD_ZERO2": 2, "_HYBRID_SHARD_ZERO2": 2,
    "NO_SHARD": 0,
}
"""Sharding strategy → the ZeRO stage that divides the same."""
_NUMBERED = ("", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""accelerate also takes the strategy's number."""
_WORDS = {"full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "no_shard": "NO_SHARD", "hybrid_shard": "HYBRID_SHARD", "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2"}
_EXACT = {3: "full_shard", 2: "shard_grad_op", 1: "shard_grad_op", 0: "no_shard"}


FILLED = {
    "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
}
"""What the Trainer's arguments fill of a config."""


def strategy(options: Mapping[str, Any]) -> str:
    """The sharding strategy of accelerate's `fsdp_*` options, without regard to case; FULL_SHARD where they name none.

    FSDP2 has `reshard_after_forward`: true frees the gathered weights after the forward (full_shard), false keeps them.
    """
    given = options.get("fsdp_sharding_strategy", options.get("sharding_strategy"))
    if given is None:
        reshard = options.get("fsdp_reshard_after_forward", options.get("reshard_after_forward"))
        if isinstance(reshard, str) and reshard.upper() in _STAGES:
            return reshard.upper()
        return "SHARD_GRAD_OP" if reshard in (False, "false", "False") else "FULL_SHARD"
    if isinstance(given, int) and not isinstance(given, bool) or isinstance(given, str) and given.isdigit():
        number = int(given)
        return _NUMBERED[number] if 0 < number < len(_NUMBERED) else "FULL_SHARD"
    name = str(given).rpartition(".")[2].strip().upper()
    return name if name in _STAGES else "FULL_SHARD"


def words(fsdp: Any) -> list[str]:
    """The Trainer's `fsdp`: "full_shard auto_wrap", or a list of such words; [] where it is off."""
    if fsdp is True:
        return ["full_shard"]
    texts: Iterable[Any] = fsdp if isinstance(fsdp, list | tuple) else [fsdp] if isinstance(fsdp, str) else []
    return [word.lower() for text in texts for word in str(text).replace(",", " ").split()]


def of_words(given: list[str]) -> tuple[str, bool]:
    """(sharding strategy, whether parameters are offloaded) of the Trainer's words."""
    return next((_WORDS[word] for word in given if word in _WORDS), "FULL_SHARD"), "offload" in given


def of_arguments(trainer: Mapping[str, Any]) -> tuple[str, bool] | None:
    """(sharding strategy, whether parameters are offloaded) of the Trainer's `fsdp` and `fsdp_config`; None where FSDP is off."""
    said, options = words(trainer.get("fsdp")), trainer.get("fsdp_config")
    options = options if isinstance(options, Mapping) else {}
    if not said and (trainer.get("fsdp") is not None or not options):
        return None
    name, offload = of_words(said)
    if not _WORDS.keys() & set(said):
        name = strategy(options)
    return name, offload or offloads(options)


def offloads(options: Mapping[str, Any]) -> bool:
    """Whether FSDP's options keep parameters on the host."""
    given = options.get("fsdp_offload_params", options.get("offload_params", options.get("cpu_offload")))
    return str(given).lower() == "true"


def checkpoints(options: Any) -> bool:
    """Whether FSDP's options turn its own activation checkpointing on."""
    given = options.get("fsdp_activation_checkpointing", options.get("activation_checkpointing")) if isinstance(options, Mapping) else None
    return str(given).lower() == "true"


def as_zero(name: str, offload: bool, precision: str | None, filled: bool) -> dict[str, Any]:
    """The DeepSpeed config nearest to a sharding strategy. `precision`: "bf16", "fp16" or None. `filled`: the Trainer's
    arguments are there, which fill what is "auto" here."""
    stage = _STAGES[name]
    zero: dict[str, Any] = {"stage": stage}
    if offload and stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload and stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {"zero_optimization": zero}
    if filled:
        config.update(FILLED)
        zero.update(reduce_bucket_size="auto", **({"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"} if stage == 3 else {}))
    elif precision in ("bf16", "fp16"):
        config[precision] = {"enabled": True}
    return config


def shards_within_node(name: str) -> bool:
    """Whether each node holds the whole model, divided among its own GPUs."""
    return "HYBRID" in name


def sentence(setup: Setup) -> str | None:
    """What stands before everything else in an answer for a job without DeepSpeed; None for one with it."""
    if setup.method == "deepspeed":
        return None
    section = setup.deepspeed.get("zero_optimization")
    stage = section.get("stage", 0) if isinstance(section, Mapping) else 0
    if setup.method == "ddp" and setup.world_size == 1:
        return f"This is DDP of one process, not DeepSpeed: the GPU holds the whole model, and ZeRO stage {stage}, its nearest equivalent, is estimated"
    if setup.method == "ddp":
        return f"This is DDP, not DeepSpeed: every GPU holds the whole model, and ZeRO stage {stage}, its nearest equivalent, is estimated"
    name = _EXACT.get(stage, "full_shard")
    if setup.data_ranks < setup.world_size and stage:
        name = f"hybrid_shard over {setup.data_ranks} GPUs" if stage == 3 else f"hybrid_shard_zero2 over {setup.data_ranks} GPUs"
    offload = " with CPU offload" if isinstance(section, Mapping) and (section.get("offload_param") or section.get("offload_optimizer")) else ""
    return f"This is FSDP, not DeepSpeed: {name}{offload} is estimated as ZeRO stage {stage}{offload}, its nearest equivalent"
