"""The parameters of every optimizer that DeepSpeed's JSON may name, as its class takes them: any other ends in a TypeError as the engine is made. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.errors import BadInput, nearest, shown

_LOOP = "foreach maximize differentiable"
TAKEN: dict[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in {
    "FusedAdam": "lr bias_correction betas eps weight_decay amsgrad set_grad_none",
    "DeepSpeedCPUAdam": "lr bias_correction betas eps weight_decay amsgrad",
    "FusedLion": "lr betas weight_decay set_grad_none",
    "DeepSpeedCPULion": "lr betas weight_decay fp32_optimizer_states",
    "DeepSpeedCPUAdagrad": "lr eps weight_decay amsgrad fp32_optimizer_states",
    "FusedLamb": "lr bias_correction betas eps eps_inside_sqrt weight_decay max_coeff min_coeff amsgrad",
    "torch.optim.Adam": f"lr betas eps weight_decay amsgrad capturable fused decoupled_weight_decay {_LOOP}",
    "torch.optim.AdamW": f"lr betas eps weight_decay amsgrad capturable fused {_LOOP}",
    "torch.optim.SGD": f"lr momentum dampening weight_decay nesterov fused {_LOOP}",
    "torch.optim.Adagrad": f"lr lr_decay weight_decay initial_accumulator_value eps fused {_LOOP}",
    "torch.optim.RMSprop": f"lr alpha eps weight_decay momentum centered capturable {_LOOP}",
    "torch.optim.NAdam": f"lr betas eps weight_decay momentum_decay decoupled_weight_decay capturable {_LOOP}",
    "torch.optim.RAdam": f"lr betas eps weight_decay decoupled_weight_decay capturable {_LOOP}",
    "torch.optim.Adamax": f"lr betas eps weight_decay capturable {_LOOP}",
    "torch.optim.Adadelta": f"lr rho eps weight_decay capturable {_LOOP}",
    "torch.optim.ASGD": f"lr lambd alpha t0 weight_decay capturable {_LOOP}",
    "torch.optim.Rprop": f"lr etas step_sizes capturable {_LOOP}",
    "torch.optim.Adafactor": "lr beta2_decay eps d weight_decay foreach maximize",
}.items()}
"""Implementation → its parameters, but for those that DeepSpeed gives it itself."""
OF_ADAM = frozenset(("torch_adam", "adam_w_mode", "fp32_optimizer_states"))
"""Taken out of Adam's and AdamW's by the engine (`_configure_basic_optimizer`)."""


def check_parameters(params: Mapping[str, Any], implementation: str, path: str, *, adam: bool) -> None:
    """Raises BadInput naming a parameter that the class does not have, or a number that is none."""
    taken = TAKEN[implementation] | (OF_ADAM if adam else frozenset())
    for key, value in params.items():
        if key not in taken:
            raise BadInput(f"{path}.{key}", f"is not a parameter of {implementation}, which DeepSpeed makes here{nearest(key, taken) or '; leave it out'}")
        if key in ("lr", "weight_decay", "momentum") and not _number(value):
            raise BadInput(f"{path}.{key}", f"is {shown(value)}; give a number, without quotes")
        if key == "betas" and not (isinstance(value, list) and len(value) == 2 and all(map(_number, value))):
            raise BadInput(f"{path}.{key}", f"is {shown(value)}; give two numbers, such as [0.9, 0.999]")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
