"""Setup: what is to be trained, and on what. Immutable, comparable, hashable; no torch.

A Setup is the job file of the command-line contract (docs/contract.md) as an object: `Setup.from_job(dict)` checks it,
`setup.to_job()` writes it. What DeepSpeed makes of its `deepspeed` part is `dsconfig.resolve(setup)`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from explorer.errors import BadInput

SCHEMA = 1
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
_LARGEST = 1 << 40
"""No count in a job is larger than this: beyond it a typo is likelier than a computer."""
_LARGEST_FILE_BYTES = 4_000_000
_TOO_DEEP = "is nested too deeply to be a configuration"


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
    target_sequence: int | None = None
    """Label length of an encoder-decoder."""
    image_size: int | None = None
    """Pixels of a side."""
    padding: bool = False
    use_cache: bool = False
    gradient_checkpointing: bool | Mapping[str, Any] = False
    trainable: tuple[str, ...] = ("*",)
    lora: Mapping[str, Any] | None = None
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] | None = None
    zero_init: bool = True
    world_size: int = 1
    gpus_per_node: int = 8
    rank: int = 0
    gpu: str | None = None
    capacity_gib: float | None = None
    host_ram_gib: float | None = None
    allocator: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_job(cls, job: Mapping[str, Any]) -> Setup:
        """The Setup of a job file's content. Raises BadInput naming the field."""
        if not isinstance(job, Mapping):
            raise BadInput("job", "must be a JSON object such as {\"model\": \"gpt2\", \"micro_batch\": 8}")
        known = {f.name for f in fields(cls)} | {"schema"}
        for key in job:
            if key not in known:
                raise BadInput(str(key), f"is not a key of a job{_nearest(str(key), known)}")
        if job.get("schema", SCHEMA) != SCHEMA:
            raise BadInput("schema", f"is {job['schema']!r}; this version reads schema {SCHEMA}")
        for required in ("model", "micro_batch"):
            if job.get(required) is None:
                raise BadInput(required, "is required" + (": a catalog name, a config.json or a hub id" if required == "model" else ": samples per GPU, such as 8"))
        given = {k: v for k, v in job.items() if k != "schema"}
        for key in [k for k, v in given.items() if v is None and k in _NONE_IS_DEFAULT]:
            del given[key]
        _fill_from_trainer(given)
        if isinstance(given.get("trainable"), list):
            given["trainable"] = tuple(given["trainable"])
        return cls(**given)

    @classmethod
    def from_file(cls, path: str | Path) -> Setup:
        """The Setup of a job file. Raises BadInput where it cannot be read or is not JSON."""
        return cls.from_job(read_json(path, "job"))

    def to_job(self) -> dict[str, Any]:
        """The job file of this Setup, every key present."""
        job = {f.name: getattr(self, f.name) for f in fields(self)}
        job["trainable"] = list(self.trainable)
        return {"schema": SCHEMA, **json.loads(json.dumps(job, default=_plain))}

    def replace(self, **changes: Any) -> Setup:
        """A copy with some fields changed, checked anew."""
        return replace(self, **changes)

    def with_deepspeed(self, path: str, value: Any) -> Setup:
        """A copy with one DeepSpeed key set, "zero_optimization.stage" say; None removes it."""
        config = json.loads(json.dumps(self.deepspeed, default=_plain))
        *parents, last = path.split(".")
        section = config
        for name in parents:
            section = section.setdefault(name, {})
        section.pop(last, None)
        if value is not None:
            section[last] = value
        return self.replace(deepspeed=config)

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


_NONE_IS_DEFAULT = {"attention", "padding", "use_cache", "gradient_checkpointing", "trainable", "deepspeed", "zero_init", "world_size", "gpus_per_node", "rank", "allocator"}


