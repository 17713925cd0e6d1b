"""The measurements a page can show: those kept on this machine, those that ship, and what it has measured itself."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from explorer.errors import BadInput
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.ui import fields

log = logging.getLogger(__name__)

_AS_WRITTEN = ("attention", "padding", "use_cache", "gradient_checkpointing", "trainable", "lora", "capacity_gib", "allocator")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A measurement of the very setup shown."""

    setup: Setup
    profile: Profile
    recorded_at: str
    """ISO 8601, UTC."""

    @classmethod
    def of(cls, record: Any) -> Measured:
        """What a record holds."""
        return cls(setup=record.setup, profile=record.profile, recorded_at=record.recorded_at)


class Measurements:
    """Found by what a setup means, not by how it is written: an explicit default is the default. Files are read once, when first asked for."""

    def __init__(self) -> None:
        self._found: dict[Any, Measured] | None = None

    def __len__(self) -> int:
        """How many setups have one."""
        return len(self._index())

    def find(self, setup: Setup) -> Measured | None:
        """The measurement of this setup: on its very card, or one made without a card in mind."""
        index = self._index()
        job = meaning(setup)
        return index.get((job, setup.gpu)) or index.get((job, None))

    def add(self, setup: Setup, profile: Profile) -> None:
        """Keep what the page has just measured."""
        self.put_first(Measured(setup=setup, profile=profile, recorded_at=datetime.now(UTC).isoformat(timespec="seconds")))

    def put_first(self, measured: Measured) -> None:
        """Of all measurements of this setup, show this one."""
        self._index()[meaning(measured.setup), measured.setup.gpu] = measured

    def forget(self) -> None:
        """Read the files anew when next asked: some have come or gone."""
        self._found = None

    def _index(self) -> dict[Any, Measured]:
        if self._found is None:
            self._found = {}
            for record in kept_records():
                try:
                    self._found.setdefault((meaning(record.setup), record.setup.gpu), Measured.of(record))
                except BadInput as error:
                    log.warning("a record is left out: %s", error)
        return self._found


def kept_records() -> list[Any]:
    """Every readable record, the user's own first; none where their folder cannot be read."""
    from explorer.measure import records

    try:
        return records.all()
    except OSError as error:
        log.warning("records could not be read: %s", error)
        return []


def meaning(setup: Setup) -> tuple[Any, ...]:
    """What decides the memory of a step, with every default filled; equal for setups that only differ in how they are written."""
    from explorer.dsconfig import resolve

    settings = replace(resolve(setup), config={}, findings=(), notes=())
    written = tuple(repr(getattr(setup, name)) for name in _AS_WRITTEN)
    return *_model(setup), repr(settings), written, setup.trainer is not None


def _model(setup: Setup) -> tuple[Any, Any]:
    """(the model, its lengths): of a catalog's name or a config, what they stand for; a path or a hub id is taken as written, since to look it up may take long."""
    from explorer import catalog

    if isinstance(setup.model, str) and fields.read_model_name(setup.model) is None:
        return setup.model, (setup.sequence, setup.target_sequence, setup.image_size)
    model = catalog.find_model(setup.model)
    return model.key, catalog.lengths(setup, model)
