"""Whole weights that stage 3 has gathered and let go, and that autograd keeps all the same. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from explorer.dsconfig import Settings, resolve, versions
from explorer.estimator.estimate import events
from explorer.setup import Setup
from explorer.units import human

Reason = Literal["recomputed", "plain-linear", "transposed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What autograd keeps of them when the job's memory is highest."""

    n_bytes: int
    peak_bytes: int
    reason: Reason
    key: str
    """Of the job file: what decides it."""
    text: str


@lru_cache(maxsize=16)
def kept_weights(setup: Setup) -> Kept | None:
    """What autograd keeps at the allocated peak; None where that is nothing. Raises as `estimate` does."""
    settings = resolve(setup)
    if settings.stage != 3:
        return None
    found = events(setup)
    peak = int(found.usage.allocated.argmax())
    alive = np.zeros(len(found.stream.bytes) + 1, dtype=bool)
    alive[np.abs(found.stream.order[:peak])] = True
    freed = -found.stream.order[:peak]
    alive[freed[freed > 0]] = False
    n_bytes = sum(int(found.usage.sizes[block - 1]) for block, since in found.kept.items() if alive[block] and since <= peak)
    if not n_bytes:
        return None
    reason: Reason = "recomputed" if setup.gradient_checkpointing is not False else "plain-linear" if settings.plain_linear else "transposed"
    key, why = _why(reason, setup, settings)
    highest = int(found.usage.allocated[peak])
    return Kept(n_bytes=n_bytes, peak_bytes=highest, reason=reason, key=key, text=f"At the peak {human(n_bytes)} of {human(highest)} are whole weights that stage 3 has let go and autograd keeps: {why}")


def _why(reason: Reason, setup: Setup, settings: Settings) -> tuple[str, str]:
    """(key, the rest of the sentence): torch/utils/checkpoint.py; runtime/zero/linear.py; transformers/integrations/moe.py."""
    if reason == "recomputed":
        return "gradient_checkpointing", 'checkpointing with "use_reentrant": false detaches what a recomputed layer saves, so its weights live on while they are gathered again for the backward, twice in all. "use_reentrant": true detaches nothing.'
    if reason == "transposed":
        return "gradient_checkpointing", "the experts' weights are transposed before their product, and of a view autograd saves the whole weight, from forward to backward. With gradient checkpointing that is one layer's at a time."
    if not _refused_by_config(settings):
        return "zero_init", f"DeepSpeed {setup.deepspeed_version} puts its own linear function in only under zero.Init, and torch's saves every layer's weight until its backward. Make the TrainingArguments before the model, or take DeepSpeed {versions.BEHAVIOURS['plain-linear'].before} or later."
    return "zero_optimization.memory_efficient_linear", "with memory_efficient_linear false torch's own linear function saves every layer's weight until its backward. Leave that key out."


def _refused_by_config(settings: Settings) -> bool:
    return settings.config["zero_optimization"].get("memory_efficient_linear") is False
