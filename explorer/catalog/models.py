"""Models: the catalog's, a pasted or stored `config.json`, or a hub id. Everything is read from the config as data."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from explorer.catalog.checks import check
from explorer.catalog.hub import hub_config, stored_config
from explorer.catalog.images import image_and_patch, token_side
from explorer.catalog.kinds import Kind, Task, kinds, task_of
from explorer.catalog.names import BITSANDBYTES_4_BIT, Meant, Names
from explorer.catalog.own import Factory, find_factory
from explorer.catalog.relatives import relatives
from explorer.errors import BadInput, shown
from explorer.jsonfile import read_json

Source = Literal["catalog", "config", "hub", "own"]
_DROPPED = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "auto_class", "auto_map", "use_cache", "_attn_implementation", "attn_implementation"}
"""Keys that say nothing of the model's shape."""
_AUTO: dict[str, Task] = {
    "AutoModelForCausalLM": "causal", "AutoModelForMaskedLM": "masked", "AutoModelForSeq2SeqLM": "seq2seq", "AutoModelForImageClassification": "image",
    "AutoModelForSpeechSeq2Seq": "speech", "AutoModelForZeroShotImageClassification": "contrastive", "AutoModelForImageTextToText": "image_text",
}
_AXES: dict[Task, tuple[str, ...]] = {
    "contrastive": ("sequence", "image_size"),
    "image": ("image_size",),
    "causal": ("sequence",),
    "masked": ("sequence",),
    "seq2seq": ("sequence", "target_sequence"),
    "speech": ("target_sequence",),
    "image_text": ("sequence", "image_size"),
}
_USUAL_SEQUENCE: dict[Task, int] = {"causal": 1024, "masked": 512, "seq2seq": 512, "image_text": 1024}
_USUAL_TARGET = 128


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
    token_side: int | None
    """Patches along the side of the square that becomes one token of the text, in a model that reads images among its text; None in others."""
    vocab_size: int | None
    """Of the text; None where the model reads none."""
    parameters: int | None
    """None until a tape has counted them."""
    key: str
    """Digest of class and config: what tapes are filed under."""
    source: Source
    factory: Factory | None = None
    """What makes a person's own model."""

    @property
    def in_4_bit(self) -> bool:
        """Whether the config asks for linear layers' weights in 4 bit."""
        return self.config.get("quantization_config") is not None


@lru_cache(maxsize=1)
def models() -> tuple[Model, ...]:
    """The catalog, in its own order."""
    return tuple(
        replace(_model(name, entry["config"], entry["model_class"], "catalog"), family=entry["family"], parameters=entry["parameters"])
        for name, entry in _entries().items()
    )


