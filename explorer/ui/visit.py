"""What a kernel knows of its visitor: the query of the address he came with."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def query() -> str:
    """The query of the visitor's address, without "?"; "" outside Voila.

    In a kernel that Voila started before anyone came (VOILA_PREHEAT), this waits for the visitor.
    """
    if os.environ.get("VOILA_PREHEAT") != "True":
        return os.environ.get("QUERY_STRING", "")
    with quick_jsonschema():
        from voila.utils import get_query_string
    return get_query_string() or ""


@contextmanager
def quick_jsonschema() -> Iterator[None]:
    """Import Voila or Altair without jsonschema's optional `rfc3987_syntax`, which compiles a grammar for two seconds to check a string format that neither uses."""
    name = "rfc3987_syntax"
    kept = sys.modules.get(name)
    sys.modules[name] = kept  # None makes the import fail, which jsonschema takes as "not installed"
    try:
        yield
    finally:
        if kept is None:
            del sys.modules[name]
