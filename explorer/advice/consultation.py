"""`doctor(text)`: what is pasted in, a Consultation out: the message read, the job it is about, why it fails, and what to change. No torch.

A page and the command line draw the same Consultation; nothing in it needs either.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from explorer.advice import oom, reading, tried, worlds
from explorer.advice.diagnose import diagnose
from explorer.advice.effects import effects
from explorer.advice.fixes import Fix, propose
from explorer.advice.message import Message
from explorer.advice.remaining import remaining
from explorer.advice.remarks import SEVERITIES, Remark, of_findings
from explorer.advice.unsaid import unsaid
from explorer.catalog import cards, find_model, models, stand_in
from explorer.dsconfig import Finding, methods, resolve
from explorer.dsconfig.assumed import assumed
from explorer.dsconfig.read import Pasted, read
from explorer.errors import BadInput, CouldNotRun
from explorer.estimator import tapes
from explorer.estimator.estimate import Events, estimate, events
from explorer.estimator.work import outside_pytorch, with_micro_batch
from explorer.jsonfile import plain
from explorer.profile import Profile
from explorer.setup import Setup
from explorer.units import GiB, human, power_of_two

STOPS = frozenset(("not-json", "value-coerced", "key-unknown", "key-removed", "section-made"))
"""Of the findings of reading: where DeepSpeed itself would have stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Consultation:
    """All that is to be said. `setup` and `profile` are None where too little is known, and a remark says what is missing."""

    message: Message
    pasted: Pasted
    setup: Setup | None = None
    profile: Profile | None = None
    remarks: tuple[Remark, ...] = ()
    """What matters most first."""
    fixes: tuple[Fix, ...] = ()
    """The cheapest that fits first."""
    config: Mapping[str, Any] | None = None
    """The DeepSpeed config with every "auto" filled; what only a model can fill stays "auto" where none is known."""
    error: BadInput | CouldNotRun | None = None
    """Why there is no estimate, or none but of a model in the place of one that is not known."""

    @property
    def best(self) -> Fix | None:
        """The cheapest change that fits."""
        return next((fix for fix in self.fixes if fix.solves), None)

    @property
    def stops(self) -> tuple[Remark, ...]:
        """What DeepSpeed itself would not have taken as it was pasted."""
        return tuple(r for r in self.remarks if r.id in STOPS)

    def to_json(self) -> dict[str, Any]:
        """`check`'s answer (docs/contract.md)."""
        return {"oom": self.message.to_json(), "findings": [r.to_json() for r in self.remarks], "fixes": [f.to_json() for f in self.fixes], "config": None if self.config is None else dict(self.config), **self._answered()}

    def _answered(self) -> dict[str, Any]:
        """The job as it was understood, and its own answer; null where there is none."""
        return {
            "job": None if self.setup is None else self.setup.to_job(),
            "estimate": None if self.profile is None else self.profile.to_json(),
        }


def doctor(text: str, base: Setup | None = None, on_progress: tapes.Progress | None = None) -> Consultation:
    """The consultation of a pasted text. `base`: the job that stands on the page, which the text changes. Raises BadInput where the text is over 1 MiB."""
    return consult(base, read(text), oom.read(text), on_progress)


