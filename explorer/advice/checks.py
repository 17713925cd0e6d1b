"""Hold a message's numbers against each other: what cannot be is named, and what the text leaves open is settled. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from explorer.advice.message import Doubt, Message, Size
from explorer.units import KiB, MiB, human, pytorch_size

PAGE = 2 * MiB
_OLD_PAGE = 128 * KiB
"""What torch 1.0 rounded large requests to."""


def checked(message: Message, count: int) -> Message:
    """The message with its doubts, and with this process told from the others."""
    message = replace(_own_process(message), count=count)
    return replace(message, doubts=tuple(_doubts(message)))


def _own_process(m: Message) -> Message:
    """Inside a container the driver names this process by a number that PyTorch does not know: the one that is large enough, where there is no room for both."""
    if m.process is not None or m.reserved is None or m.capacity is None or m.free is None:
        return m
    used = m.capacity - m.free
    for number, size in m.others:
        if size.most >= m.reserved.least and (m.reserved + size).least > used.most:
            return replace(m, process=size, others=tuple(o for o in m.others if o[0] != number))
    return m


def _doubts(m: Message) -> Iterator[Doubt]:
    if m.requested is not None and m.kind != "mps" and m.form != "other" and not _can_be_asked(m.requested, m.form == "cached"):
        near = max(PAGE, round(m.requested.bytes / PAGE) * PAGE)
        yield Doubt(field="requested", text=f"PyTorch asks the device for whole {human(PAGE)}, and {pytorch_size(m.requested.bytes)} is not that: a digit was misread, {pytorch_size(near)} perhaps")
    yield from _held(m)
    yield from _divided(m)


def _can_be_asked(size: Size, old: bool) -> bool:
    page = _OLD_PAGE if old else PAGE
    return size.most // page > (size.least - 1) // page


def _held(m: Message) -> Iterator[Doubt]:
    """What PyTorch says it holds, against the card."""
    if m.capacity is None:
        return
    for name, size in (("allocated", m.allocated), ("reserved", m.reserved), ("free", m.free), ("process", m.process)):
        if size is not None and size.least > m.capacity.most:
            yield Doubt(field=name, text=f"{human(size.bytes)} {_SAID[name]} on a card of {human(m.capacity.bytes)} cannot all be there: {_HOW[name]}")
            return  # what follows from it is no news


_SAID = {"allocated": "allocated by PyTorch", "reserved": "reserved by PyTorch", "free": "free", "process": "in use by this process"}
_SPILT = "the driver has moved some of it to host memory (Windows does), or memory that was handed back is still counted (a sleeping inference engine's)"
_HOW = {"allocated": _SPILT, "reserved": _SPILT, "free": "one of the two was misread", "process": _SPILT}


def _divided(m: Message) -> Iterator[Doubt]:
    """The parts, against the whole."""
    if m.allocated is not None and m.reserved is not None and m.allocated.least > m.reserved.most:
        yield Doubt(field="reserved", text=f"{human(m.allocated.bytes)} allocated of {human(m.reserved.bytes)} reserved cannot be: one of the two was misread")
        return
    if m.process is not None and m.reserved is not None and m.reserved.least > m.process.most:
        yield Doubt(field="process", text=f"PyTorch holds {human(m.reserved.bytes)}, and its process is said to have {human(m.process.bytes)}: one of the two was misread, or several processes share the device")
        return
    whole = m.capacity
    held = m.process or m.reserved
    if whole is None or held is None or m.free is None or held.least > whole.most:
        return
    parts = held + m.free
    for _, size in m.others:
        parts = parts + size
    if parts.least > whole.most:
        yield Doubt(field="capacity", text=f"{human(parts.bytes)} in use and free is more than the card's {human(whole.bytes)}: one of the numbers was misread")
