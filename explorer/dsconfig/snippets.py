"""Python as text: the calls that say how a model is trained, read by `ast` and never run. No torch."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from explorer.dsconfig.findings import Finding
from explorer.dsconfig.parts import Part, take_arguments
from explorer.dsconfig.trl import CONFIGS, defaults

_CALL = re.compile(r"\b([A-Za-z_]\w{0,60}(?:\.\w{1,60}){0,4})\s{0,8}\(")
_OF_A_MODEL = ("pretrained_model_name_or_path", "attn_implementation", "use_flash_attention_2", "load_in_4bit", "load_in_8bit")
_LONGEST = 1 << 16
_MOST_CALLS, _DEEPEST, _MOST_BITS = 200, 60, 128


def read_calls(text: str) -> Iterator[Part]:
    """A part for every call that is understood, in the order of the text."""
    end = 0
    for count, match in enumerate(m for m in _CALL.finditer(text) if _wanted(m[1])):
        if count >= _MOST_CALLS:
            return
        if match.start() < end:
            continue
        closing = _closing(text, match.end())
        if closing is None:
            continue
        inside = text[match.end() : closing]
        if match[1] == "dict" and not any(f"{key}=" in inside for key in _OF_A_CONFIG):
            continue
        part, end = Part(form="Python", start=match.start(), end=closing), closing
        if match[1] != "dict":
            _read_call(part, match[1], inside)
        elif not _read_config(part, inside):
            continue
        yield part


def _wanted(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.endswith("TrainingArguments") or last in CONFIGS or last in ("from_pretrained", "from_config", "gradient_checkpointing_enable", "LoraConfig") or name == "dict"


_TOKEN = re.compile(r"\"\"\"|'''|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|#[^\n]*|[()\[\]{}]")


def _closing(text: str, start: int) -> int | None:
    """Where the call's brackets close, or the text ends; None for brackets within brackets without end."""
    depth, at, stop = 1, start, min(len(text), start + _LONGEST)
    for match in _TOKEN.finditer(text, start, stop):
        if depth > _DEEPEST:
            return None
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(match[0], 0)
        at = match.end()
        if depth == 0:
            return at
    return stop if depth else at


_OF_A_CONFIG = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}


def _read_config(part: Part, inside: str) -> bool:
    """Whether a `dict(zero_optimization=dict(stage=2), …)` is a DeepSpeed config."""
    call = _parsed(inside)
    if call is None or not _OF_A_CONFIG & {keyword.arg for keyword in call.keywords}:
        return False
    part.form, part.deepspeed = "DeepSpeed config", dict(_keywords(call, part))
    return True


def _read_call(part: Part, name: str, inside: str) -> None:
    call = _parsed(inside)
    last = name.rpartition(".")[2]
    if call is None:
        part.unread.append(Finding(id="unread", key=last, text="is not Python as it stands; paste the whole call"))
        return
    if last in ("from_pretrained", "from_config"):
        call.keywords = [k for k in call.keywords if k.arg in _OF_A_MODEL]
    given = dict(_keywords(call, part))
    if last == "gradient_checkpointing_enable":
        kwargs = given.get("gradient_checkpointing_kwargs")
        part.job["gradient_checkpointing"] = dict(kwargs) if isinstance(kwargs, dict) else True
    elif last in ("from_pretrained", "from_config"):
        _take_model(part, name, call, given)
    elif last == "LoraConfig":
        part.job["lora"] = {k: v for k, v in given.items() if k in ("r", "target_modules", "modules_to_save", "lora_dropout", "bias", "use_rslora")}
    else:
        part.form, part.trainer, part.makes = "TrainingArguments", {}, "arguments"
        if isinstance(first := _first(call), str):
            given.setdefault("output_dir", first)
        take_arguments(part, given)
        _take_class(part, last, given)