def consult(base: Setup | None, pasted: Pasted, message: Message, on_progress: tapes.Progress | None = None, batch_known: bool = False, gpus_known: bool = False, stop: threading.Event | None = None) -> Consultation:
    """The same of parts that were read one by one. A fault of the job is in `error` and among the remarks, never raised.

    `batch_known`: the base's batch is the job's own; else one that fits gives way to one that does not, where a message says that memory ran out.
    `gpus_known`: so is its world size.
    `stop`: set it and the fixes, which take most of the time, are no longer worked out.
    """
    told = [f for f in pasted.coercions if f.id != "trainer-assumed" or base is None or base.trainer is None]
    said = [*reading.remarks(message), *of_findings(told, "note"), *of_findings(pasted.unread, "note")]
    said = [replace(r, severity="problem") if r.id in STOPS or r.id in ("launched-with-python", "config-file", "recipe-file", "built-before-arguments", "batch-missing", "batch-unread") else r for r in said]
    setup, profile, fixes, error, config = None, None, (), None, None
    told_of_memory = message.kind != "none" or bool(message.cause)
    try:
        setup = _job(base, pasted)
        if setup is None:
            if not any(r.key == "model" for r in said):  # its absence is said once
                said.append(Remark(id="no-job", severity="hint", key="model", text="The text names no model and batch, so nothing can be estimated: choose them, or paste the command line or TrainingArguments too."))
            config, findings = _config_alone(pasted)
            said += of_findings(findings, "note")
        else:
            setup, error = _stood_in_for(setup, said, told_of_memory)
            config = dict(resolve(setup).config)
            setup, profile = _at_failure(setup, message, said, on_progress, batch_known or "micro_batch" in pasted.changes, gpus_known or "world_size" in pasted.changes)
            found = events(setup, on_progress) if message.is_gpu and message.requested is not None and error is None else None
            if found is not None and error is None:  # a stand-in's numbers say nothing against the message's
                setup, profile, found = _as_it_ran(setup, profile, found, message, said, on_progress, None if batch_known else pasted.changes)
            config = dict(resolve(setup).config)
            said = [*_first(setup, gpus_known or base is not None and not batch_known or "world_size" in pasted.changes, on_progress), *said]
            if base is None:
                missing = (f for f in assumed(setup, pasted.changes) if f.id != "gpus-assumed")
                said += of_findings(missing, "note")
            said += effects(setup, profile, pasted.launcher)
            said += diagnose(setup, profile, message, found)
            if error is None:
                said = [tried.retold(r, setup, profile, message) for r in said]
            if message.is_gpu and profile.verdict.answer == "fits" and error is None:
                said.append(remaining(profile, message))
            else:
                fixes = propose(setup, profile, message, stop)
    except (BadInput, CouldNotRun) as refused:
        error = refused
        if told_of_memory and getattr(refused, "field", "") == "model":
            text = f"The message is read by itself, without an estimate: {refused}"
            said.append(Remark(id="model-unknown", severity="note", key="model", text=text))
        else:
            said.append(Remark(id="refused" if isinstance(refused, BadInput) else "not-modelled", severity="problem", key=getattr(refused, "field", ""), text=f"{refused}"))
    ranked = sorted(said, key=lambda r: SEVERITIES.index(r.severity))
    return Consultation(message=message, pasted=pasted, setup=setup, profile=profile, remarks=tuple(ranked), fixes=tuple(fixes), config=config, error=error)


def _first(setup: Setup, gpus_known: bool, on_progress: tapes.Progress | None) -> Iterator[Remark]:
    """What stands before all else: that this is no DeepSpeed job; how many GPUs were assumed."""
    other = methods.sentence(setup)
    if other is not None:
        yield Remark(id="not-deepspeed", severity="cause", key="method", text=f"{other}.")
    if not gpus_known and setup.world_size == 1:
        yield Remark(id="gpus-assumed", severity="note", key="world_size", text=f"{worlds.sentence(setup, on_progress)}.")


_OF_THE_MODEL = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def _config_alone(pasted: Pasted) -> tuple[dict[str, Any] | None, tuple[Finding, ...]]:
    """(a pasted config resolved, what there is to say of it), with any model in the place of the one that is not known."""
    if "deepspeed" not in pasted.changes:
        return None, ()
    settings = resolve(Setup.from_job({"model": models()[0].name, "micro_batch": 1, **pasted.changes}))
    config = plain(settings.config, "deepspeed")
    zero = pasted.changes["deepspeed"].get("zero_optimization")
    for key in _OF_THE_MODEL:
        if isinstance(zero, dict) and zero.get(key) == "auto":
            config["zero_optimization"][key] = "auto"
    if "micro_batch" not in pasted.changes:
        config.update({k: "auto" for k in ("train_batch_size", "train_micro_batch_size_per_gpu")})
    return config, settings.findings


def _job(base: Setup | None, pasted: Pasted) -> Setup | None:
    """The base with what was pasted; None where there is neither model nor batch."""
    if base is None and "model" not in pasted.changes:
        return None
    if base is None and "micro_batch" not in pasted.changes:
        return replace(pasted, changes={**pasted.changes, "micro_batch": 1}).onto(None)
    return pasted.onto(base)


def _stood_in_for(setup: Setup, said: list[Remark], told_of_memory: bool) -> tuple[Setup, BadInput | None]:
    """A model that is not known gives way to the nearest of its family, which is told; raises BadInput where there is none."""
    try:
        find_model(setup.model)
    except BadInput as unknown:
        near = stand_in(setup.model) if isinstance(setup.model, str) else None
        if near is None:
            raise
        said.append(Remark(id="model-stand-in", severity="note" if told_of_memory else "problem", key="model", text=f"estimated as {near.name}, since {setup.model} is not known here; paste its config.json for its own numbers."))
        return setup.replace(model=near.name), unknown
    return setup, None


# --- what the message adds

