"""The lengths of a batch: a Setup's, or the model's defaults, checked against what the model can take."""

from __future__ import annotations

from dataclasses import dataclass

from explorer.catalog.models import Model
from explorer.errors import BadInput
from explorer.setup import Setup

_LEAST_TOKENS = 2
"""Of a sample: a language model's loss needs two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """One batch's shape. None where the model has no such axis."""

    micro_batch: int
    sequence: int | None
    target_sequence: int | None
    image_size: int | None
    patches: int | None
    """Of one image: (image_size / patch_size)²."""
    batches: tuple[int, ...] = ()
    """Tokens that the samples of each batch are padded to, where they vary; `sequence` is the longest."""
    pads: bool = False
    """Whether a batch holds samples of several lengths."""


def lengths(setup: Setup, model: Model) -> Lengths:
    """The shape of a setup's batch. Raises BadInput naming the field that the model cannot take."""
    batches, pads = _batches(setup, model)
    sequence = max(batches) if batches else _one(setup, model, "sequence", model.default_sequence, model.sequence_limit)
    target = _one(setup, model, "target_sequence", model.default_target_sequence, model.target_sequence_limit)
    image = _one(setup, model, "image_size", model.default_image_size, None)
    patches = None
    if image is not None:
        unit = model.patch_size * (model.token_side or 1)
        if image % unit and not (model.task == "contrastive" and image == model.default_image_size):  # the rest of a side is left out there: 384 / 14
            lower = max(1, image // unit) * unit
            raise BadInput("image_size", f"is {image}, which is not a multiple of {model.name}'s patch of {unit}; take {lower} or {lower + unit}")
        patches = (image // model.patch_size) ** 2
        _check_room(sequence, image_tokens(model, patches), model)
    return Lengths(micro_batch=setup.micro_batch, sequence=sequence, target_sequence=target, image_size=image, patches=patches, batches=batches, pads=pads)


def _batches(setup: Setup, model: Model) -> tuple[tuple[int, ...], bool]:
    """(tokens of each batch, whether samples in it differ): samples in their order, the last ones that fill no batch left out."""
    if setup.lengths is None:
        return (), False
    if "sequence" not in model.axes:
        raise BadInput("lengths", f"is given, but {model.name} reads no text; leave it out")
    cut = setup.sequence or max(setup.lengths)
    if setup.sequence is not None:
        _one(setup, model, "sequence", None, model.sequence_limit)
    elif model.sequence_limit is not None and cut > model.sequence_limit:
        raise BadInput("lengths", f"holds {cut} tokens, beyond the {model.sequence_limit} positions of {model.name}; give sequence, where samples are cut")
    samples = [max(_LEAST_TOKENS, min(n, cut)) for n in setup.lengths]
    size = setup.micro_batch
    if len(samples) < size:
        samples = (samples * -(-size // len(samples)))[:size]
    groups = [samples[at : at + size] for at in range(0, len(samples) - size + 1, size)]
    return tuple(max(group) for group in groups), any(min(group) < max(group) for group in groups)


def image_tokens(model: Model, patches: int) -> int:
    """Tokens of the text that one image takes; 0 where images are not read among text."""
    return patches // model.token_side**2 if model.token_side else 0


def _check_room(sequence: int | None, tokens: int, model: Model) -> None:
    if tokens and sequence < tokens + 2:
        raise BadInput("sequence", f"is {sequence}, and one image alone takes {tokens} tokens of {model.name}; give at least {tokens + 2}, or a smaller image_size")


def _one(setup: Setup, model: Model, name: str, default: int | None, limit: int | None) -> int | None:
    value = getattr(setup, name)
    if name not in model.axes:
        if value is not None:
            raise BadInput(name, f"is {value}, but {model.name} has no such length; leave it out")
        return None
    if value is None:
        return default
    if limit is not None and value > limit:
        raise BadInput(name, f"is {value}, beyond the {limit} positions of {model.name}; give at most {limit}")
    if name == "sequence" and value < 2 and model.task in ("causal", "masked", "image_text"):
        raise BadInput(name, "is 1, and a language model's loss needs two tokens; give at least 2")
    return value