@lru_cache(maxsize=1)
def _entries() -> Mapping[str, Any]:
    return json.loads((Path(__file__).parent / "models.json").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _names() -> Names:
    entries = _entries()
    return Names({name: entry.get("aliases", ()) for name, entry in entries.items()}, {name: entry["family"] for name, entry in entries.items()})


@lru_cache(maxsize=1)
def _by_name() -> Mapping[str, Model]:
    return {model.name: model for model in models()}


def catalog_name(name: str) -> str | None:
    """The catalog's name of the whole model that `name` means: an alias, a release or a mirror of the same sizes; None where that is none."""
    meant = _names().find(name)
    return meant.model if meant is not None and meant.quantized is None else None


def find_model(model: str | Mapping[str, Any]) -> Model:
    """The model a Setup names: a catalog name, a folder or file with a config.json, a hub id, or a config. Raises BadInput("model", ...)."""
    if isinstance(model, Mapping):
        return _from_config(json.dumps(model, sort_keys=True, default=dict))
    if model in _OWN:
        return _OWN[model]
    meant = _names().find(model) if not model.startswith((".", "/", "~")) else None
    if meant is not None:
        return _by_name()[meant.model] if meant.quantized is None else _quantized(model, meant)
    path = _config_file(model)
    if path is not None:
        return _from_config(json.dumps(read_json(path, "model"), sort_keys=True), name=path.resolve().parent.name)
    if model.endswith(".json") or model.startswith(("/", "./", "../", "~")):
        raise BadInput("model", f"{shown(model, 160)} is no folder with a config.json and no .json file; give a catalog name, a folder with a config.json, or a hub id")
    return _from_config(stored_config(model) or hub_config(model, _way_out(model)), name=model, source="hub")


def _quantized(name: str, meant: Meant) -> Model:
    """A copy with weights in 4 bit by bitsandbytes; other ways are not followed."""
    whole = _by_name()[meant.model]
    if meant.quantized != "bitsandbytes":
        raise BadInput("model", f"{shown(name)} holds weights quantized in another way ({meant.quantized}) than bitsandbytes' 4 bit, the only one followed here; name {meant.model} for its whole weights")
    config = {**whole.config, "quantization_config": BITSANDBYTES_4_BIT}
    return replace(whole, name=name, config=config, key=_digest(whole.model_class, config))


_OWN: dict[str, Model] = {}
"""Own models by their functions' names: what this process was given in Python, and nothing else."""


def own_model(function: str | Callable[..., Any]) -> Model:
    """A person's own model, from then on found by its function's name in this process. Raises BadInput("factory", ...)."""
    factory = find_factory(function)
    _OWN[factory.reference] = model = Model(
        name=factory.reference, family="own", config={}, model_type="own", model_class="", task="own", hidden_size=None,
        axes=("sequence",) if factory.takes_sequence else (),
        default_sequence=(factory.sequence or _USUAL_SEQUENCE["causal"]) if factory.takes_sequence else None,
        default_target_sequence=None, default_image_size=None, sequence_limit=None, target_sequence_limit=None,
        patch_size=None, token_side=None, vocab_size=None, parameters=None, key=factory.digest, source="own", factory=factory,
    )
    return model


def _config_file(name: str) -> Path | None:
    """The file that a path names; None where it names none, of which no more is said: the page may serve others."""
    try:
        path = Path(name).expanduser()
        path = path / "config.json" if path.is_dir() else path
        return path if path.suffix == ".json" and path.is_file() else None
    except (OSError, RuntimeError, ValueError):  # a name too long, or of a home that is not there
        return None


def _way_out(name: str) -> str:
    near = [model.rpartition("/")[2] for model in relatives(name, [m.name for m in models()])]
    return "paste its config.json, or choose " + (f"one of its family: {', '.join(near[:3])}" if near else "a model of the catalog")


def stand_in(name: str) -> Model | None:
    """The catalog's model that is nearest to a name which is not known, of its family; None where there is none."""
    if name.endswith(".json") or name.startswith(("/", ".", "~")):
        return None
    return next((find_model(near) for near in relatives(name, [m.name for m in models()])), None)


@lru_cache(maxsize=128)
def _from_config(text: str, name: str = "", source: Source = "config") -> Model:
    config = json.loads(text)
    if not isinstance(config, dict):
        raise BadInput("model", "a config.json holds an object, such as {\"model_type\": \"gpt2\", ...}")
    kind = _kind(config)
    check(config, kind)
    return _model(name or str(config.get("_name_or_path") or config["model_type"]), config, _class(config, kind), source)


def _kind(config: Mapping[str, Any]) -> Kind:
    """What is known of the config's model type. Raises BadInput where that is nothing."""
    model_type = config.get("model_type")
    if model_type is None:
        raise BadInput("model", "the config has no \"model_type\"; paste the whole config.json")
    if not isinstance(model_type, str):
        raise BadInput("model", f"the config's model_type is {shown(model_type)}; it must be one name, such as \"gpt2\"")
    if model_type not in kinds():
        near = difflib.get_close_matches(model_type[:60], kinds(), 3, 0.6)
        raise BadInput("model", f"model_type {shown(model_type)} is not one that transformers 5.17.0 knows" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    kind = kinds()[model_type]
    if kind is None:
        raise BadInput("model", f"model_type {shown(model_type)} has no class with a loss that a batch can be made for here; text, image, CLIP and Whisper models are covered{_part_alone(config)}")
    return kind


def _part_alone(config: Mapping[str, Any]) -> str:
    """A language model inside a larger one can be trained by itself."""
    text = config.get("text_config")
    part = text.get("model_type") if isinstance(text, Mapping) else None
    return f"; its text_config ({part}) can be pasted alone" if isinstance(part, str) and kinds().get(part) else ""


def _class(config: Mapping[str, Any], kind: Kind) -> str:
    """The class the config names where it has a loss; for a headless one, and for none, what `auto_class` or else the model type says."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else named
    if isinstance(first, str) and first.isidentifier():
        if task_of(first, config["model_type"], kind.encoder_decoder) is not None:
            return first
        if "For" in first and not first.endswith(("ForPreTraining", "ForConditionalGeneration")):
            raise BadInput("model", f"the config's architectures names {first[:60]}, whose batch is not made here; take {' or '.join(kind.classes.values())}")
    return _by_auto_class(config.get("auto_class"), kind) or next(iter(kind.classes.values()))


def _by_auto_class(auto_class: Any, kind: Kind) -> str | None:
    if auto_class is None or auto_class == "AutoModel":
        return None
    task = _AUTO.get(auto_class) if isinstance(auto_class, str) else None
    if task not in kind.classes:
        offered = [name for name, other in _AUTO.items() if other in kind.classes]
        raise BadInput("model", f"the config's auto_class is {shown(auto_class)}; this model type can be trained as {' or '.join(offered)}")
    return kind.classes[task]


def _model(name: str, config: Mapping[str, Any], model_class: str, source: Source) -> Model:
    kept = {k: v for k, v in config.items() if k not in _DROPPED}
    model_type = config["model_type"]
    kind = kinds()[model_type]
    task = task_of(model_class, model_type, kind.encoder_decoder)
    limit, target_limit = _limits(config, task, kind)
    image, patch = image_and_patch(config, kind) if "image_size" in _AXES[task] else (None, None)
    unit = token_side(config, image, patch) if task == "image_text" else None
    in_images = (image // patch // unit) ** 2 if unit else 0
    return Model(
        name=name, family=model_type, config=kept, model_type=model_type, model_class=model_class, task=task,
        hidden_size=_hidden_size(config, kind),
        axes=_AXES[task],
        default_sequence=_default_sequence(task, limit, in_images),
        default_target_sequence=min(_USUAL_TARGET, target_limit or _USUAL_TARGET) if "target_sequence" in _AXES[task] else None,
        default_image_size=image,
        sequence_limit=limit, target_sequence_limit=target_limit, patch_size=patch,
        token_side=unit,
        vocab_size=_vocabulary(config, task, kind),
        parameters=None,
        key=_digest(model_class, kept),
        source=source,
    )


def _digest(model_class: str, config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([model_class, config], sort_keys=True).encode()).hexdigest()[:16]


def _limits(config: Mapping[str, Any], task: Task, kind: Kind) -> tuple[int | None, int | None]:
    """(longest sequence, longest target) that the positions allow; transformers' defaults where the config is silent."""
    if task == "contrastive":
        return _given(_section(config, "text_config"), "max_position_embeddings", 64 if config["model_type"] == "siglip" else 77), None
    if task == "image_text":
        return _given(_section(config, "text_config"), "max_position_embeddings", kind.positions), None
    if task == "speech":
        return None, _given(config, "max_target_positions", 448)
    if task == "image":
        return None, None
    if config["model_type"] == "led":
        return _given(config, "max_encoder_position_embeddings", 16384), _given(config, "max_decoder_position_embeddings", 1024)
    limit = _given(config, "max_position_embeddings", _given(config, kind.positions_key, kind.positions))
    if limit is not None and kind.positions_taken:
        padding = config.get("pad_token_id")
        limit = max(1, limit - (padding if isinstance(padding, int) else 1) - 1)
    return limit, limit if task == "seq2seq" else None


def _default_sequence(task: Task, limit: int | None, in_images: int) -> int | None:
    """The usual length; where one image would leave no room for text in it, that much more than the image."""
    usual = _USUAL_SEQUENCE.get(task)
    usual = usual + in_images if usual and in_images + 2 > usual else usual
    if task == "contrastive":
        return limit
    return min(usual, limit or usual) if usual else None


def _vocabulary(config: Mapping[str, Any], task: Task, kind: Kind) -> int | None:
    if task == "image":
        return None
    return _given(_section(config, "text_config") if task in ("contrastive", "image_text") else config, "vocab_size", kind.vocab_size)


def _hidden_size(config: Mapping[str, Any], kind: Kind) -> int | None:
    """hidden_size, else the largest of hidden_sizes, else the text config's (as the Trainer's "auto" looks them up), else the class's default."""
    for part in (config, _section(config, "text_config")):
        for name in ("hidden_size", kind.hidden_key):
            if isinstance(part.get(name), int):
                return part[name]
        several = part.get("hidden_sizes")
        if isinstance(several, list) and several and all(isinstance(size, int) for size in several):
            return max(several)
    return kind.hidden_size


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return config.get(name) or {}


def _given(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    return default if value is None else value
