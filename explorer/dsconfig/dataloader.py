"""The Trainer's data loader, as the job's arguments set it up. No torch.

Arguments and their defaults are transformers 5.17.0's (training_args.py); what lives at once is accelerate 1.15.0's and torch's
(data_loader.py, `DataLoaderShard.__iter__`; torch/utils/data/dataloader.py, `_MultiProcessingDataLoaderIter`).
"""

from __future__ import annotations

from dataclasses import dataclass

from explorer.dsconfig.keys import Key, read_bool, read_value
from explorer.setup import Setup

_PREFETCH = 2
"""Batches a worker is ahead, where nobody says: torch's own prefetch_factor."""
_HELD = 2
"""Accelerate looks one batch ahead: it fetches the next one while it still holds the one before."""


@dataclass(frozen=True, slots=True)
class Loader:
    """What of a data loader takes host memory."""

    pins: bool
    """Whether batches are copied to page-locked memory."""
    workers: int
    """Processes that make batches, beside the training process."""
    batches: int
    """Whole batches that live on the host at once, at most."""


def loader(setup: Setup) -> Loader | None:
    """The data loader of a job that the Trainer runs; None where there is no Trainer, whose loader nobody knows."""
    if setup.trainer is None:
        return None
    asked = setup.trainer
    pins = True if asked.get("dataloader_pin_memory") is None else read_bool(asked["dataloader_pin_memory"], "trainer.dataloader_pin_memory")
    workers = _count(setup, "dataloader_num_workers", 0, 0)
    ahead = workers * _count(setup, "dataloader_prefetch_factor", _PREFETCH, 1)
    return Loader(pins, workers, ahead + (1 if workers else _HELD))


def _count(setup: Setup, name: str, default: int, least: int) -> int:
    value = setup.trainer.get(name)
    return default if value is None else read_value(value, Key("int", default, least, 1 << 12), f"trainer.{name}")
