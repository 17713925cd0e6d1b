"""What a job takes that nobody said: told, so that it can be said. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from explorer.catalog import find_model, lengths
from explorer.dsconfig.findings import Finding
from explorer.setup import Setup

_UNITS = {"sequence": "tokens", "target_sequence": "tokens of labels", "image_size": "pixels a side"}


def assumed(setup: Setup, said: Collection[str]) -> Iterator[Finding]:
    """A finding for each length that the model's own stands for, and for the GPUs and the batch where none were said. `said`: fields of the Setup that somebody gave."""
    model = find_model(setup.model)
    taken = lengths(setup, model)
    for name in model.axes:
        if getattr(setup, name) is None:
            yield Finding(id="length-assumed", key=name, text=f"is not given: {getattr(taken, name):,} {_UNITS[name]} are taken, as is usual for {model.name}")
    if "world_size" not in said and setup.world_size == 1:
        yield Finding(id="gpus-assumed", key="world_size", text="is not given: 1 GPU is taken")
    if "micro_batch" not in said and setup.micro_batch == 1:
        yield Finding(id="batch-assumed", key="micro_batch", text="is not given: 1 sample is taken")