def read_json(path: str | Path, field_name: str) -> Any:
    """A JSON file's content; BadInput naming `field_name` where it is missing, too large, or broken."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise BadInput(field_name, f"{path} is {'a directory, ' if Path(path).is_dir() else ''}not a file; give a JSON file")
        if Path(path).stat().st_size > _LARGEST_FILE_BYTES:
            raise BadInput(field_name, f"{path} is too large to be a configuration (over {_LARGEST_FILE_BYTES // 10**6} MB)")
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(field_name, f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadInput(field_name, f"{path} is not text in UTF-8") from None
    return parse_json(text, field_name)


def parse_json(text: str, field_name: str) -> Any:
    """A JSON text's value; BadInput naming the line where it breaks."""
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        raise BadInput(field_name, f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise BadInput(field_name, _TOO_DEEP) from None
    except ValueError:  # an integer of thousands of digits
        raise BadInput(field_name, "holds a number too long to be read") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    raise TypeError(f"holds a {type(value).__name__}, which JSON has no form for")


def _check_json(name: str, value: Any) -> None:
    """Whatever a job holds can be written to a file and read back by any program."""
    try:
        text = json.dumps(value, default=_plain, allow_nan=False)
    except RecursionError:
        raise BadInput(name, _TOO_DEEP) from None
    except TypeError as error:
        raise BadInput(name, str(error)) from None
    except ValueError:
        raise BadInput(name, "holds NaN, an infinity, or itself, which JSON has no form for") from None
    if len(text) > _LARGEST_FILE_BYTES:
        raise BadInput(name, f"is too large to be a configuration (over {_LARGEST_FILE_BYTES // 10**6} MB)")


def _fill_from_trainer(given: dict[str, Any]) -> None:
    """What the job leaves out and the Trainer's arguments say of the model."""
    trainer = given.get("trainer")
    if not isinstance(trainer, Mapping):
        return
    if "gradient_checkpointing" not in given and trainer.get("gradient_checkpointing"):
        given["gradient_checkpointing"] = trainer.get("gradient_checkpointing_kwargs") or True
    if "use_cache" not in given and trainer.get("use_cache"):
        given["use_cache"] = True


def _nearest(word: str, known: set[str]) -> str:
    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; the keys are {', '.join(sorted(known))}"


def _check(s: Setup) -> None:
    if isinstance(s.model, str):
        if not s.model.strip():
            raise BadInput("model", "is empty; give a catalog name such as 'gpt2', a config.json or a hub id")
    elif not isinstance(s.model, Mapping):
        raise BadInput("model", f"is {_kind(s.model)}; give a name, a path, or a config object")
    for name in ("model", "gradient_checkpointing", "lora", "deepspeed", "trainer"):
        if isinstance(getattr(s, name), Mapping):
            _check_json(name, getattr(s, name))
    _count(s, "micro_batch", 1)
    for name in ("sequence", "target_sequence", "image_size"):
        _count(s, name, 1, optional=True)
    for name in ("world_size", "gpus_per_node"):
        _count(s, name, 1)
    _count(s, "rank", 0)
    if s.rank >= s.world_size:
        raise BadInput("rank", f"is {s.rank} but world_size is {s.world_size}; ranks run from 0 to {s.world_size - 1}")
    if s.attention not in ATTENTIONS:
        raise BadInput("attention", f"is {s.attention!r}; choose one of {', '.join(ATTENTIONS)}")
    for name in ("padding", "use_cache", "zero_init"):
        if not isinstance(getattr(s, name), bool):
            raise BadInput(name, f"is {getattr(s, name)!r}; give true or false")
    if not isinstance(s.gradient_checkpointing, bool | Mapping):
        raise BadInput("gradient_checkpointing", f"is {s.gradient_checkpointing!r}; give true, false, or an object such as {{\"use_reentrant\": false}}")
    for name in ("deepspeed", "allocator"):
        if not isinstance(getattr(s, name), Mapping):
            raise BadInput(name, f"is {_kind(getattr(s, name))}; give an object")
    for name in ("trainer", "lora"):
        if getattr(s, name) is not None and not isinstance(getattr(s, name), Mapping):
            raise BadInput(name, f"is {_kind(getattr(s, name))}; give an object or null")
    if not isinstance(s.trainable, tuple) or not s.trainable or not all(isinstance(p, str) for p in s.trainable):
        raise BadInput("trainable", "must be a list of parameter name patterns, such as [\"*\"] or [\"visual_projection*\"]")
    for name in ("capacity_gib", "host_ram_gib"):
        _positive(s, name)
    if s.gpu is not None and not isinstance(s.gpu, str):
        raise BadInput("gpu", f"is {_kind(s.gpu)}; give a card's name, such as \"A100-80GB\"")
    for key in s.allocator:
        if key not in ("expandable_segments", "max_split_size_mb"):
            raise BadInput(f"allocator.{key}", f"is not an allocator option{_nearest(str(key), {'expandable_segments', 'max_split_size_mb'})}")
    if not isinstance(s.allocator.get("expandable_segments", False), bool):
        raise BadInput("allocator.expandable_segments", f"is {s.allocator['expandable_segments']!r}; give true or false")
    split = s.allocator.get("max_split_size_mb")
    if split is not None and (isinstance(split, bool) or not isinstance(split, int) or split <= 20):
        raise BadInput("allocator.max_split_size_mb", f"is {split!r}; PyTorch takes a whole number above 20")


def _kind(value: Any) -> str:
    return {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list", type(None): "null"}.get(type(value), type(value).__name__)


def _count(s: Setup, name: str, least: int, optional: bool = False) -> None:
    value = getattr(s, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(name, f"is {value!r}; give a whole number")
    if not least <= value <= _LARGEST:
        raise BadInput(name, f"is {value}; give a whole number of at least {least}" if value < least else f"is {value}, which no machine can hold; give a smaller number")


def _positive(s: Setup, name: str) -> None:
    value = getattr(s, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise BadInput(name, f"is {value!r}; give a size in GiB above 0")
