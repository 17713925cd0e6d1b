"""Read what a person pastes: DeepSpeed JSON, accelerate's YAML, TrainingArguments, a command line, a job file, in any mix with other text. No torch.

Nothing is run, and no file or address that the text names is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from explorer.dsconfig import named, quantization, without
from explorer.dsconfig.accelerate import read_yaml
from explorer.dsconfig.arguments import NAMES
from explorer.dsconfig.coerce import MOST_TOLD, coerced
from explorer.dsconfig.commands import WITH_PYTHON, read_commands
from explorer.dsconfig.defaults import fill
from explorer.dsconfig.findings import Finding
from explorer.dsconfig.forgiving import MOST_TOKENS, NotAnObject, Reader
from explorer.dsconfig.keys import ALIASES, ZERO
from explorer.dsconfig.literals import Bindings
from explorer.dsconfig.parts import Part, take_arguments, take_unknown
from explorer.dsconfig.sections import KNOWN, REMOVED
from explorer.dsconfig.snippets import read_calls
from explorer.dsconfig.trl import RELEASE
from explorer.errors import BadInput
from explorer.jsonfile import LARGEST_BYTES, plain
from explorer.setup import Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Pasted:
    """What a text says of a job. `changes` are fields of a Setup; findings name keys as the text does."""

    changes: Mapping[str, Any]
    forms: tuple[str, ...] = ()
    """What was recognised, in the order of the text: "DeepSpeed config", "TrainingArguments", ..."""
    coercions: tuple[Finding, ...] = ()
    """Where DeepSpeed, or JSON itself, would have stopped, and what was read."""
    unread: tuple[Finding, ...] = ()
    """What stands there and was not taken."""
    launcher: str | None = None
    """"deepspeed", "accelerate", "torchrun", "python", or None where the text does not say."""
    inferred: bool = False
    """Whether `deepspeed`, and `method`, are what the text names or leaves out, so that a config from elsewhere wins."""
    unseen: bool = False
    """Whether it names a DeepSpeed config of which nothing is known."""

    @property
    def understood(self) -> tuple[tuple[str, Any], ...]:
        """(path, value) of every setting taken, such as ("deepspeed.zero_optimization.stage", 2)."""
        return tuple(_leaves(self.changes, ""))

    def onto(self, base: Setup | None) -> Setup:
        """The base with what was pasted; without a base the text must name a model and a batch. Raises BadInput naming what is missing or cannot be."""
        job = {} if base is None else base.to_job()
        job.pop("schema", None)
        changes = self.complete() if base is None else dict(self.changes)
        if base is not None:
            _make_room(job, changes)
        return Setup.from_job({**job, **changes})

    def complete(self) -> dict[str, Any]:
        """The changes of a text that is all there is: a config that it names and nobody gives is taken as one of stage 2."""
        usual = {"deepspeed": named.usual()} if self.unseen else {}
        return {**usual, **self.changes}

    def beside_config(self) -> Pasted:
        """What is left of it where the DeepSpeed config comes from elsewhere: nothing that it only names is asked for."""
        gone = ("deepspeed", "method") if self.inferred else ()
        return replace(
            self, changes={k: v for k, v in self.changes.items() if k not in gone}, inferred=False, unseen=False,
            coercions=tuple(f for f in self.coercions if f.id not in without.IDS),
        )


def read(text: str, form: str | None = None) -> Pasted:
    """What a text says of a job; empty changes where it says nothing. Raises BadInput where it is over 1 MiB or holds what no config does.

    `form`: what its first object is known to be, "DeepSpeed config" or "TrainingArguments".
    """
    if len(text) > LARGEST_BYTES:
        raise BadInput("text", "is over 1 MiB; paste the configuration and the error only")
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ").replace("\ufeff", "")
    parts: list[Part] = []
    bindings = Bindings(text)
    for find in (partial(read_calls, bindings=bindings), partial(_objects, form=form, bindings=bindings), read_commands, read_yaml):
        found = list(islice(find(text), _MOST_PARTS))
        text = _without(text, found)
        parts += found
    return _together(sorted(parts, key=lambda p: p.start), bindings.text)


_MOST_PARTS = 50


def _without(text: str, parts: list[Part]) -> str:
    """The text with what was read blanked, lines kept."""
    for part in parts:
        text = text[: part.start] + re.sub(r"[^\n]", " ", text[part.start : part.end]) + text[part.end :]
    return text


# --- JSON

def _objects(text: str, form: str | None, bindings: Bindings) -> Iterator[Part]:
    """A part for every object that is a configuration; one without its outer braces counts too."""
    reader = Reader(text, bindings)
    at, found = text.find("{"), False
    while at >= 0 and reader.tokens <= MOST_TOKENS:
        part = _object(reader, at, None if found else form)
        found = found or part is not None
        if part is not None:
            yield part
        at = text.find("{", part.end if part else at + 1)
    start = text.find('"zero_optimization"')
    if not found and start >= 0:
        naked = Reader("{" + text[start:], Bindings(""))
        part = _object(naked, 0, form)
        if part is not None:
            part.start, part.end = start, min(len(text), start + part.end)
            yield part


def _object(reader: Reader, at: int, form: str | None) -> Part | None:
    try:
        value = reader.read(at)
    except NotAnObject:
        return None
    part = Part(form=form or form_of(value), start=at, end=max(at + 1, reader.at))
    if not part.form:
        return None
    alone = not reader.text[:at].strip()
    in_python = _ASSIGNED.search(reader.text, max(0, at - 100), at) is not None
    part.told = [Finding(id="not-json", key=f"line {reader.line(slip, 0 if alone else at)}{'' if alone else f' of the {part.form}'}", text=slip.text) for slip in reader.slips if not (in_python and slip.python)]
    _take_object(part, value)
    return part


_ASSIGNED = re.compile(r"[A-Za-z_\])][ \t]*(?::[^=\n]{1,80})?=\s*\Z")
"""Before an object that stands in a script."""

_MARKS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "zero_allow_untested_optimizer", "wall_clock_breakdown", "steps_per_print", "activation_checkpointing"}


def form_of(value: dict[str, Any]) -> str:
    """What an object is by its keys, one of `Part.form`; "" where it is none of them."""
    keys = set(value)
    if "model" in keys and "micro_batch" in keys:
        return "job file"
    if isinstance(value.get("model_type"), str):
        return "model config"
    if keys & _MARKS or any(isinstance(value.get(name), dict) and keys & (KNOWN | REMOVED.keys()) for name in ("fp16", "bf16", "bfloat16", "optimizer", "scheduler", "amp")):
        return "DeepSpeed config"
    if keys & (NAMES - KNOWN):
        return "TrainingArguments"
    if "stage" in keys and keys <= ZERO.keys() | ALIASES.keys() | {"cpu_offload_params"}:
        return "zero_optimization"
    return ""


def _take_object(part: Part, value: dict[str, Any]) -> None:
    match part.form:
        case "job file":
            part.job = {k: v for k, v in value.items() if k not in ("deepspeed", "trainer", "schema")}
            part.deepspeed = value.get("deepspeed") if isinstance(value.get("deepspeed"), dict) else None
            part.trainer = value.get("trainer") if isinstance(value.get("trainer"), dict) else None
        case "model config":
            part.job = {"model": value}
        case "TrainingArguments":
            part.trainer = {}
            take_arguments(part, value)
            take_unknown(part, whole=not part.tool)
            part.starts_alone = bool(part.tool)
        case "zero_optimization":
            part.form, part.deepspeed = "DeepSpeed config", {"zero_optimization": value}
        case _:
            part.deepspeed = value


# --- all together

_DEFAULT_BATCH = 8
"""per_device_train_batch_size where TrainingArguments leave it out (transformers/training_args.py)."""


def _together(parts: list[Part], text: str) -> Pasted:
    """Later pieces add to earlier ones, and win where they differ; a command wins over the file that it is given, a model's own line over its tokenizer's."""
    uses = any(p.names_config or p.launcher == "deepspeed" or p.deepspeed is not None and not p.wraps for p in parts)
    parts = sorted((p for p in parts if not (uses and p.wraps)), key=lambda p: p.names_recipe != "")
    changes: dict[str, Any] = {}
    for part in sorted(parts, key=lambda p: p.form != "Python beside the model"):
        changes.update(part.job)
    told = [f for p in parts for f in p.told]
    unread = [f for p in parts for f in p.unread if not (f.key == "model" and f.id == "unread" and "model" in changes)]
    given = [p.deepspeed for p in parts if p.deepspeed is not None]
    trainers = [p.trainer for p in parts if p.trainer is not None]
    if trainers:
        changes["trainer"] = plain({k: v for trainer in trainers for k, v in trainer.items() if v is not None}, "trainer")
    written = any(p.deepspeed is not None and p.form not in _ANSWERS and not p.wraps for p in parts)
    instead = without.Meant() if written and "method" not in changes else without.meant(parts, changes, told)
    missing = without.recipe_missing(parts)
    if missing:
        told.append(Finding(id="recipe-file", key="", text=f"{missing[:80]} is not opened: paste the arguments that are in it too"))
    if given:
        changes["deepspeed"], more = coerced(plain(_merged(given, told), "deepspeed"))
        told += more
    if instead.config is not None:
        changes["deepspeed"] = plain(instead.config, "deepspeed")
        changes |= {"method": instead.method} if instead.method else {}
    _trainer_of_config(parts, changes, told, bool(trainers), bool(given))
    for part in (p for p in parts if p.defaults and not (missing and p.names_recipe)):
        told += [f for f in [_filled(part, changes)] if f is not None]
    _find_batch(changes, any(p.form in _ARGUMENTS or p.tool for p in parts), told, unread)
    _from_arguments(changes)
    _quantize(parts, changes, unread)
    launcher = next((p.launcher for p in reversed(parts) if p.launcher), None)
    _find_release(text, changes, told)
    told += _of_the_run(parts, changes, launcher)
    forms = tuple(dict.fromkeys(p.form for p in parts if p.form != "Python beside the model"))
    inferred = not written and instead.config is not None and not instead.surely
    return Pasted(changes=changes, forms=forms, coercions=_first(told), unread=_first(unread), launcher=launcher, inferred=inferred, unseen=instead.unseen and not given)


_ARGUMENTS = ("TrainingArguments",)
_ANSWERS = ("accelerate config", "command line")
"""Where a config is accelerate's own answers, which give way to a file that the Trainer's arguments name."""


def _trainer_of_config(parts: list[Part], changes: dict[str, Any], told: list[Finding], arguments: bool, given: bool) -> None:
    """Whether the Trainer is assumed for a config's "auto", and what a config lacks beside it."""
    config = changes.get("deepspeed")
    if config is not None and not arguments and _has_auto(config):
        changes["trainer"] = {}
        if any(p.deepspeed is not None and p.form == "DeepSpeed config" for p in parts):
            told.append(Finding(id="trainer-assumed", key="trainer", text="\"auto\" is the Hugging Face Trainer's to fill: its defaults are taken, since no TrainingArguments were pasted"))
    if given and "method" not in changes and changes.get("trainer") and not changes["deepspeed"].keys() & {"train_batch_size", "train_micro_batch_size_per_gpu"}:
        told.append(Finding(id="batch-missing", key="train_micro_batch_size_per_gpu", text="is missing, as is train_batch_size, and DeepSpeed stops without either, for nothing but an \"auto\" is filled from the arguments; add \"train_micro_batch_size_per_gpu\": \"auto\", which is answered here"))


