"""`estimate`: a Setup in, a Profile out; milliseconds for any model whose tape is at hand. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from explorer.catalog import own_model
from explorer.dsconfig import versions
from explorer.errors import BadInput, shown
from explorer.estimator import figures, host, tapes
from explorer.estimator.largest import largest_micro_batch
from explorer.estimator.notes import notes
from explorer.estimator.sources import at_peak
from explorer.estimator.stream import Stream
from explorer.estimator.tape import Parameter
from explorer.estimator.usage import Usage
from explorer.estimator.work import Work, outside_pytorch
from explorer.profile import Profile
from explorer.setup import Setup


def estimate(setup: Setup | Mapping[str, Any], largest: bool = True, on_progress: tapes.Progress | None = None, sources: bool = False, factory: str | Callable[..., Any] | None = None) -> Profile:
    """What memory one training step of `setup` takes. Raises BadInput for what cannot be, CouldNotRun where a tape is missing.

    `sources`: also say what the peak is made of and where each part comes from. `largest`: also search the largest micro-batch that fits, which takes a few dozen replays.
    `factory`: your own model, in place of `model`: a module's function of `micro_batch` and, where there is one, `sequence` that returns (model, batch), or its name,
    "package.module:function" (catalog/own.py). It is run in the worker, on tensors without memory.
    """
    if factory is not None:
        setup = _with_own_model(setup, factory)
    job = setup if isinstance(setup, Setup) else Setup.from_job(setup)
    return _profile(Work(job, on_progress), largest_micro_batch(job, on_progress) if largest else None, sources)


def _with_own_model(setup: Setup | Mapping[str, Any], factory: str | Callable[..., Any]) -> dict[str, Any]:
    job = setup.to_job() if isinstance(setup, Setup) else dict(setup)
    name = own_model(factory).name
    if job.get("model", name) != name:
        raise BadInput("model", f"is {shown(job['model'])}, and a factory makes the model; leave one of them out")
    return {**job, "model": name}


def _profile(work: Work, largest: int | None, sources: bool) -> Profile:
    answer, limited = work.judged
    curve, runs = figures.curve(work.stream, work.unlimited)
    parameters = work.tape.model_parameters(work.patches)
    return Profile(
        source="estimated",
        method=work.setup.method,
        parameters=sum(p.numel for p in parameters) + work.tape.packed,
        trainable_parameters=sum(p.numel for p in parameters if p.trainable),
        peak=figures.peak(work.stream, work.unlimited, limited),
        steps=figures.steps(work.stream, work.unlimited, limited),
        at_peak=figures.categories_at(work.stream, work.unlimited, int(work.unlimited.allocated.argmax())),
        host=host.host(work),
        outside_pytorch_bytes=outside_pytorch(work.card, work.setup.world_size),
        verdict=answer,
        largest_micro_batch=largest,
        provenance=figures.provenance(work.stream),
        environment={"torch": work.tape.versions.get("torch"), "transformers": work.tape.versions.get("transformers"), "deepspeed": work.setup.deepspeed_version or versions.RULES, "gpu": work.setup.gpu},
        notes=notes(work),
        sources=at_peak(work.stream, work.unlimited, work.rules, work.tape) if sources else (),
        timeline=curve, timeline_phases=runs,
    )


@dataclass(frozen=True, slots=True)
class Events:
    """One job's events, and what PyTorch's allocator makes of them without a limit."""

    stream: Stream
    usage: Usage
    parameters: tuple[Parameter, ...]
    kept: Mapping[int, int]
    """Whole weights that stage 3 has let go and autograd keeps: block → the position from which on it alone does."""


def events(setup: Setup, on_progress: tapes.Progress | None = None) -> Events:
    """The events behind `estimate(setup)`, for whoever asks which of them a request was. Raises as `estimate` does."""
    work = Work(setup, on_progress)
    return Events(work.stream, work.unlimited, work.tape.model_parameters(work.patches), work.rules.kept)
