"""Setup: what is to be trained, and on what. Immutable, comparable, hashable; no torch.

A Setup is the job file of the command-line contract (docs/contract.md) as an object: `Setup.from_job(dict)` checks it,
`setup.to_job()` writes it. What DeepSpeed makes of its `deepspeed` part is `dsconfig.resolve(setup)`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from explorer import allocator_options
from explorer.errors import BadInput, nearest, shown
from explorer.jsonfile import plain, read_json, scalar

SCHEMA = 1
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
METHODS = ("deepspeed", "fsdp", "ddp")
_LARGEST = 1 << 40
"""No count in a job is larger than this: beyond it a typo is likelier than a computer."""
_LARGEST_GIB = 1e9
_MOST_GPUS = 1 << 20
_MOST_PATTERNS = 1000
_MOST_SAMPLES = 100_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """One training job. Field names and defaults are those of the job file."""

    model: str | Mapping[str, Any]
    """A catalog name, a folder or file with a `config.json`, a hub id, or the config itself."""
    micro_batch: int
    """Samples per GPU and forward."""
    attention: str = "sdpa"
    sequence: int | None = None
    """Decoder-only, encoder or text length in tokens; None is the model's default."""
    lengths: tuple[int, ...] | None = None
    """Tokens of each sample, in the order in which they come; `sequence` is then where they are cut."""
    target_sequence: int | None = None
    """Label length of an encoder-decoder."""
    image_size: int | None = None
    """Pixels of a side."""
    padding: bool = False
    use_cache: bool = False
    gradient_checkpointing: bool | Mapping[str, Any] = False
    trainable: tuple[str, ...] = ("*",)
    lora: Mapping[str, Any] | None = None
    method: str = "deepspeed"
    """"deepspeed"; "fsdp" or "ddp" where `deepspeed` is the nearest equivalent (dsconfig/methods.py)."""
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    deepspeed_version: str | None = None
    """The release that runs; None is the one whose source was read (dsconfig/versions.py)."""
    trainer: Mapping[str, Any] | None = None
    zero_init: bool = True
    world_size: int = 1
    data_parallel_size: int | None = None
    """GPUs that ZeRO divides over, where the others share their samples; None is all. `rank` counts among these."""
    gpus_per_node: int = 8
    rank: int = 0
    gpu: str | None = None
    capacity_gib: float | None = None
    host_ram_gib: float | None = None
    allocator: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _own(f.name, getattr(self, f.name)))
        _check(self)

    @classmethod
    def from_job(cls, job: Mapping[str, Any]) -> Setup:
        """The Setup of a job file's content. Raises BadInput naming the field."""
        if not isinstance(job, Mapping):
            raise BadInput("job", f"is {shown(job)}; give a JSON object such as {{\"model\": \"gpt2\", \"micro_batch\": 8}}")
        known = {f.name for f in fields(cls)} | {"schema"}
        for key in job:
            if key not in known:
                raise BadInput(str(key) or '""', f"is not a key of a job{_belongs(key) or _nearest(str(key), known)}")
        schema = scalar(job.get("schema", SCHEMA))
        if isinstance(schema, bool) or schema != SCHEMA:
            raise BadInput("schema", f"is {shown(schema)}; this version reads schema {SCHEMA}")
        for required in ("model", "micro_batch"):
            if job.get(required) is None:
                raise BadInput(required, "is required" + (": a catalog name, a config.json or a hub id" if required == "model" else ": samples per GPU, such as 8"))
        given = {k: v for k, v in job.items() if k != "schema"}
        for key in [k for k, v in given.items() if v is None and k in _NONE_IS_DEFAULT]:
            del given[key]
        _fill_from_trainer(given)
        return cls(**given)

    @classmethod
    def from_file(cls, path: str | Path) -> Setup:
        """The Setup of a job file. Raises BadInput where it cannot be read or is not JSON."""
        return cls.from_job(read_json(path, "job"))

    def to_job(self) -> dict[str, Any]:
        """The job file of this Setup, every key present, but for a `method` that is DeepSpeed and `lengths` that nobody gave."""
        written = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.method == METHODS[0]:
            del written["method"]
        if self.lengths is None:
            del written["lengths"]
        return {"schema": SCHEMA, **plain(written, "job")}

    def replace(self, **changes: Any) -> Setup:
        """A copy with some fields changed, checked anew."""
        return replace(self, **changes)

    def with_deepspeed(self, path: str, value: Any) -> Setup:
        """A copy with one DeepSpeed key set, "zero_optimization.stage" say; None removes it."""
        config = plain(self.deepspeed, "deepspeed")
        *parents, last = path.split(".")
        section = config
        for name in parents:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section.pop(last, None)
        if value is not None:
            section[last] = value
        return self.replace(deepspeed=config)

    @property
    def data_ranks(self) -> int:
        """GPUs that ZeRO divides over."""
        return self.data_parallel_size or self.world_size

    @cached_property
    def canonical(self) -> str:
        """One text for all equal Setups."""
        return json.dumps(self.to_job(), sort_keys=True, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """A short name for this Setup, the same in every process."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setup) and self.canonical == other.canonical

    def __hash__(self) -> int:
        return hash(self.canonical)


_WHOLE = {
    "micro_batch", "sequence", "target_sequence", "image_size", "world_size", "data_parallel_size", "gpus_per_node", "rank",
}
"""Counts: a whole float, 4.0, is taken for the integer that it is."""
_NONE_IS_DEFAULT = {"attention", "method", "padding", "use_cache", "gradient_checkpointing", "trainable", "deepspeed", "zero_init", "world_size", "gpus_per_node", "rank", "allocator"}


def _own(name: str, value: Any) -> Any:
    """A field's value in plain types that no one else holds."""
    if isinstance(value, Mapping):
        copied = plain(value, name)
        return {"use_reentrant": True, **copied} if name == "gradient_checkpointing" else copied  # torch's default where an object does not say
    if name == "trainable" and isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(value)
    if name == "lengths" and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(int(n) if isinstance(n, float) and n.is_integer() else n for n in value)
    value = scalar(value)
    return int(value) if name in _WHOLE and isinstance(value, float) and value.is_integer() else value


def _fill_from_trainer(given: dict[str, Any]) -> None:
    """What the job leaves out and the Trainer's arguments say of the model."""
    trainer = given.get("trainer")
    if not isinstance(trainer, Mapping):
        return
    if "gradient_checkpointing" not in given and trainer.get("gradient_checkpointing") is True:
        keywords = trainer.get("gradient_checkpointing_kwargs")
        given["gradient_checkpointing"] = keywords if isinstance(keywords, Mapping) else True
    if "use_cache" not in given and trainer.get("use_cache") is True:
        given["use_cache"] = True


_ELSEWHERE = {
    "deepspeed": ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler", "gradient_clipping", "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu", "activation_checkpointing"),
    "trainer": ("per_device_train_batch_size", "learning_rate", "optim", "weight_decay", "max_grad_norm", "output_dir", "num_train_epochs", "gradient_checkpointing_kwargs"),
    "model": ("model_type", "architectures", "hidden_size", "num_hidden_layers", "vocab_size"),
}
"""Keys of the three objects that a job holds, by which a file of another kind is known."""


def _belongs(key: Any) -> str:
    """The way out for a key that is one of another file's."""
    return next((f'; put the whole file into "{part}" of a job' for part, keys in _ELSEWHERE.items() if key in keys), "")


def _nearest(word: str, known: set[str]) -> str:
    return nearest(word, known) or f"; the keys are {', '.join(sorted(known))}"


def _check(s: Setup) -> None:
    if isinstance(s.model, str):
        if not s.model.strip():
            raise BadInput("model", "is empty; give a catalog name such as \"gpt2\", a config.json or a hub id")
    elif not isinstance(s.model, Mapping):
        raise BadInput("model", f"is {shown(s.model)}; give a name, a path, or a config object")
    _count(s, "micro_batch", 1)
    for name in ("sequence", "target_sequence", "image_size"):
        _count(s, name, 1, optional=True)
    _check_lengths(s.lengths)
    for name in ("world_size", "gpus_per_node"):
        _count(s, name, 1, most=_MOST_GPUS)
    _count(s, "rank", 0)
    _count(s, "data_parallel_size", 1, optional=True)
    if s.world_size % s.data_ranks:
        raise BadInput("data_parallel_size", f"is {s.data_parallel_size}, which does not divide world_size, {s.world_size}; leave it out where every GPU has samples of its own")
    if s.rank >= s.data_ranks:
        name = "world_size" if s.data_parallel_size is None else "data_parallel_size"
        raise BadInput("rank", f"is {s.rank} but {name} is {s.data_ranks}; ranks run from 0 to {s.data_ranks - 1}")
    if s.attention not in ATTENTIONS:
        raise BadInput("attention", f"is {shown(s.attention)}; choose one of {', '.join(ATTENTIONS)}")
    if s.method not in METHODS:
        raise BadInput("method", f"is {shown(s.method)}; choose one of {', '.join(METHODS)}")
    for name in ("padding", "use_cache", "zero_init"):
        if not isinstance(getattr(s, name), bool):
            raise BadInput(name, f"is {shown(getattr(s, name))}; give true or false")
    for name in ("deepspeed", "allocator"):
        if not isinstance(getattr(s, name), Mapping):
            raise BadInput(name, f"is {shown(getattr(s, name))}; give an object")
    for name in ("trainer", "lora"):
        if getattr(s, name) is not None and not isinstance(getattr(s, name), Mapping):
            raise BadInput(name, f"is {shown(getattr(s, name))}; give an object or null")
    if not isinstance(s.trainable, tuple) or not s.trainable or not all(isinstance(p, str) for p in s.trainable):
        raise BadInput("trainable", "must be a list of parameter name patterns, such as [\"*\"] or [\"visual_projection*\"]")
    if len(s.trainable) > _MOST_PATTERNS:
        raise BadInput("trainable", f"holds {len(s.trainable)} patterns; give at most {_MOST_PATTERNS}, with * for what names have in common")
    for name in ("capacity_gib", "host_ram_gib"):
        _positive(s, name)
    if s.gpu is not None and (not isinstance(s.gpu, str) or not s.gpu.strip()):
        raise BadInput("gpu", f"is {shown(s.gpu)}; give a card's name, such as \"A100-80GB\", or null")
    _check_checkpointing(s.gradient_checkpointing)
    allocator_options.check(s.allocator)


def _check_lengths(asked: Any) -> None:
    if asked is None:
        return
    if not isinstance(asked, tuple) or not asked:
        raise BadInput("lengths", f"is {shown(asked)}; give a list of the samples' lengths in tokens, such as [700, 1100]")
    if len(asked) > _MOST_SAMPLES:
        raise BadInput("lengths", f"holds {len(asked)} samples; give at most {_MOST_SAMPLES}, which stand for the others")
    for n in asked:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _LARGEST:
            raise BadInput("lengths", f"holds {shown(n)}; give each sample's length as a whole number of tokens of at least 1")


_CHECKPOINTING = {"use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop"}
"""What `torch.utils.checkpoint.checkpoint` takes and JSON can say."""


def _check_checkpointing(asked: Any) -> None:
    if not isinstance(asked, bool | Mapping):
        raise BadInput("gradient_checkpointing", f"is {shown(asked)}; give true, false, or an object such as {{\"use_reentrant\": false}}")
    for key, value in asked.items() if isinstance(asked, Mapping) else ():
        if key not in _CHECKPOINTING:
            raise BadInput(f"gradient_checkpointing.{key}", f"is not an argument of torch's checkpoint{_nearest(key, _CHECKPOINTING)}")
        if key == "determinism_check":
            if value not in ("default", "none"):
                raise BadInput(f"gradient_checkpointing.{key}", f"is {shown(value)}; choose \"default\" or \"none\"")
        elif not isinstance(value, bool):
            raise BadInput(f"gradient_checkpointing.{key}", f"is {shown(value)}; give true or false")
    if isinstance(asked, Mapping) and asked.get("debug") and asked["use_reentrant"]:
        raise BadInput("gradient_checkpointing.debug", "is true, which torch takes only with \"use_reentrant\": false; add that, or leave debug out")


def _count(s: Setup, name: str, least: int, optional: bool = False, most: int = _LARGEST) -> None:
    value = getattr(s, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(name, f"is {shown(value)}; give a whole number")
    if value < least:
        raise BadInput(name, f"is {shown(value)}; give a whole number of at least {least}")
    if value > most:
        raise BadInput(name, f"is {shown(value)}, which no machine can hold; give at most {most}")


def _positive(s: Setup, name: str) -> None:
    value = getattr(s, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadInput(name, f"is {shown(value)}; give a size in GiB above 0")
    if value > _LARGEST_GIB:
        raise BadInput(name, f"is {shown(value)} GiB, more than any machine has; give the size in GiB, not in bytes")
