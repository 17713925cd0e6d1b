"""Record the catalog's tapes into the package: `python -m explorer.estimator.ship [MODEL ...]` (needs the `[probe]` extra).

One compressed file per model holds every tape that the page's controls can ask for; tapes that come out alike are kept once.
"""

from __future__ import annotations

import gzip
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from explorer.catalog import Model, find_model, lengths, models
from explorer.estimator.recorder import make_tape
from explorer.estimator.tape import Key, Tape
from explorer.estimator.tapes import SHIPPED
from explorer.setup import Setup

_ATTENTION = (
    ("bf16", "sdpa", "hopper"), ("bf16", "sdpa", "ampere"), ("bf16", "sdpa", "older"), ("bf16", "eager", "any"),
    ("fp16", "eager", "any"), ("fp32", "sdpa", "any"), ("fp32", "eager", "any"),
)
_FP16 = tuple(("fp16", "sdpa", generation) for generation in ("hopper", "ampere", "older"))
"""fp16 allocates as bf16 does, but for eager attention's softmax and for encoder-decoders, which clamp their activations in fp16."""


def keys(model: Model) -> Iterator[Key]:
    """The keys that are recorded, batches of several before batches of one."""
    variants = _ATTENTION + (_FP16 if clamps(model) else ())
    for one, checkpointing, (dtype, attention, generation) in itertools.product((False, True), ("none", "non_reentrant"), variants):
        yield Key(model=model.key, dtype=dtype, attention=attention, generation=generation, checkpointing=checkpointing, one_sample=one)


def clamps(model: Model) -> bool:
    """Whether fp16 has operations of its own (transformers' T5 and Whisper clamp what could overflow)."""
    return model.task in ("seq2seq", "speech")


def ship(model: Model) -> int:
    """Record one model's tapes; returns how many different ones there are."""
    tapes: list[Tape] = []
    filed: dict[str, int] = {}
    for key in keys(model):
        setup = Setup(model=model.name, micro_batch=2, attention=key.attention, gradient_checkpointing=key.checkpointing != "none")
        tape = make_tape(setup, key)
        index = _alike(tape, tapes, key, model)
        if index is None:
            index = len(tapes)
            tapes.append(tape)
        filed[key.text] = index
        if key.dtype == "bf16" and key.attention == "sdpa" and not clamps(model):
            filed[replace(key, dtype="fp16").text] = index
    SHIPPED.mkdir(exist_ok=True)
    content = json.dumps({"keys": filed, "tapes": [t.to_json() for t in tapes]}, separators=(",", ":")).encode()
    (SHIPPED / f"{model.key}.json.gz").write_bytes(gzip.compress(content, 9, mtime=0))
    return len(tapes)


def _alike(tape: Tape, others: list[Tape], key: Key, model: Model) -> int | None:
    """The index of a tape that gives the same stream at two sizes, of this key's batch."""
    return next((i for i, other in enumerate(others) if _same(tape, other, key, model)), None)


def _same(tape: Tape, other: Tape, key: Key, model: Model) -> bool:
    if len(tape.unrolled.order) != len(other.unrolled.order) or not np.array_equal(tape.unrolled.order, other.unrolled.order) or tape.unrolled.hooks != other.unrolled.hooks:
        return False
    if not np.array_equal(tape.unrolled.categories, other.unrolled.categories):
        return False
    return all(np.array_equal(tape.values(at)[tape.unrolled.size_rows], other.values(at)[other.unrolled.size_rows]) for at in _points(key, model))


def _points(key: Key, model: Model) -> Iterator[dict[str, int | None]]:
    usual = lengths(Setup(model=model.name, micro_batch=1), model)
    for batch, part in ((1, 1), (1, 2)) if key.one_sample else ((2, 1), (5, 2), (64, 1)):
        yield {
            "batch": batch,
            "sequence": usual.sequence and usual.sequence // part,
            "target_sequence": usual.target_sequence and usual.target_sequence // part,
            "patches": usual.patches,
        }


def main() -> None:
    """Ship the named models, or those that have shipped before."""
    for model in [find_model(name) for name in sys.argv[1:]] or [m for m in models() if (SHIPPED / f"{m.key}.json.gz").exists()]:
        started = time.monotonic()
        print(f"{model.name}: {ship(model)} tapes in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
