"""What is said of a DeepSpeed config besides its numbers. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A setting that DeepSpeed takes but does not act on as its name says, or that is not modelled here."""

    id: str
    key: str
    text: str
