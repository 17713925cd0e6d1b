"""Python as text: the calls that say how a model is trained, read by `ast` and never run. No torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from explorer.dsconfig import calls
from explorer.dsconfig.findings import Finding
from explorer.dsconfig.literals import Bindings, Names, closing, keywords, literal, parsed, written
from explorer.dsconfig.parts import Part, take_arguments
from explorer.dsconfig.trl import CONFIGS, LENGTHS, defaults
from explorer.errors import shown

_CALL = re.compile(r"(?<!class )(?<!def )\b([A-Za-z_]\w{0,60}(?:\.\w{1,60}){0,4})\s{0,8}\(")
_OF_A_MODEL = ("pretrained_model_name_or_path", "attn_implementation", "use_flash_attention_2", "load_in_4bit", "load_in_8bit")
_MOST_CALLS = 200


def read_calls(text: str, bindings: Bindings) -> Iterator[Part]:
    """A part for every call that is understood, in the order of the text. `bindings`: the names that the text gives to values."""
    end = 0
    for count, match in enumerate(m for m in _CALL.finditer(text) if _wanted(m[1])):
        if count >= _MOST_CALLS:
            return
        if match.start() < end:
            continue
        close = closing(text, match.end())
        if close is None:
            continue
        inside = text[match.end() : close]
        if match[1] == "dict" and not any(f"{key}=" in inside for key in _OF_A_CONFIG):
            continue
        part, names = Part(form="Python", start=match.start(), end=close), bindings.before(match.start())
        if calls.is_trainer(match[1]):  # whose arguments are calls that are read by themselves
            part.end = match.end()
        end = part.end
        if match[1] != "dict":
            _read_call(part, match[1], inside, names)
        elif not _read_config(part, inside, names):
            continue
        yield part


_READ = ("from_pretrained", "from_config", "gradient_checkpointing_enable", "LoraConfig", "BitsAndBytesConfig")


def _wanted(name: str) -> bool:
    last = name.rpartition(".")[2]
    if last.endswith("TrainingArguments") or last in CONFIGS or last in _READ or name == "dict":
        return True
    return calls.is_trainer(last) or last in calls.WRAPPERS or last == "get_peft_model" and _of_unsloth(name)


def _of_unsloth(name: str) -> bool:
    """`FastLanguageModel.…`, `FastVisionModel.…`, `FastModel.…`."""
    return re.match(r"(?:\w+\.)*Fast\w*Model\.", name) is not None


_OF_A_CONFIG = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}


def _read_config(part: Part, inside: str, names: Names) -> bool:
    """Whether a `dict(zero_optimization=dict(stage=2), …)` is a DeepSpeed config."""
    call = _parsed(inside)
    if call is None or not _OF_A_CONFIG & {keyword.arg for keyword in call.keywords}:
        return False
    part.form, part.deepspeed = "DeepSpeed config", dict(_values(call, names, part))
    return True


def _read_call(part: Part, name: str, inside: str, names: Names) -> None:
    call = _parsed(inside)
    last = name.rpartition(".")[2]
    if call is None:
        part.unread.append(Finding(id="unread", key=last, text="is not Python as it stands; paste the whole call"))
        return
    if _of_unsloth(name):
        calls.take_unsloth(part, last, call, names)
        return
    for take, wanted in _TAKEN:
        if wanted(last):
            take(part, last, call, names)
            return
    bits: dict[str, Any] = {}
    if last in ("from_pretrained", "from_config"):
        bits = calls.bits_of(next((k.value for k in call.keywords if k.arg == "quantization_config"), None), names)
        call.keywords = [k for k in call.keywords if k.arg in _OF_A_MODEL]
    given = {**dict(_values(call, names, part)), **bits}
    if last == "gradient_checkpointing_enable":
        kwargs = given.get("gradient_checkpointing_kwargs")
        part.job["gradient_checkpointing"] = dict(kwargs) if isinstance(kwargs, dict) else True
    elif last in ("from_pretrained", "from_config"):
        _take_model(part, name, call, given, names)
    else:
        part.form, part.trainer, part.makes = "TrainingArguments", {}, "arguments"
        if isinstance(first := _first(call, names), str):
            given.setdefault("output_dir", first)
        take_arguments(part, given)
        _take_class(part, last, given)
        part.unread = [_with_default(f, part.defaults) for f in part.unread]


_TAKEN = (
    (lambda part, _, call, names: calls.take_lora(part, call, names), "LoraConfig".__eq__),
    (lambda part, _, call, names: calls.take_bits(part, call, names), "BitsAndBytesConfig".__eq__),
    (calls.take_trainer, calls.is_trainer),
    (calls.take_wrapper, calls.WRAPPERS.__contains__),
)
"""How a call is read, and which."""


def _take_class(part: Part, name: str, given: Mapping[str, Any]) -> None:
    """What one of TRL's configs says by being one."""
    if name not in CONFIGS:
        return
    part.arguments_class, part.defaults = name, defaults(name, given)
    if CONFIGS[name].beside:
        part.unread.append(Finding(id="not-modelled", key=name, text=f"{CONFIGS[name].beside}, which is not modelled: memory is at least what is said"))


