"""An evaluation's forward as events: a forward without gradients, and the predictions that the Trainer keeps of it. No torch.

What a forward without gradients holds inside a layer is what a layer under gradient checkpointing holds while it first runs, since
nothing of it is saved; a layer's input, which checkpointing saves, is gone when the layer has run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from explorer.catalog import Card, Lengths, Model
from explorer.catalog import lengths as lengths_of
from explorer.errors import BadInput, CouldNotRun
from explorer.estimator import tapes
from explorer.estimator.program import ENTER, FORWARD, LEAVE
from explorer.estimator.rules.base import Rules
from explorer.estimator.stream import Writer
from explorer.estimator.tape import Tape
from explorer.profile import CATEGORIES
from explorer.setup import Setup

_LAYER = re.compile(r"^(.*?)\.(\d+)(?:\.|$)")
_TEMPORARY = CATEGORIES.index("temporary")


class Forward:
    """Forwards of one batch, each as large as the one before it."""

    def __init__(self, tape: Tape, lengths: Mapping[str, int | None], rules: Rules) -> None:
        self.tape, self.writer, self.rules = tape, rules.writer, rules
        self.values = tape.values(lengths)
        self.flat = tape.unrolled
        self.order = self.flat.order[: self.flat.forward_end].astype(np.int64)
        made, freed = self.order[self.order > 0], -self.order[self.order < 0]
        self.left = [int(b) for b in np.setdiff1d(made, freed)]
        """Blocks that a training forward keeps for its backward."""
        self.frees = _frees(self.flat.owners, tape.modules, self.order, self.left)
        early = {block for blocks in self.frees.values() for block in blocks}
        self.late = [block for block in self.left if block not in early]
        kinds = (ENTER, LEAVE) if rules.wants_modules else ()
        self.hooks = defaultdict(list)
        for position, kind, which, direction in self.flat.hooks:
            if kind in kinds and direction == FORWARD and position <= len(self.order):
                self.hooks[position].append((kind, which))

    def batch(self) -> list[int]:
        """The batch itself; its blocks."""
        return [self.writer.allocate(int(self.values[row]), "activations", "batch", "traced") for row in self.tape.batch]

    def run(self) -> None:
        """One forward, from entering the model to its loss."""
        sizes = self.values[self.flat.size_rows]
        owners = [self.tape.modules[i] if i >= 0 else "" for i in self.flat.owners.tolist()]
        base = self.writer.reserve(sizes, [_TEMPORARY] * len(sizes), owners)
        out = self.writer.order
        self.rules.before_micro(0)
        for position, event in enumerate([*self.order.tolist(), 0]):
            for kind, which in self.hooks.get(position, ()):
                (self.rules.enter if kind == ENTER else self.rules.leave)(which, FORWARD)
            out.extend(-base - block for block in self.frees.get(position, ()))
            if event:
                out.append(event + base if event > 0 else event - base)
        out.extend(-base - block for block in self.late)


def _frees(owners: np.ndarray, modules: tuple[str, ...], order: np.ndarray, left: list[int]) -> dict[int, list[int]]:
    """Position → blocks that are gone by then without gradients: what a layer leaves is the next layer's input, and goes with it."""
    last: dict[tuple[str, int], int] = {}
    layers: dict[int, tuple[str, int] | None] = {}
    for position, event in enumerate(order.tolist(), 1):
        block = abs(event)
        if block not in layers:
            layers[block] = _layer(modules[owners[block - 1]] if owners[block - 1] >= 0 else "")
        if layers[block] is not None and event > 0:
            last[layers[block]] = position
    found: dict[int, list[int]] = defaultdict(list)
    for block in left:
        layer = layers[block]
        if layer is not None and (layer[0], layer[1] + 1) in last:
            found[last[layer[0], layer[1] + 1]].append(block)
    return found


def _layer(module: str) -> tuple[str, int] | None:
    """The list and the number of the layer that a module is in."""
    found = _LAYER.match(module)
    return (found[1], int(found[2])) if found else None


def play(forward: Forward, rules: Rules, logits_bytes: int, kept: int) -> None:
    """An evaluation: its first batch and its last. `kept`: batches whose predictions are together at the end, 0 for none.

    `logits_bytes`: of one GPU's batch; each GPU keeps those of all, and each batch makes a longer copy of what it keeps
    (transformers/trainer.py, `evaluation_loop`; trainer_pt_utils.py, `EvalLoopContainer`).
    """
    writer, whole = rules.writer, logits_bytes * rules.settings.world_size
    rules.before_evaluation()
    batch = forward.batch()
    forward.run()
    if kept:
        last = earlier = _gathered(writer, logits_bytes, whole)
        if kept > 1:
            earlier = last if kept == 2 else writer.allocate((kept - 1) * whole, "temporary", "predictions kept")
            forward.run()
            writer.free(last if kept > 2 else 0)
            last = _gathered(writer, logits_bytes, whole)
            writer.free(writer.allocate(kept * whole, "temporary", "predictions kept"), last)
        writer.free(earlier)
    writer.free(*batch)
    rules.after_evaluation()


def _gathered(writer: Writer, own: int, whole: int) -> int:
    """A batch's logits of all GPUs; one GPU's own are there until they are gathered."""
    logits = writer.allocate(own, "temporary", "logits", "traced")
    gathered = writer.allocate(whole, "temporary", "predictions of all GPUs")
    writer.free(logits)
    return gathered


_WITH_LOGITS = {"causal": "sequence", "masked": "sequence", "image_text": "sequence", "seq2seq": "target_sequence", "speech": "target_sequence"}
"""Tasks whose outputs are logits over the vocabulary for each token, and the length they have."""


def logits_bytes(model: Model, lengths: Lengths, element_bytes: int) -> int:
    """Of one GPU's batch; 0 where they are not tokens' and so are small."""
    axis = _WITH_LOGITS.get(model.task)
    if axis is None or not model.vocab_size:
        return 0
    return lengths.micro_batch * (getattr(lengths, axis) or 0) * model.vocab_size * element_bytes


def tape_of(setup: Setup, model: Model, compute: str, card: Card | None, samples: int, on_progress: tapes.Progress | None) -> tuple[Tape, Lengths]:
    """The tape of a forward whose layers keep nothing, and its batch; of a training forward where checkpointing cannot be had.

    Raises CouldNotRun where neither is at hand and nothing can be recorded.
    """
    config = {k: v for k, v in setup.deepspeed.items() if k not in ("train_batch_size", "train_micro_batch_size_per_gpu")}
    evaluated = setup.replace(micro_batch=samples, deepspeed=config, trainer=None, gradient_checkpointing=True)
    shape = lengths_of(evaluated, model)
    try:
        return tapes.find(evaluated, tapes.key(evaluated, compute, model, shape, card), model, on_progress), shape
    except (BadInput, CouldNotRun):
        plain = evaluated.replace(gradient_checkpointing=False)
        return tapes.find(plain, tapes.key(plain, compute, model, shape, card), model, on_progress), shape
