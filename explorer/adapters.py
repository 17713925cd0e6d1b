"""LoRA adapters on a model, attached by the library `peft` (torch; called only where models are built)."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from explorer.errors import BadInput, missing_extra, reason

_OTHER_STARTS = ("gaussian", "eva", "olora", "pissa", "corda", "loftq", "orthogonal", "lora_ga")
"""Ways to choose an adapter's first numbers. They want real weights or data, and memory in training is the same."""


def attach(model: Any, lora: Mapping[str, Any], *, device: str, dtype: Any) -> Any:
    """`peft.get_peft_model(model, LoraConfig(**lora))`: adapters on `device`, in `dtype`, and all else frozen.

    peft makes adapters in fp32 unless `autocast_adapter_dtype=False`; DeepSpeed's engine then casts every parameter to the training
    dtype before it does anything with it (runtime/engine.py, `_cast_module_mixed_precision`), so that they train in `dtype` all the same.
    Raises BadInput naming the key that LoraConfig does not have, or giving peft's own reason.
    """
    if importlib.util.find_spec("peft") is None:
        raise missing_extra("lora", "peft")
    import peft
    import torch

    try:
        with torch.device(device):
            adapted = peft.get_peft_model(model, _config(lora, peft.LoraConfig), autocast_adapter_dtype=False, low_cpu_mem_usage=device == "meta")
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, ImportError, ZeroDivisionError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput("lora", f"peft refuses it: {reason(error)}") from None
    trained = [p for p in adapted.parameters() if p.requires_grad]
    if not trained:
        raise BadInput("lora", "leaves nothing to train; take inference_mode out")
    for parameter in trained:
        parameter.data = parameter.data.to(dtype)
    adapted.train()
    return adapted


def _config(lora: Mapping[str, Any], config_class: Any) -> Any:
    known = {f.name for f in fields(config_class)}
    for key in lora:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1, 0.5)
            raise BadInput(f"lora.{key}", "is not a field of peft's LoraConfig" + (f"; did you mean {near[0]!r}?" if near else ""))
    given = {key: dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value for key, value in lora.items()}
    if str(given.get("init_lora_weights")).lower().startswith(_OTHER_STARTS):
        del given["init_lora_weights"]
    return config_class(**given)