def _filled(part: Part, changes: dict[str, Any]) -> Finding | None:
    """What the piece's class or tool takes where nothing else is said."""
    whole = f"TRL {RELEASE}" if part.arguments_class else part.tool
    return fill(part.arguments_class or part.tool, whole, part.defaults, changes)


def _quantize(parts: list[Part], changes: dict[str, Any], unread: list[Finding]) -> None:
    """Weights in 4 bit, for which the model's config is the place."""
    section = next((p.quantization for p in reversed(parts) if p.quantization is not None), None)
    if section is not None:
        trainer, config = changes.get("trainer") or {}, changes.get("deepspeed", {})
        half = trainer.get("fp16") is True or isinstance(config.get("fp16"), Mapping) and config["fp16"].get("enabled") is True
        told = quantization.onto(changes, section, "float16" if half else "bfloat16")
        unread += [told] if told is not None else []


def _first(found: list[Finding]) -> tuple[Finding, ...]:
    """As many as anybody reads, and how many there are besides."""
    if len(found) <= MOST_TOLD:
        return tuple(found)
    more = Finding(id="more", key="", text=f"and {len(found) - MOST_TOLD:,} more of this kind")
    return (*found[:MOST_TOLD], more)


def _merged(configs: list[dict[str, Any]], told: list[Finding]) -> dict[str, Any]:
    different = sum(config not in configs[:i] for i, config in enumerate(configs))
    if different > 1:
        told.append(Finding(id="several-configs", key="deepspeed", text=f"{different} DeepSpeed configs were pasted; the last one is read"))
    return configs[-1]


