"""Models: the catalog's, a pasted or stored `config.json`, or a hub id. Everything is read from the config as data."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from explorer.errors import BadInput, CouldNotRun
from explorer.setup import read_json

Task = Literal["contrastive", "image", "causal", "masked", "seq2seq", "speech"]
HERE = Path(__file__).parent
_MOST = 1 << 31
"""No size in a config is larger."""
_DROPPED = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "auto_class", "auto_map", "use_cache", "_attn_implementation", "attn_implementation"}
"""Keys that say nothing of the model's shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model as far as memory is concerned."""

    name: str
    family: str
    config: Mapping[str, Any]
    """What `AutoConfig.for_model` takes."""
    model_type: str
    model_class: str
    task: Task
    hidden_size: int | None
    """By the Trainer's rule (transformers/integrations/deepspeed.py); None where that finds none."""
    axes: tuple[str, ...]
    """Which of "sequence", "target_sequence", "image_size" the model has."""
    default_sequence: int | None
    default_target_sequence: int | None
    default_image_size: int | None
    sequence_limit: int | None
    """Longest sequence the position table, or a rotary model's trained range, holds."""
    target_sequence_limit: int | None
    patch_size: int | None
    parameters: int | None
    """None until a tape has counted them."""
    key: str
    """Digest of class and config: what tapes are filed under."""
    source: Literal["catalog", "config", "hub"]


@lru_cache(maxsize=1)
def models() -> tuple[Model, ...]:
    """The catalog, in its own order."""
    data = json.loads((HERE / "models.json").read_text(encoding="utf-8"))
    return tuple(replace(_model(name, entry["config"], entry["model_class"], "catalog"), family=entry["family"], parameters=entry["parameters"]) for name, entry in data.items())


@lru_cache(maxsize=1)
def model_types() -> Mapping[str, str | None]:
    """Every model type transformers 5.17.0 knows, with the class that has a loss; None where only other tasks exist."""
    return json.loads((HERE / "model_types.json").read_text(encoding="utf-8"))


def find_model(model: str | Mapping[str, Any]) -> Model:
    """The model a Setup names. Raises BadInput("model", ...) where there is none, CouldNotRun where a hub is needed and away."""
    if isinstance(model, Mapping):
        return _from_config(json.dumps(model, sort_keys=True, default=dict))
    for known in models():
        if model.lower() in (known.name.lower(), known.name.rpartition("/")[2].lower()):
            return known
    path = Path(model).expanduser()
    try:
        if path.is_dir() or path.suffix == ".json" and path.exists():
            return _from_file(path / "config.json" if path.is_dir() else path)
    except OSError:
        pass
    return _from_hub(model)


def _from_file(path: Path) -> Model:
    if not path.exists():
        raise BadInput("model", f"{path.parent} has no config.json; give a Hugging Face model's folder")
    if path.stat().st_size > 2_000_000:
        raise BadInput("model", f"{path} is too large to be a config.json")
    return _from_config(json.dumps(read_json(path, "model"), sort_keys=True), name=path.parent.name)


