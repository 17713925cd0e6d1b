"""The measurements a page can show: those kept on this machine, those that ship, and what it has measured itself."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from explorer.errors import BadInput
from explorer.profile import Profile
from explorer.setup import Setup

log = logging.getLogger(__name__)

_AS_WRITTEN = ("attention", "padding", "use_cache", "gradient_checkpointing", "trainable", "lora", "capacity_gib", "allocator")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A measurement of the very setup shown."""

    setup: Setup
    profile: Profile
    recorded_at: str
    """ISO 8601, UTC."""


class Measurements:
    """Found by what a setup means, not by how it is written: an explicit default is the default. Files are read once, when first asked for."""

    def __init__(self) -> None:
        self._found: dict[Any, Measured] | None = None

    def all(self) -> list[Measured]:
        """Every measurement at hand, the page's own last."""
        return list(self._index().values())

    def find(self, setup: Setup) -> Measured | None:
        """The measurement of this setup: on its very card, or one made without a card in mind."""
        index = self._index()
        job = meaning(setup)
        return index.get((job, setup.gpu)) or index.get((job, None))

    def add(self, setup: Setup, profile: Profile) -> None:
        """Keep what the page has just measured."""
        self._index()[meaning(setup), setup.gpu] = Measured(setup=setup, profile=profile, recorded_at=datetime.now(UTC).isoformat(timespec="seconds"))

    def _index(self) -> dict[Any, Measured]:
        if self._found is None:
            self._found = {}
            for record in _records():
                try:
                    self._found.setdefault((meaning(record.setup), record.setup.gpu), Measured(setup=record.setup, profile=record.profile, recorded_at=record.recorded_at))
                except BadInput as error:
                    log.warning("a record is left out: %s", error)
        return self._found


def _records() -> list[Any]:
    from explorer.measure import records

    try:
        return list(records.all())
    except OSError as error:
        log.warning("records could not be read: %s", error)
        return []


def meaning(setup: Setup) -> tuple[Any, ...]:
    """What decides the memory of a step, with every default filled; equal for setups that only differ in how they are written."""
    from explorer import catalog
    from explorer.dsconfig import resolve

    model = catalog.find_model(setup.model)
    settings = replace(resolve(setup), config={}, findings=(), notes=())
    written = tuple(repr(getattr(setup, name)) for name in _AS_WRITTEN)
    return model.key, catalog.lengths(setup, model), repr(settings), written, setup.trainer is not None
