"""What the named card cannot do. No torch."""

from __future__ import annotations

from explorer.catalog import find_card
from explorer.errors import BadInput
from explorer.setup import Setup
from explorer.units import GiB, human


def check_card(setup: Setup, precision: str, autocast: str | None) -> None:
    """Raises BadInput where the attention kernel cannot run, or the limit is more than the card has."""
    if setup.attention == "flash_attention_2" and precision == "fp32" and autocast is None:
        raise BadInput("attention", "is flash_attention_2, which takes 16-bit numbers only, and the job computes in fp32; enable bf16 or fp16, or choose sdpa")
    card = find_card(setup.gpu) if setup.gpu is not None else None
    if card is None:
        return
    if setup.attention == "flash_attention_2" and card.attention_generation == "older":
        raise BadInput("attention", f"is flash_attention_2, which needs an Ampere card or a newer one, and {card.name} is older; choose sdpa")
    if setup.capacity_gib is not None and setup.capacity_gib * GiB > card.total_bytes:
        raise BadInput("capacity_gib", f"is {setup.capacity_gib:g}, and {card.name} has {human(card.total_bytes)} in all; give less, or leave it out")