_DEFAULTS = {"gradient_accumulation_steps": 1, "gradient_checkpointing": False, "bf16": False, "fp16": False, "optim": "adamw_torch_fused", "learning_rate": 5e-5}
"""What TrainingArguments take, of what moves memory (transformers/training_args.py)."""


def _with_default(found: Finding, own: Mapping[str, Any]) -> Finding:
    """What is taken of an argument that is not read. `own`: the class's own defaults."""
    taken = {**_DEFAULTS, **own, **{name: own["sequence"] for name in LENGTHS if "sequence" in own}}
    if found.id != "unread" or found.key not in taken:
        return found
    default = taken[found.key]
    return replace(found, text=f"{found.text}: {'true, as where fp16 is not,' if default is None else shown(default)} is taken, the default")


def _first(call: ast.Call, names: Names) -> Any:
    """The first argument without a name, where it is a value."""
    try:
        return literal(call.args[0], names) if call.args else None
    except ValueError:
        return None


def _parsed(inside: str) -> ast.Call | None:
    body = re.sub(r"(?m)^\s*(?:>>>|\.\.\.) ?", "", inside)
    closed = body if body.rstrip().endswith(")") else f"{_without_last(body)})"
    return next((node for source in (f"f({body}", f"f({closed}") if isinstance(node := parsed(source), ast.Call)), None)


def _without_last(body: str) -> str:
    """A call that was cut off: without the argument it was cut in."""
    return body.rpartition(",")[0]


def _values(call: ast.Call, names: Names, part: Part) -> Iterator[tuple[str, Any]]:
    """(name, value) of the arguments that are values; what is code is told."""
    for key, node in keywords(call, names):
        try:
            value = literal(node, names)
        except ValueError:
            if key == "deepspeed":
                part.names_config = key, f"{written(node)}"
                yield key, True
            else:
                part.unread.append(Finding(id="unread", key=key, text=f"is {written(node)}, which is no value but code, and code is not run"))
            continue
        if key != "**":
            yield key, value
        elif isinstance(value, dict):
            yield from ((k, v) for k, v in value.items() if isinstance(k, str))


def _take_model(part: Part, name: str, call: ast.Call, given: dict[str, Any], names: Names) -> None:
    """`Auto….from_pretrained("name", attn_implementation=…)`; a tokenizer's or processor's names the model too, where nothing else does."""
    named = given.pop("pretrained_model_name_or_path", None) or _first(call, names)
    take_arguments(part, {"model": named} if isinstance(named, str) else {})
    is_model = not re.search(r"Tokenizer|Processor|FeatureExtractor|Config\b", name)
    part.form = "Python" if is_model else "Python beside the model"
    if is_model:
        part.makes = "model"
        if named is None and call.args:
            part.unread.append(Finding(id="unread", key="model", text=f"is {written(call.args[0])}, which is no value but code, and code is not run; write its name"))
        take_arguments(part, given)
    else:
        part.unread.clear()
