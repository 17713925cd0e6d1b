"""Write `model_types.json` from the installed transformers: `python -m explorer.catalog.survey` (needs torch and transformers)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from explorer.catalog.kinds import IMAGE_TEXT, Kind, Task, task_of

OTHER_INPUTS = ("siglip2", "metaclip_2", "shieldgemma2", "timm_wrapper", "dinat", "donut-swin", "fsmt")
"""Types whose class takes another batch than its name says, or a package beyond transformers."""
POSITIONS_TAKEN = ("camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")
"""Those whose modeling file counts positions from the padding's (create_position_ids_from_input_ids)."""
POSITIONS_KEYS = {"mpt": "max_seq_len"}
"""Those whose config counts its positions under a name of its own, outside transformers' attribute_map."""
INPUTS = {"image": "pixel_values", "contrastive": "input_ids", "speech": "input_features"}


def survey() -> dict[str, dict[str, Any] | None]:
    """model_type → the fields of its Kind that differ from Kind's defaults, or None."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return {name: _facts(name) for name in sorted(CONFIG_MAPPING_NAMES)}


def _facts(name: str) -> dict[str, Any] | None:
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(name)
    except Exception:  # a composite that must be given its parts, or a part that lives on the hub
        return None
    classes: dict[Any, str] = {}
    for task, model_class in _trainable(name, config):
        classes.setdefault(task, model_class)
    if not classes or name in OTHER_INPUTS or name.endswith("_assistant"):
        return None
    kind, defaults = _kind(name, config, classes), Kind(classes={})
    return {f.name: getattr(kind, f.name) for f in fields(Kind) if getattr(kind, f.name) != getattr(defaults, f.name)}


def _trainable(name: str, config: Any) -> Iterator[tuple[Task, str]]:
    """(task, class): classes of this very config that have a loss and take the batch of their task, the usual one first."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    special = {"clip": "CLIPModel", "siglip": "SiglipModel", "whisper": "WhisperForConditionalGeneration", **IMAGE_TEXT}
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    text = (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,) if encoder_decoder else ()
    tables = (special, *text, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)
    for table in tables:
        named = table.get(name, ())
        for model_class in (named,) if isinstance(named, str) else named:
            task = task_of(model_class, name, encoder_decoder)
            built = getattr(transformers, model_class, None)
            if task and built and built.config_class is type(config) and built.main_input_name == INPUTS.get(task, "input_ids"):
                yield task, model_class


def _kind(name: str, config: Any, classes: Mapping[Task, str]) -> Kind:
    names = getattr(config, "attribute_map", {})
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    return Kind(
        classes=classes,
        encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
        hidden_size=hidden or max(getattr(config, "hidden_sizes", None) or [0]) or _number(getattr(config, "text_config", None), "hidden_size"),
        hidden_key=names.get("hidden_size", "hidden_size"),
        positions=_number(config, POSITIONS_KEYS.get(name, "max_position_embeddings")) or (_number(config.text_config, "max_position_embeddings") if "image_text" in classes else None),
        positions_key=POSITIONS_KEYS.get(name) or names.get("max_position_embeddings", "max_position_embeddings"),
        positions_taken=name in POSITIONS_TAKEN,
        vocab_size=_number(config, "vocab_size") or _number(getattr(config, "text_config", None), "vocab_size"),
        image_size=_number(config, "image_size") or _number(getattr(config, "vision_config", None), "image_size"),
        patch_size=_number(config, "patch_size") or _number(getattr(config, "vision_config", None), "patch_size"),
        free_heads=bool(hidden and heads and hidden % heads),
    )


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, list | tuple) and len(set(value)) == 1 else value
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


def main() -> None:
    """Survey, and write beside this file."""
    path = Path(__file__).parent / "model_types.json"
    rows = (f" {json.dumps(name)}: {json.dumps(facts)}" for name, facts in survey().items())
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
