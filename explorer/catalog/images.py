"""What a config says of images: their side, their patches, and the square of patches that becomes one token of the text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from explorer.catalog.kinds import Kind
from explorer.errors import BadInput, shown

ANY_SIZE = ("qwen2_vl", "qwen2_5_vl")
"""Model types that take an image of any size as patches in a row: no table of positions grows with it."""
_USUAL_SIDE = 448
"""Of the image of a model that takes any size: 256 tokens of Qwen2-VL, within its processor's 4 to 16,384."""


def image_and_patch(config: Mapping[str, Any], kind: Kind) -> tuple[int, int]:
    """(side of the image, side of a patch) in pixels. Raises BadInput where they are no squares."""
    source = config.get("vision_config") or config
    usual = _USUAL_SIDE if config["model_type"] in ANY_SIZE else kind.image_size or 224
    image, patch = _side(_given(source, "image_size", usual)), _side(_given(source, "patch_size", kind.patch_size))
    if not isinstance(image, int) or not isinstance(patch, int | None):
        raise BadInput("model", "the config's image_size and patch_size must be whole numbers (square images and patches)")
    return image, patch or next(unit for unit in (32, 16, 8, 4, 2, 1) if image % unit == 0)  # a convolutional network has strides in place of patches


def token_side(config: Mapping[str, Any], image: int, patch: int) -> int:
    """Patches along the side of the square that becomes one token, as the model's own processor counts them."""
    model_type = config["model_type"]
    if model_type == "internvl":
        return _pixel_shuffle(config)
    if model_type == "gemma3":  # pooled to a fixed number of tokens an image
        return _pooled(config, image // patch)
    if model_type in ANY_SIZE:
        return _given(config.get("vision_config") or {}, "spatial_merge_size", 2)
    return 1


def _pixel_shuffle(config: Mapping[str, Any]) -> int:
    """InternVL: 1 / downsample_ratio patches a side become one token."""
    ratio = _given(config, "downsample_ratio", 0.5)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1 or (1 / ratio) % 1:
        raise BadInput("model", f"the config's downsample_ratio is {shown(ratio)}; it must be 1 over a whole number, such as 0.5")
    return int(1 / ratio)


def _pooled(config: Mapping[str, Any], patches: int) -> int:
    tokens = _given(config, "mm_tokens_per_image", 256)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1 or math.isqrt(tokens) ** 2 != tokens or patches % math.isqrt(tokens):
        raise BadInput("model", f"the config's mm_tokens_per_image is {shown(tokens)}; its square root must divide the image's {patches} patches a side, as that of 256 does")
    return patches // math.isqrt(tokens)


def _side(size: Any) -> Any:
    """The side of a square that is written as one number or as two equal ones."""
    return size[0] if isinstance(size, list) and len(size) == 2 and size[0] == size[1] else size


def _given(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    return default if value is None else value
