"""Which memory ran out, by a message's numbers alone: decided once, so that no two sentences answer it differently. No torch."""

from __future__ import annotations

from typing import Literal

from explorer.advice.message import Message, Size

Situation = Literal["larger than the card", "limit", "free enough", "too little together", "fragments", "maybe fragments", "unknown"]

LITTLE = 0.07
"""Part of the card up to which cached memory is what every run has, and no reason for a full card."""


def situation(m: Message) -> Situation:
    """Of a message with a request; what the numbers do not settle, or cannot be, is "unknown".

    "free enough": the driver says that more was free than asked for. "fragments": cached and free memory together hold the request,
    and free memory alone does not. "too little together": they do not, so that no setting of the allocator can help.
    """
    if m.requested is None or not m.is_gpu or m.doubted("requested"):
        return "unknown"
    if m.capacity is not None and m.requested.least > m.capacity.most:
        return "larger than the card"
    if m.limit is not None:
        return "limit"
    if m.free is None or m.doubted("free", "capacity", "process"):
        return "unknown"
    if m.free.least >= m.requested.most:
        return "free enough"
    there = together(m)
    if there is None:
        return "unknown"
    if there.most < m.requested.least:
        return "too little together"
    return "fragments" if there.least >= m.requested.most else "maybe fragments"


def together(m: Message) -> Size | None:
    """Cached and free; None where a number is not there or not believed."""
    if m.cached_bytes is None or m.free is None or m.doubted("free", "capacity", "process"):
        return None
    return m.free + (m.reserved - m.allocated)


def is_full(m: Message) -> bool:
    """Whether nothing says that the card had room: neither a limit nor free memory beyond the request."""
    return situation(m) not in ("limit", "free enough")


def can_be_fragments(m: Message) -> bool:
    """Whether a setting of the allocator may let the request through, as far as the numbers say."""
    return situation(m) in ("fragments", "maybe fragments") or situation(m) == "unknown" and bool(m.cached_bytes) and not rules_out_fragments(m)


def rules_out_fragments(m: Message) -> bool:
    """Whether the numbers say that no setting of the allocator could have helped."""
    return situation(m) in ("too little together", "larger than the card", "free enough")