def _has_auto(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_auto(v) for v in value.values())
    return value == "auto"


_BATCH = ("per_device_train_batch_size", "per_gpu_train_batch_size")


def _find_batch(changes: dict[str, Any], arguments: bool, told: list[Finding], unread: list[Finding]) -> None:
    """Samples per GPU: the Trainer's, the config's, or the config's total over GPUs and accumulation; none where the arguments give one that cannot be read."""
    config, trainer = changes.get("deepspeed", {}), changes.get("trainer") or {}
    total, steps, gpus = config.get("train_batch_size"), config.get("gradient_accumulation_steps", trainer.get("gradient_accumulation_steps", 1)), changes.get("world_size", 1)
    for value in (trainer.get("per_device_train_batch_size"), config.get("train_micro_batch_size_per_gpu")):
        if _is_count(value):
            changes["micro_batch"] = value
            _find_gpus(changes, total, value, steps, told)
            return
    if "micro_batch" in changes:
        return
    if _is_count(total) and _is_count(gpus) and not arguments:
        steps = steps if _is_count(steps) else 1
        if total % (steps * gpus) == 0:
            changes["micro_batch"] = total // (steps * gpus)
    elif code := next((f for f in unread if f.id == "unread" and f.key in (*_BATCH, "**")), None):
        if code.key != "**":
            unread.remove(code)
        within = "may be in what is not read here" if code.key == "**" else code.text
        told.append(Finding(id="batch-unread", key=_BATCH[0], text=f"{within}: the job's own batch stays, 1 where it has none; write the number"))
    elif arguments:
        changes["micro_batch"] = _DEFAULT_BATCH
        told.append(Finding(id="batch-default", key="per_device_train_batch_size", text=f"is not given: the Trainer's default of {_DEFAULT_BATCH} is taken"))


