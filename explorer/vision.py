"""Images among text (torch): the batch that a model's own processor makes of them, and what recording such a model needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch as replaced

from explorer.catalog import Model
from explorer.catalog.images import ANY_SIZE

_INTERNVL_IMAGE_TOKEN = 151667
"""transformers' default."""


def mark(model: Model) -> int:
    """The token that stands for a part of an image."""
    config = model.config
    return config.get("image_token_id", config.get("image_token_index", _INTERNVL_IMAGE_TOKEN))


def config_for(model: Model, facts: Mapping[str, Any], image: int) -> dict[str, Any]:
    """The facts of a config for images of another side."""
    if model.model_type in ANY_SIZE:
        return dict(facts)
    changed = {**facts, "vision_config": {**(facts.get("vision_config") or {}), "image_size": image}}
    if model.model_type == "gemma3":
        changed["mm_tokens_per_image"] = (image // model.patch_size // model.token_side) ** 2
    return changed


def batch(model: Model, ids: Any, tokens: int, image: int, reals: Callable[..., Any]) -> dict[str, Any]:
    """One image a sample, whose `tokens` come first; the rest is text. `reals(*shape)` makes numbers with the batch in front, in the model's dtype."""
    import torch

    on_meta = ids.device.type == "meta"
    if not on_meta:
        ids[ids == mark(model)] = 0
        ids[:, :tokens] = mark(model)
    made = {"input_ids": ids, "labels": ids.clone()}
    if model.model_type in ANY_SIZE:
        vision = model.config.get("vision_config") or {}
        side = image // model.patch_size
        width = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * model.patch_size**2
        # Python reads this grid in the forward: on the meta device its numbers stay on the CPU.
        grid = torch.tensor([[1, side, side]] * len(ids), device="cpu" if on_meta else ids.device)
        kinds = torch.zeros_like(ids)
        if not on_meta:
            kinds[:, :tokens] = 1
        return {**made, "pixel_values": reals(side**2, width).flatten(0, 1), "image_grid_thw": grid, "mm_token_type_ids": kinds}
    made["pixel_values"] = reals(3, image, image)
    if model.model_type in ("paligemma", "gemma3"):  # their processors tell image and prompt from what is learned
        made["token_type_ids"] = torch.zeros_like(ids)
        if not on_meta:
            made["token_type_ids"][:, :tokens] = 1 if model.model_type == "gemma3" else 0
            made["token_type_ids"][:, tokens:] = 0 if model.model_type == "gemma3" else 1
    return made


@contextmanager
def recordable(model: Model, attention: str) -> Iterator[None]:
    """While such a model is recorded, its images' attention is one call over all patches.

    Outside, each image (each window, in Qwen2.5-VL) has a call of its own, and how many there are hangs on the batch. A fused
    kernel's output and log-sum-exp have one row a patch either way, so the bytes are the same; by-hand attention's are not.
    """
    if model.model_type not in ANY_SIZE or attention == "eager":
        yield
        return
    module = importlib.import_module(f"transformers.models.{model.model_type}.modeling_{model.model_type}")
    with ExitStack() as stack:
        for name, change in (("get_vision_position_ids", _to_meta), ("get_vision_attention_seqlens", _one_call), ("get_vision_window_index", _one_window)):
            if hasattr(module, name):
                stack.enter_context(replaced.object(module, name, change(getattr(module, name))))
        for owner in vars(module).values():
            if isinstance(owner, type) and hasattr(owner, "get_rope_index"):
                stack.enter_context(replaced.object(owner, "get_rope_index", _positions))
        yield


def _positions(_: Any, input_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Positions in time, height and width of every token, as long as the sequence, and one offset a sample."""
    return input_ids.new_empty(3, *input_ids.shape), input_ids.new_empty(len(input_ids), 1)


def _to_meta(plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: plain(*args, **kwargs).to("meta")


def _one_call(plain: Callable[..., Any]) -> Callable[..., Any]:
    def changed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        ends, longest = plain(*args, **kwargs)
        return ends[[0, -1]], longest and int(ends[-1])
    return changed


def _one_window(plain: Callable[..., Any]) -> Callable[..., Any]:
    def changed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        index, ends = plain(*args, **kwargs)
        return index.to("meta"), ends[[0, -1]]
    return changed
