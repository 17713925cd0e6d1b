"""Which DeepSpeed config a text means where it holds none: one that it names, the nearest to FSDP or DDP, or none. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from explorer.dsconfig import methods, named
from explorer.dsconfig.findings import Finding
from explorer.dsconfig.parts import Part
from explorer.errors import shown

IDS = ("config-file", "config-shipped", "config-named")
"""Findings about a config that is only named."""


class Meant(NamedTuple):
    """What stands in the place of a config."""

    config: dict[str, Any] | None = None
    method: str | None = None
    """None is DeepSpeed."""
    surely: bool = True
    """False where a config from elsewhere has precedence."""
    unseen: bool = False
    """Whether a config is named of which nothing is known."""


def meant(parts: Sequence[Part], changes: dict[str, Any], told: list[Finding]) -> Meant:
    """Of a text without a DeepSpeed config. `changes` has the Trainer's arguments, out of which FSDP's are taken."""
    trainer = changes.get("trainer") or {}
    sharded = methods.of_arguments(trainer)
    if sharded is not None:
        name, offload = sharded
        return Meant(_sharded(name, offload, changes), "fsdp")
    names = next((p.names_config for p in reversed(parts) if p.names_config is not None), None)
    if names is not None:
        return _named(*names, changes, told)
    if changes.get("method") is not None:
        return Meant(_filled(changes, parts), changes["method"])
    if any(p.deepspeed is not None or p.launcher == "deepspeed" for p in parts) or not any(p.starts_alone for p in parts) or recipe_missing(parts):
        return Meant()
    return Meant(methods.as_zero("NO_SHARD", False, None, filled=changes.get("trainer") is not None), "ddp", surely=False)


def recipe_missing(parts: Sequence[Part]) -> str:
    """The file of arguments that a command is given and the text does not hold; "" where there is none."""
    there = any(p.form in ("YAML", "TrainingArguments") for p in parts)
    return "" if there else next((p.names_recipe for p in parts if p.names_recipe), "")


def _filled(changes: dict[str, Any], parts: Sequence[Part]) -> dict[str, Any]:
    """accelerate's FSDP or DDP beside the Trainer's arguments, which take accelerate's precision where they say none."""
    config = next(p.deepspeed for p in reversed(parts) if p.deepspeed is not None)
    trainer = changes.get("trainer")
    if trainer is None:
        return config
    precision = next((name for name in ("bf16", "fp16") if name in config), None)
    if precision is not None and not trainer.keys() & {"bf16", "fp16"}:
        trainer[precision] = True
    return {**config, **methods.FILLED}


def _sharded(name: str, offload: bool, changes: dict[str, Any]) -> dict[str, Any]:
    trainer = changes["trainer"]
    options = trainer.pop("fsdp_config", None)
    trainer.pop("fsdp", None)
    if methods.checkpoints(options):
        trainer.update(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    each, gpus = changes.get("gpus_per_node"), changes.get("world_size")
    if methods.shards_within_node(name) and each and gpus and each < gpus and gpus % each == 0:
        changes["data_parallel_size"] = each
    return methods.as_zero(name, offload, None, filled=True)


def _named(key: str, name: str, changes: dict[str, Any], told: list[Finding]) -> Meant:
    ships = named.shipped(name) if key != "config_file" else None
    if ships is not None:
        told.append(Finding(id="config-shipped", key=key, text=f"names {shown(name, 80)}, a config that {ships.whose} ships: {named.in_words(ships.config)}"))
        return Meant(dict(ships.config), surely=False)
    lowered = name.lower().replace("\\", "/").rpartition("/")[2]
    if key == "config_file" and "zero" not in lowered and ("fsdp" in lowered or "multi_gpu" in lowered or "ddp" in lowered):
        method, strategy = ("fsdp", "FULL_SHARD") if "fsdp" in lowered else ("ddp", "NO_SHARD")
        config = methods.as_zero(strategy, "offload" in lowered, None, filled=changes.get("trainer") is not None)
        told.append(Finding(id="config-named", key=key, text=f"names the file {name[:80]}, which is not opened: {method.upper()} is taken, as its name says; paste what is in it for the rest"))
        return Meant(config, method, surely=False)
    config = named.by_name(name)
    if config is not None:
        told.append(Finding(id="config-named", key=key, text=f"names the file {name[:80]}, which is not opened: {named.in_words(config)} is taken, as its name says; paste what is in it for its own buckets"))
        return Meant(config, surely=False)
    told.append(Finding(id="config-file", key=key, text=f"names the file {name[:80]}, which is not opened; paste what is in it too, or give it to --config (stage 2 is taken where nothing else says one)"))
    return Meant(unseen=True)
