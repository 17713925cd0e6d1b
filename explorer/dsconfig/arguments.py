"""Arguments of the Trainer that change memory beside the optimizer's and the "auto" values: agreed with the job, refused, or not modelled. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.dsconfig.findings import Finding
from explorer.errors import BadInput

_NOT_MODELLED = {
    "torch_compile": "compiled code keeps and frees other tensors than the model's own",
    "use_liger_kernel": "Liger's kernels keep other activations, and no logits",
    "neftune_noise_alpha": "the noise added to the embeddings is not counted",
    "label_smoothing_factor": "the Trainer then computes the loss from the logits itself, with tensors of their size that are not counted",
    "torch_empty_cache_steps": "the cache is emptied between forward and backward, so that less stays reserved than is said",
    "parallelism_config": "splits the model or its batch over further groups of GPUs",
}


def not_modelled(trainer: Mapping[str, Any] | None, checkpointing: bool | Mapping[str, Any]) -> list[Finding]:
    """What the Trainer would do that the estimate does not follow. Raises BadInput where it would refuse, or where the job says otherwise."""
    if trainer is None:
        return []
    if trainer.get("fsdp"):
        raise BadInput("trainer.fsdp", "cannot be combined with DeepSpeed, says the Trainer; leave it out")
    if trainer.get("gradient_checkpointing") and checkpointing is False:
        raise BadInput("gradient_checkpointing", "is false but trainer.gradient_checkpointing is true; make them agree")
    return [Finding(id="argument-not-modelled", key=f"trainer.{name}", text=text) for name, text in _NOT_MODELLED.items() if trainer.get(name)]
