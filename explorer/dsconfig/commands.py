"""Command lines: the launcher's own options, the script's arguments, and the environment. No torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import islice
from typing import Any

from explorer import allocator_options
from explorer.dsconfig.accelerate import take_launch
from explorer.dsconfig.findings import Finding
from explorer.dsconfig.parts import Part, take_arguments, take_unknown
from explorer.dsconfig.trl import CONFIGS, defaults

_START = re.compile(
    r"^(?=[ \t]*\S)[ \t]*(?:[$!%#>][ \t]*)?(?:(?:export[ \t]+|env[ \t]+|sudo[ \t]+|nohup[ \t]+)*[A-Z_][A-Z0-9_]{0,60}=[^\s;&]{0,400}(?:[ \t;&]+|$)){0,20}"
    r"(?P<launcher>(?:\S{0,200}/)?(?:deepspeed|accelerate[ \t]+launch|torchrun|python[\d.]*|swift[ \t]+(?:sft|pt|rlhf)|llamafactory-cli[ \t]+train|axolotl[ \t]+train"
    r"|trl[ \t]+(?:sft|dpo|kto|orpo|cpo|grpo|rloo|reward|ppo))(?=[ \t])|--[a-z]\w|$)",
    re.MULTILINE,
)
_CONTINUED = re.compile(r"\\[ \t]{0,20}\n")
"""A line that goes on: made one with the next, so that a launcher may stand below its environment."""
_LIST = re.compile(r"\[(?:'[^'\n]{0,300}'(?:, )?){3,200}\]")
_QUOTED = re.compile(r"'([^'\n]*)'")
_VARIABLE = re.compile(r"\b([A-Z_][A-Z0-9_]{2,60})=(\"[^\"\n]{0,300}\"|'[^'\n]{0,300}'|[^\s;&]{0,300})")
WITH_PYTHON = "the script is started with plain python, which runs one process on one GPU; start it with `deepspeed` or `accelerate launch`"
_MOST_LINES, _MOST_LISTS, _LONGEST = 200, 1000, 20_000


def read_commands(text: str) -> Iterator[Part]:
    """A part for every command, in the order of the text; a launcher's log of the command it ran counts too."""
    end = 0
    text = _CONTINUED.sub(lambda m: " " * len(m[0]), text)
    for match in _START.finditer(text):
        if match.start() < end or not (match["launcher"] or "=" in match[0]):
            continue
        line, end = _logical_line(text, match.start())
        if match["launcher"] or "ALLOC_CONF" in line or "CUDA_VISIBLE_DEVICES" in line:
            part = Part(form="command line", start=match.start(), end=end)
            _read_command(part, line)
            if part.launcher or part.trainer is not None or part.job or part.deepspeed or part.names_recipe:
                yield part
    for match in islice(_LIST.finditer(text), _MOST_LISTS):
        part = Part(form="command line", start=match.start(), end=match.end())
        _read_words(part, ["python" if "python" in word else word for word in _QUOTED.findall(match[0])])
        if part.trainer is not None or part.job:
            part.launcher = "deepspeed"  # only its launcher logs the list
            part.told = [f for f in part.told if f.id != "launched-with-python"]
            yield part


def _logical_line(text: str, start: int) -> tuple[str, int]:
    """A line with what continues it: after a backslash, or options on lines of their own."""
    lines, at = [], start
    for _ in range(_MOST_LINES):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line = text[at:end].rstrip()
        continued = line.endswith(("\\", "^"))
        lines.append(line.rstrip("\\^"))
        at = end + 1
        if at >= len(text) or not (continued or re.match(r"[ \t]*--?[a-z]\w", text[at : at + 80])):
            break
    return " ".join(lines)[:_LONGEST], min(at, len(text))


def _read_command(part: Part, line: str) -> None:
    for name, value in _VARIABLE.findall(line):
        _take_variable(part, name, value.strip("\"'"))
    each, nodes = part.job.pop("gpus_per_node", None), part.job.pop("nodes", 1)
    if each is not None:
        part.job.update(world_size=each * nodes, gpus_per_node=each)
    try:
        words = shlex.split(line, comments=False)
    except ValueError:  # a quote that does not close
        words = line.split()
    while words and (re.match(r"[A-Z_][A-Z0-9_]*=", words[0]) or words[0] in ("$", "!", "%", "#", ">", "export", "env", "sudo", "nohup")):
        words.pop(0)
    _read_words(part, [w.lstrip("$!") if i == 0 else w for i, w in enumerate(words)])


def _take_variable(part: Part, name: str, value: str) -> None:
    if name.endswith("ALLOC_CONF"):
        chosen = allocator_options.read(value).options
        if chosen:
            part.job["allocator"] = dict(chosen)
    elif name == "CUDA_VISIBLE_DEVICES" and re.fullmatch(r"\d+(,\d+)*", value):
        part.job["world_size"] = value.count(",") + 1
    elif name in ("NPROC_PER_NODE", "NNODES") and value.isdigit() and 0 < int(value) < 1 << 20:
        part.job["gpus_per_node" if name == "NPROC_PER_NODE" else "nodes"] = int(value)


_TOOLS = {"swift": "ms-swift", "llamafactory-cli": "LLaMA-Factory", "axolotl": "axolotl", "trl": ""}
_MODULES = {
    "torch.distributed.launch": "torchrun", "torch.distributed.run": "torchrun", "deepspeed": "deepspeed",
    "accelerate.commands.launch": "accelerate", "deepspeed.launcher.runner": "deepspeed",
}


