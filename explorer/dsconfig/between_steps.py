"""What a job does between its steps: evaluations and saves, as the Trainer's arguments and the DeepSpeed config ask for them. No torch.

Arguments and their defaults are transformers 5.17.0's (training_args.py; trainer.py, `evaluation_loop`, `save_model`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from explorer.dsconfig.keys import Key, read_bool, read_value
from explorer.dsconfig.settings import Settings
from explorer.setup import Setup

GATHER = "stage3_gather_16bit_weights_on_model_save"
_SAMPLES = 8
"""The Trainer's own per_device_eval_batch_size."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of the model while it trains."""

    samples: int
    """Per GPU and forward."""
    keeps_predictions: bool
    """Whether the logits of every batch are gathered from all GPUs and kept: where metrics are computed from them."""
    batches: int | None
    """Whose logits are together on the GPU at most; None where nobody says."""


@dataclass(frozen=True, slots=True)
class Save:
    """One save of the model while it trains."""

    gathers: bool
    """Stage 3: whether the weights are gathered whole, module by module, for rank 0."""
    clones: bool
    """Below stage 3: whether every rank copies the weights to its host (accelerate's `get_state_dict`)."""


def evaluation(setup: Setup) -> Evaluation | None:
    """The evaluation that a job's `trainer` part asks for; None where it asks for none."""
    trainer = setup.trainer or {}
    if trainer.get("eval_strategy", "no") in ("no", None) and not trainer.get("do_eval") and not trainer.get("eval_on_start"):
        return None
    samples = _count(trainer, "per_device_eval_batch_size") or _SAMPLES
    if not _keeps(trainer):
        return Evaluation(samples, False, None)
    accumulated, total = _count(trainer, "eval_accumulation_steps"), _count(trainer, "eval_samples")
    if trainer.get("batch_eval_metrics"):
        accumulated = 1
    every = None if total is None else max(1, -(-total // (samples * setup.data_ranks)))
    known = [n for n in (accumulated, every) if n is not None]
    return Evaluation(samples, True, min(known, default=None))


def _keeps(trainer: Mapping[str, Any]) -> bool:
    """Whether predictions are kept. Without `compute_metrics` the Trainer takes the loss alone, whatever `prediction_loss_only` says;
    arguments that make sense only with metrics stand for it."""
    if trainer.get("prediction_loss_only") is True:
        return False
    if trainer.get("compute_metrics") is not None:
        return read_bool(trainer["compute_metrics"], "trainer.compute_metrics")
    metric = trainer.get("metric_for_best_model")
    by_metric = metric is not None and str(metric).removeprefix("eval_") != "loss"
    said = trainer.get("prediction_loss_only") is False
    return said or by_metric or any(trainer.get(name) for name in ("eval_accumulation_steps", "batch_eval_metrics", "include_for_metrics"))


def _count(trainer: Mapping[str, Any], name: str) -> int | None:
    value = trainer.get(name)
    return None if value is None else read_value(value, Key("int", 1, 1, 1 << 40), f"trainer.{name}")


def save(setup: Setup, settings: Settings) -> Save | None:
    """The save that a job asks for: by the Trainer's arguments, or by a config that gathers the weights for one."""
    trainer = setup.trainer or {}
    gathers = settings.stage == 3 and gathers_whole(settings)
    asked = trainer.get("save_strategy", "steps" if trainer.get("save_steps") else "no")
    saves = asked not in ("no", None)
    if trainer.get("save_strategy") == "no" or not (saves or gathers):
        return None
    return Save(gathers, saves and settings.stage < 3)


def gathers_whole(settings: Settings) -> bool:
    """Whether the config asks for whole weights at a save (an "auto" that nobody filled is DeepSpeed's default, false)."""
    asked = settings.config["zero_optimization"].get(GATHER, "auto")
    return asked != "auto" and read_bool(asked, f"deepspeed.zero_optimization.{GATHER}")
