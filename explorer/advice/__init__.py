"""The doctor: what is pasted, why it runs out of memory, and what to change. Nothing here draws; nothing here computes memory but by `estimate`.

    from explorer.advice import doctor

`doctor(text, base)` returns a Consultation. Everything is imported when it is first used, so that reading a message stays quick.
"""

from typing import Any

__all__ = ["Consultation", "consult", "doctor"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("explorer.advice.consultation"), name)
    raise AttributeError(f"module 'explorer.advice' has no attribute {name!r}")