def _take_class(part: Part, name: str, given: Mapping[str, Any]) -> None:
    """What one of TRL's configs says by being one."""
    if name not in CONFIGS:
        return
    part.arguments_class, part.defaults = name, defaults(name, given)
    if CONFIGS[name].beside:
        part.unread.append(Finding(id="not-modelled", key=name, text=f"{CONFIGS[name].beside}, which is not modelled: memory is at least what is said"))


def _first(call: ast.Call) -> Any:
    """The first argument without a name, where it is a value."""
    try:
        return _literal(call.args[0]) if call.args else None
    except ValueError:
        return None


def _parsed(inside: str) -> ast.Call | None:
    body = re.sub(r"(?m)^\s*(?:>>>|\.\.\.) ?", "", inside)
    closed = body if body.rstrip().endswith(")") else f"{_without_last(body)})"
    for source in (f"f({body}", f"f({closed}"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                node = ast.parse(source, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return node if isinstance(node, ast.Call) else None
    return None


def _without_last(body: str) -> str:
    """A call that was cut off: without the argument it was cut in."""
    return body.rpartition(",")[0]


def _keywords(call: ast.Call, part: Part) -> Iterator[tuple[str, Any]]:
    for keyword in call.keywords:
        try:
            value = _literal(keyword.value)
        except ValueError:
            part.unread.append(Finding(id="unread", key=keyword.arg or "**", text=f"is {_written(keyword.value)}, which is no value but code, and code is not run"))
            continue
        if keyword.arg is not None:
            yield keyword.arg, value
        elif isinstance(value, dict):
            yield from ((k, v) for k, v in value.items() if isinstance(k, str))


def _written(node: ast.AST) -> str:
    try:
        return ast.unparse(node)[:60]
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets without end
        return "too long"


def _literal(node: ast.AST, depth: int = 0) -> Any:
    """A constant, a collection of them, or arithmetic on numbers. ValueError for anything else."""
    if depth > 30:
        raise ValueError
    match node:
        case ast.Constant(value=int() as value) if value.bit_length() > _MOST_BITS:
            raise ValueError
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return [_literal(part, depth + 1) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {_key(key, depth): _literal(value, depth + 1) for key, value in zip(keys, values, strict=True)}
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords) if all(keyword.arg for keyword in keywords):
            return {keyword.arg: _literal(keyword.value, depth + 1) for keyword in keywords}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, depth)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() | ast.Add() | ast.Sub() | ast.FloorDiv() as op, right=right):
            return _arithmetic(op, _number(left, depth), _number(right, depth))
        case ast.Call(func=ast.Name(id="int" | "float" as name), args=[argument], keywords=[]):
            return (int if name == "int" else float)(_number(argument, depth))
    raise ValueError


def _key(node: ast.AST | None, depth: int) -> str:
    key = _literal(node, depth + 1) if node is not None else None
    if not isinstance(key, str):
        raise ValueError
    return key


def _number(node: ast.AST, depth: int) -> int | float:
    value = _literal(node, depth + 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30 or value != value:
        raise ValueError
    return value


def _arithmetic(op: ast.operator, left: int | float, right: int | float) -> int | float:
    if isinstance(op, ast.Div | ast.FloorDiv) and right == 0:
        raise ValueError
    match op:
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return left // right
        case ast.Add():
            return left + right
    return left - right


def _take_model(part: Part, name: str, call: ast.Call, given: dict[str, Any]) -> None:
    """`Auto….from_pretrained("name", attn_implementation=…)`; a tokenizer's or processor's names the model too, where nothing else does."""
    named = given.pop("pretrained_model_name_or_path", None) or _first(call)
    take_arguments(part, {"model": named} if isinstance(named, str) else {})
    is_model = not re.search(r"Tokenizer|Processor|FeatureExtractor|Config\b", name)
    part.form = "Python" if is_model else "Python beside the model"
    if is_model:
        part.makes = "model"
        take_arguments(part, given)
    else:
        part.unread.clear()
