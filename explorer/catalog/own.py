"""A person's own model: a function that makes it and its batch, named in Python and never in a job file or on the page. It is read as text here, and run in the worker alone.

    def build(micro_batch, sequence=512):
        return MyModel(), {"input_ids": torch.zeros(micro_batch, sequence, dtype=torch.long), "labels": ...}

It is called where torch makes tensors without memory (`torch.device("meta")`, in the training dtype); `model(**batch).loss` is the loss.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from explorer.errors import BadInput, shown


class Factory(NamedTuple):
    """Where to find the function."""

    reference: str
    """"package.module:function"."""
    folder: str
    """What `sys.path` must hold."""
    takes_sequence: bool
    sequence: int | None
    """Its own default."""
    digest: str
    """Of its name and its file's text: a change of the file is another model. Files that it imports are not looked at."""


def find_factory(function: str | Callable[..., Any]) -> Factory:
    """The function's whereabouts, from its source. Raises BadInput("factory", ...) where a worker could not import it."""
    reference = function if isinstance(function, str) else f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    module, _, name = reference.partition(":")
    if module == "__main__":
        raise BadInput("factory", f"{shown(name)} is defined where Python was started, which the worker cannot import; put it into a file of its own, a module")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise BadInput("factory", f"is {shown(reference)}; give a module's own function, such as \"package.module:build\"")
    source = _source(module)
    text = source.read_text(encoding="utf-8")
    defaults = _arguments(text, name, reference)
    digest = hashlib.sha256(f"{reference}\n{text}".encode()).hexdigest()[:16]
    folder = source.parents[len(module.split(".")) - (source.name != "__init__.py")]
    return Factory(reference, str(folder), "sequence" in defaults, defaults.get("sequence"), digest)


def _source(module: str) -> Path:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise BadInput("factory", f"no file of a module {shown(module)} is found; start Python where it can be imported")
    return Path(spec.origin).resolve()


def _arguments(text: str, name: str, reference: str) -> dict[str, int | None]:
    """The function's arguments, each with its default where that is a whole number."""
    found = next((node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name), None)
    if found is None:
        raise BadInput("factory", f"{shown(reference)} is no function that its file defines at its top level")
    plain, named = found.args.posonlyargs + found.args.args, found.args.kwonlyargs
    defaults = [*[None] * (len(plain) - len(found.args.defaults)), *found.args.defaults, *found.args.kw_defaults]
    arguments = {a.arg: d.value if isinstance(d, ast.Constant) and type(d.value) is int else None for a, d in zip(plain + named, defaults, strict=True)}
    if "micro_batch" not in arguments:
        raise BadInput("factory", f"{shown(reference)} takes no micro_batch, and sizes must follow it; give it that argument, and sequence where there is one")
    return arguments