_RELEASE = re.compile(r"\bdeepspeed[`*]{0,3}(?:[ _](?:version|info))?[ \t:=.v`*\"']{1,80}(?:version=)?(\d{1,3}\.\d{1,3}\.\d{1,3})(?!\.?\d)", re.IGNORECASE)
"""`pip freeze` and `pip list`, a requirement, `ds_report`, and the line that DeepSpeed logs when it starts."""


def _find_release(text: str, changes: dict[str, Any], told: list[Finding]) -> None:
    """The release that the text names last."""
    named = [match[1] for match in islice(_RELEASE.finditer(text), 1000)]
    if named and "deepspeed_version" not in changes:
        changes["deepspeed_version"] = named[-1]
        told.append(Finding(id="release-read", key="deepspeed_version", text=f"is taken as {named[-1]}, which the text names"))


def _find_gpus(changes: dict[str, Any], total: Any, micro: int, steps: Any, told: list[Finding]) -> None:
    """How many GPUs a total is of, where nothing else says it."""
    shared = changes["deepspeed"].get("sequence_parallel_size", 1) if "deepspeed" in changes else 1
    if "world_size" in changes or shared != 1 or not (_is_count(total) and _is_count(steps)) or total % (micro * steps):
        return
    changes["world_size"] = total // (micro * steps)
    told.append(Finding(id="gpus-of-total", key="train_batch_size", text=f"is {total}, which is {micro} samples × {steps} accumulated × {changes['world_size']} GPUs: so many are taken"))


def _of_the_run(parts: list[Part], changes: dict[str, Any], launcher: str | None) -> Iterator[Finding]:
    """What the order of a script's lines and its launcher mean for DeepSpeed."""
    if launcher == "python" and "deepspeed" in changes and "method" not in changes and not any(f.id == "launched-with-python" for p in parts for f in p.told):
        yield Finding(id="launched-with-python", key="launcher", text=WITH_PYTHON)
    made = [p.makes for p in parts if p.makes]
    zero = changes.get("deepspeed", {}).get("zero_optimization", {})
    if made[:1] == ["model"] and "arguments" in made and "zero_init" not in changes and isinstance(zero, Mapping) and zero.get("stage", 3) == 3:
        changes["zero_init"] = False
        yield Finding(id="built-before-arguments", key="zero_init", text="is off: the model is made before the TrainingArguments, and so not under zero.Init; every process then holds it whole, on the host and on the GPU, before stage 3 divides it; make the arguments first")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _from_arguments(changes: dict[str, Any]) -> None:
    """What the Trainer's arguments say of the model's run."""
    trainer = changes.get("trainer")
    if not isinstance(trainer, dict):
        return
    if trainer.get("gradient_checkpointing") is True:
        keywords = trainer.get("gradient_checkpointing_kwargs")
        changes["gradient_checkpointing"] = dict(keywords) if isinstance(keywords, Mapping) else True
    if trainer.get("use_cache") is True:
        changes["use_cache"] = True


def _make_room(job: dict[str, Any], changes: dict[str, Any]) -> None:
    """Take out of the base what belongs to what was replaced."""
    if "model" in changes and changes["model"] != job.get("model"):
        for name in ("sequence", "target_sequence", "image_size", "lora"):
            job[name] = None
        job["trainable"] = ["*"]
    if changes.get("trainer"):
        job.update(gradient_checkpointing=changes["trainer"].get("gradient_checkpointing", False) is True, use_cache=False)
    if "deepspeed" in changes and "method" not in changes:
        job.pop("method", None)
    if "deepspeed" not in changes and "micro_batch" in changes:
        job["deepspeed"] = {k: v for k, v in (job.get("deepspeed") or {}).items() if k not in ("train_micro_batch_size_per_gpu", "train_batch_size")}
    if changes.get("trainer") == {} and job.get("trainer"):
        del changes["trainer"]  # assumed only
    if isinstance(job.get("trainer"), dict) and "micro_batch" in changes and "trainer" not in changes:
        job["trainer"].pop("per_device_train_batch_size", None)
    if _is_count(changes.get("world_size")) and job.get("rank", 0) >= changes["world_size"]:
        job["rank"] = 0


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif path:
        yield path, value