def _read_words(part: Part, words: list[str]) -> None:
    launcher = words[0].rpartition("/")[2] if words else ""
    rest, subcommand = words[1:], ""
    if launcher == "accelerate":
        rest = rest[1:]
    elif launcher in _TOOLS:
        subcommand, rest, part.tool = rest[0], rest[1:], _TOOLS[launcher]
    elif launcher.startswith("python"):
        launcher = "python"
        if rest[:1] == ["-m"] and len(rest) > 1:
            launcher = _MODULES.get(rest[1], "python")
            rest = rest[2:] if launcher != "python" else [f"{rest[1]}.py", *rest[2:]]
    elif launcher.startswith("--"):
        launcher, rest = "", words
    part.launcher = launcher if launcher and launcher not in _TOOLS else None
    script = -1 if subcommand or not launcher else _script(rest)
    own, flags = (_flags(rest[:script]), _flags(rest[script + 1 :])) if script >= 0 else ({}, _flags(rest))
    for word in rest[script + 1 :] if subcommand or script >= 0 else []:
        _take_word(part, word, flags)
    if launcher in ("deepspeed", "torchrun", "accelerate"):
        _take_launcher(part, {**({} if script >= 0 else flags), **own})
        flags = {k: v for k, v in flags.items() if script >= 0 or k not in _LAUNCHERS}
    flags.pop("local_rank", None)
    if launcher == "trl":
        _take_trl(part, subcommand, flags)
    take_arguments(part, flags)
    take_unknown(part, whole=not part.tool)  # another script may have any options
    part.starts_alone = bool(launcher) and (part.trainer is not None or part.names_recipe != "")
    if launcher == "python" and (part.trainer or {}).keys() and "deepspeed" in flags:
        part.told.append(Finding(id="launched-with-python", key="launcher", text=WITH_PYTHON))


def _script(words: list[str]) -> int:
    """Which word is the script, or the module in its place; -1 where none is."""
    for i, word in enumerate(words):
        if word.endswith(".py") or i and words[i - 1] in ("-m", "--module"):
            return i
    return -1


_RECIPE = re.compile(r"[^=\s]{1,300}\.(?:ya?ml|json)", re.IGNORECASE)
_OVERRIDE = re.compile(r"([A-Za-z_]\w{0,60})=(.*)", re.DOTALL)


def _take_word(part: Part, word: str, flags: dict[str, Any]) -> None:
    """A word that is no option: the file of the arguments, or one of them as `name=value`."""
    if (match := _OVERRIDE.fullmatch(word)) is not None:
        flags[match[1]] = _word(match[2])
    elif _RECIPE.fullmatch(word) and not part.names_recipe and word not in flags.values():
        part.names_recipe = word


def _take_trl(part: Part, trains: str, flags: dict[str, Any]) -> None:
    """`trl sft …`: the defaults of that trainer's config."""
    name = next(name for name in CONFIGS if name.lower() == f"{trains}config")
    part.arguments_class, part.defaults, part.trainer = name, defaults(name, flags), {}
    if CONFIGS[name].beside:
        part.unread.append(Finding(id="not-modelled", key=name, text=f"{CONFIGS[name].beside}, which is not modelled: memory is at least what is said"))


_LAUNCHERS = {"num_gpus", "num_nodes", "include", "exclude", "hostfile", "master_port", "master_addr", "nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "num_processes", "num_machines", "config_file", "use_deepspeed", "zero_stage", "mixed_precision", "deepspeed_config_file", "use_fsdp", "multi_gpu", "main_process_port", "standalone"}


def _flags(words: list[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--name`; dashes in names are underscores."""
    found: dict[str, Any] = {}
    name = None
    for word in words:
        match = re.fullmatch(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
        if match:
            name = match[1].replace("-", "_")
            found[name] = True if match[2] is None else _word(match[2])
        elif name is not None and found[name] is True:
            found[name] = _word(word)
        elif name is not None:
            found[name] = [*(found[name] if isinstance(found[name], list) else [found[name]]), _word(word)]
    return found


def _word(text: str) -> Any:
    """A value as the Trainer's parser would type it."""
    low = text.strip().lower()
    if low in ("true", "false", "none", "null"):
        return {"true": True, "false": False}.get(low)
    for kind in (int, float):
        try:
            if len(text) < 40 and (number := kind(text)) == number and abs(number) < 1e30:
                return number
        except ValueError:
            continue
    return text


def _take_launcher(part: Part, own: dict[str, Any]) -> None:
    """How many processes the launcher starts, and what accelerate is told of DeepSpeed."""
    nodes = _count(own, "num_nodes", "nnodes", "num_machines") or 1
    each = _count(own, "num_gpus", "nproc_per_node")
    include = own.get("include")
    if each is None and isinstance(include, str) and ":" in include:
        each = include.partition("@")[0].count(",") + 1
        nodes = include.count("@") + 1
    everywhere = _count(own, "num_processes")
    if each is not None:
        part.job.update(world_size=each * nodes, gpus_per_node=max(each, 1))
    elif everywhere is not None:
        part.job.update(world_size=everywhere, gpus_per_node=max(1, everywhere // nodes))
    if part.launcher == "accelerate":
        take_launch(part, own)


def _count(own: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = own.get(name)
        if isinstance(value, str) and ":" in value:
            value = _word(value.rpartition(":")[2])
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20:
            return value
    return None