@lru_cache(maxsize=128)
def _from_config(text: str, name: str = "", source: Literal["config", "hub"] = "config") -> Model:
    if len(text) > 1_000_000:
        raise BadInput("model", "the config is larger than any config.json; paste only the model's config")
    config = json.loads(text)
    if not isinstance(config, dict):
        raise BadInput("model", "a config.json holds an object, such as {\"model_type\": \"gpt2\", ...}")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise BadInput("model", "the config has no \"model_type\"; paste the whole config.json")
    if model_type not in model_types():
        near = difflib.get_close_matches(model_type, model_types(), 3, 0.6)
        raise BadInput("model", f"model_type {model_type!r} is not one that transformers 5.17.0 knows" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    _check_sizes(config, "")
    return _model(name or str(config.get("_name_or_path") or model_type), config, _class(config, model_type), source)


def _class(config: Mapping[str, Any], model_type: str) -> str:
    """The class named by the config where it has a loss we can make a batch for, else the model type's usual one."""
    named = config.get("architectures") or [config.get("auto_class")]
    first = named[0] if isinstance(named, list) and named else named
    if isinstance(first, str) and first.isidentifier() and not first.startswith("Auto") and _task(first, model_type) is not None:
        return first
    usual = model_types()[model_type]
    if usual is None or _task(usual, model_type) is None:
        raise BadInput("model", f"model_type {model_type!r} has no class with a loss that a batch can be made for here; text, image, CLIP and Whisper models are covered")
    return usual


def _task(model_class: str, model_type: str) -> Task | None:
    if model_type in ("clip", "siglip") and model_class in ("CLIPModel", "SiglipModel"):
        return "contrastive"
    if model_type == "whisper":
        return "speech" if model_class.endswith("ForConditionalGeneration") else None
    suffixes: tuple[tuple[str, Task], ...] = (("ForCausalLM", "causal"), ("LMHeadModel", "causal"), ("ForMaskedLM", "masked"), ("ForImageClassification", "image"), ("ForConditionalGeneration", "seq2seq"))
    return next((task for suffix, task in suffixes if model_class.endswith(suffix)), None)


def _check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Sizes must be sizes: transformers would build nonsense, or fail far from the key that is wrong."""
    for key, value in config.items():
        path = f"{where}{key}"
        if key in ("text_config", "vision_config") and not isinstance(value, Mapping | None):
            raise BadInput("model", f"the config's {path} is {_short(value)}; it must be an object")
        if _is_size(key):
            if value is None or isinstance(value, list):  # some classes have a size per layer; transformers judges those
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise BadInput("model", f"the config's {path} is {_short(value)}; it must be a whole number")
            if not 0 < value < _MOST:
                raise BadInput("model", f"the config's {path} is {value}; it must be above 0 and below 2^31")
        elif isinstance(value, Mapping):
            _check_sizes(value, path + ".")
    hidden = next((config[k] for k in ("hidden_size", "n_embd", "d_model") if isinstance(config.get(k), int)), None)
    heads = next((config[k] for k in ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads") if isinstance(config.get(k), int)), None)
    if hidden and heads and hidden % heads and not config.get("head_dim") and not config.get("d_kv"):
        raise BadInput("model", f"the config's {where}hidden size {hidden} is not divisible by its {heads} attention heads")
    shared = config.get("num_key_value_heads")
    if heads and isinstance(shared, int) and heads % shared:
        raise BadInput("model", f"the config's {where}num_attention_heads {heads} is not a multiple of its num_key_value_heads {shared}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_SIZES = ("hidden_size", "n_embd", "d_model", "d_ff", "d_kv", "n_layer", "n_head", "n_positions", "vocab_size", "intermediate_size", "head_dim", "patch_size", "image_size", "ffn_dim", "num_experts", "num_local_experts", "num_mel_bins", "max_source_positions", "max_target_positions")


def _is_size(key: str) -> bool:
    return key in _SIZES or key.startswith("num_") and key.endswith(("layers", "heads")) or key.endswith(("_layers", "_heads", "_ffn_dim", "position_embeddings")) and not key.startswith(("use_", "share_", "tie_"))


def _model(name: str, config: Mapping[str, Any], model_class: str, source: Literal["catalog", "config", "hub"]) -> Model:
    kept = {k: v for k, v in config.items() if k not in _DROPPED}
    model_type = config["model_type"]
    task = _task(model_class, model_type)
    text, vision = (config.get(k) or {} for k in ("text_config", "vision_config"))
    limit, target_limit = _limits(config, text, task, model_type)
    image, patch = _images(config, vision, task)
    return Model(
        name=name, family=model_type, config=kept, model_type=model_type, model_class=model_class, task=task,
        hidden_size=_hidden_size(config),
        axes=_AXES[task],
        default_sequence=_default_sequence(task, limit),
        default_target_sequence=min(128, target_limit or 128) if task in ("seq2seq", "speech") else None,
        default_image_size=image,
        sequence_limit=limit, target_sequence_limit=target_limit, patch_size=patch, parameters=None,
        key=hashlib.sha256(json.dumps([model_class, kept], sort_keys=True).encode()).hexdigest()[:16],
        source=source,
    )


_AXES: dict[Task, tuple[str, ...]] = {
    "contrastive": ("sequence", "image_size"),
    "image": ("image_size",),
    "causal": ("sequence",),
    "masked": ("sequence",),
    "seq2seq": ("sequence", "target_sequence"),
    "speech": ("target_sequence",),
}


def _limits(config: Mapping[str, Any], text: Mapping[str, Any], task: Task, model_type: str) -> tuple[int | None, int | None]:
    """(longest sequence, longest target) that the positions allow; transformers' defaults where the config is silent."""
    if task == "contrastive":
        return text.get("max_position_embeddings", 64 if model_type == "siglip" else 77), None
    if task == "speech":
        return None, config.get("max_target_positions", 448)
    if task == "image":
        return None, None
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    if limit is None and model_type in ("gpt2", "bert"):
        limit = 1024 if model_type == "gpt2" else 512
    if model_type in ("t5", "mt5", "umt5"):
        return None, None
    return limit, limit if task == "seq2seq" else None


def _images(config: Mapping[str, Any], vision: Mapping[str, Any], task: Task) -> tuple[int | None, int | None]:
    if "image_size" not in _AXES[task]:
        return None, None
    source = vision if task == "contrastive" else config
    image, patch = source.get("image_size", 224), source.get("patch_size", 32 if config["model_type"] == "clip" else 16)
    if not isinstance(image, int) or not isinstance(patch, int):
        raise BadInput("model", "the config's image_size and patch_size must be whole numbers (square images and patches)")
    return image, patch


def _default_sequence(task: Task, limit: int | None) -> int | None:
    usual = {"causal": 1024, "masked": 512, "seq2seq": 512}.get(task)
    if task == "contrastive":
        return limit
    return min(usual, limit or usual) if usual else None


def _hidden_size(config: Mapping[str, Any]) -> int | None:
    """hidden_size, else the largest of hidden_sizes, else the text config's (as the Trainer's "auto" looks them up)."""
    for part in (config, config.get("text_config") or {}):
        for name in ("hidden_size", "n_embd", "d_model"):
            if isinstance(part.get(name), int):
                return part[name]
        if part.get("hidden_sizes"):
            return max(part["hidden_sizes"])
    return None


def _from_hub(name: str) -> Model:
    if len(name) > 200 or any(c in name for c in "{}[]\n<>\"'") or name.count("/") > 1:
        raise BadInput("model", "is neither a catalog name, a folder with a config.json, nor a hub id")
    from explorer.measure.client import run_in_worker

    near = difflib.get_close_matches(name, [m.name for m in models()] + [m.name.rpartition("/")[2] for m in models()], 3, 0.4)
    way_out = "paste its config.json" + (f", or choose {', '.join(near)}" if near else ", or choose a model of the catalog")
    if os.environ.get("HF_HUB_OFFLINE"):
        raise BadInput("model", f"{name!r} is not in the catalog, and the Hugging Face hub is switched off (HF_HUB_OFFLINE); {way_out}")
    try:
        result = run_in_worker("explorer.workload:hub_config", {"name": name}, timeout_s=15)
    except CouldNotRun:
        raise BadInput("model", f"{name!r} is not in the catalog and the Hugging Face hub cannot be reached; {way_out}") from None
    return _from_config(json.dumps(result["config"], sort_keys=True), name=name, source="hub")