def _at_failure(setup: Setup, message: Message, said: list[Remark], on_progress: tapes.Progress | None, batch_known: bool, gpus_known: bool) -> tuple[Setup, Profile]:
    """The job on the message's card, with its GPUs; and where nothing gives no batch and the job would fit, at the next power of two that does not."""
    setup = _on_its_host(_on_its_card(setup, message, said), message, said)
    if message.device_index is not None and message.device_index >= setup.world_size and not gpus_known:
        setup = _with_gpus(setup, message.device_index, said)
    profile = estimate(setup, largest=False, on_progress=on_progress)
    if batch_known or not message.is_gpu or profile.verdict.answer != "fits":
        return setup, profile
    return _doubled(setup, profile, said, on_progress)


def _with_gpus(setup: Setup, index: int, said: list[Remark]) -> Setup:
    """As many GPUs as the message's number implies, unless the job's own batch sizes are of fewer."""
    text, wider = f"The message is GPU {index}'s, so there are {index + 1} at least", setup.replace(world_size=index + 1)
    try:
        resolve(wider)
    except BadInput as refused:
        said.append(Remark(id="gpus-implied", severity="hint", key="world_size", text=f"{text}, of which {refused.field} is not: answered for {setup.world_size}. Say how many there are."))
        return setup
    said.append(Remark(id="gpus-implied", severity="note", key="world_size", text=f"{text}: taken so."))
    return wider


_LARGEST_BATCH = 1 << 16


def _doubled(setup: Setup, profile: Profile, said: list[Remark], on_progress: tapes.Progress | None) -> tuple[Setup, Profile]:
    """The batch doubled until it does not fit, as who tries larger ones does."""
    fitting = setup.micro_batch
    while profile.verdict.answer == "fits" and setup.micro_batch < _LARGEST_BATCH:
        fitting = setup.micro_batch
        setup = with_micro_batch(setup, power_of_two(fitting + 1))
        profile = estimate(setup, largest=False, on_progress=on_progress)
    said.append(Remark(id="batch-implied", severity="hint", key="micro_batch", text=f"The text gives no batch, and this job fits with {fitting} samples a GPU: answered for {setup.micro_batch}. Give the real one for its own answer."))
    return setup, profile


def _as_it_ran(setup: Setup, profile: Profile, found: Events, message: Message, said: list[Remark], on_progress: tapes.Progress | None, given: Mapping[str, Any] | None) -> tuple[Setup, Profile, Events]:
    """The job with the one thing that the message shows it to have, where that was not given; `given`: what was, None where all of the job was."""
    if any(r.id == "batch-implied" for r in said):
        return setup, profile, found
    missing = unsaid(setup, message, found, on_progress)
    if missing is None:
        return setup, profile, found
    taken = missing.agrees and given is not None and missing.key not in given
    said.append(missing.remark(taken))
    return (missing.setup, estimate(missing.setup, largest=False, on_progress=on_progress), events(missing.setup, on_progress)) if taken else (setup, profile, found)


def _on_its_host(setup: Setup, message: Message, said: list[Remark]) -> Setup:
    """With the host memory that the text says a node has, where the job does not say it."""
    if message.host_total_bytes is None or setup.host_ram_gib is not None:
        return setup
    text = f"The text's host has {human(message.host_total_bytes)} of memory: taken so."
    said.append(Remark(id="host-implied", severity="note", key="host_ram_gib", text=text))
    return setup.replace(host_ram_gib=round(message.host_total_bytes / GiB, 1))


_ALIKE = 0.01


def _on_its_card(setup: Setup, message: Message, said: list[Remark]) -> Setup:
    """The base's card where it is of the message's size, else the first common one that is, else the size alone."""
    if message.limit is not None and message.kind != "mps":
        return setup.replace(capacity_gib=round(message.limit.bytes / GiB, 2))
    if message.capacity is None or message.kind in ("mps", "xpu", "npu") or message.doubted("capacity"):
        return setup
    alike = (card for card in cards() if abs(card.total_bytes - message.capacity.bytes) <= _ALIKE * card.total_bytes)
    fitting = sorted(alike, key=lambda card: not card.common)
    if any(card.name == setup.gpu for card in fitting) or setup.capacity_gib is not None:
        return setup
    size = human(message.capacity.bytes)
    if fitting:
        said.append(Remark(id="card-implied", severity="note", key="gpu", text=f"The message's card has {size}: taken as {fitting[0].name}."))
        return setup.replace(gpu=fitting[0].name)
    outside = message.non_pytorch_bytes if message.process is not None and message.non_pytorch_bytes is not None else outside_pytorch(cards()[0], setup.world_size)
    room = message.capacity.bytes - outside - (message.other_processes_bytes or 0)
    said.append(Remark(id="card-implied", severity="note", key="gpu", text=f"The message's card has {size}, which no card here has: {human(room)} of it is taken as PyTorch's."))
    return setup.replace(gpu=None, capacity_gib=max(0.01, round(room / GiB, 2)))
