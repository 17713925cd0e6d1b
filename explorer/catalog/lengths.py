"""The lengths of a batch: a Setup's, or the model's defaults, checked against what the model can take."""

from __future__ import annotations

from dataclasses import dataclass

from explorer.catalog.models import Model
from explorer.errors import BadInput
from explorer.setup import Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """One batch's shape. None where the model has no such axis."""

    micro_batch: int
    sequence: int | None
    target_sequence: int | None
    image_size: int | None
    patches: int | None
    """Of one image: (image_size / patch_size)²."""


def lengths(setup: Setup, model: Model) -> Lengths:
    """The shape of a setup's batch. Raises BadInput naming the field that the model cannot take."""
    sequence = _one(setup, model, "sequence", model.default_sequence, model.sequence_limit)
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
    return Lengths(micro_batch=setup.micro_batch, sequence=sequence, target_sequence=target, image_size=image, patches=patches)


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
