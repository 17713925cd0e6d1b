"""Model facts that other tools ask for, counted once on real models on the meta device and kept in `facts.json`.

    python -m benchmarks.accuracy.facts        # adds what rows.jsonl names and facts.json lacks (needs torch, transformers, accelerate)
    python -m benchmarks.accuracy.facts --all  # counts everything again
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.accuracy.formulas import Decoder
from benchmarks.accuracy.rows import read
from explorer.catalog import Model, find_model
from explorer.setup import Setup

FACTS = Path(__file__).parent / "facts.json"


def load() -> dict[str, dict[str, Any]]:
    """Model key → facts; empty where nothing has been counted."""
    return json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.exists() else {}


def decoder(facts: Mapping[str, Any]) -> Decoder | None:
    """The shape of a decoder-only model, None for any other."""
    return Decoder(**facts["shape"]) if facts["task"] == "causal" and facts["shape"] else None


def count(model: Model) -> dict[str, Any]:
    """The facts of one model."""
    import torch

    from explorer.workload import build_config, build_model

    setup = Setup(model=dict(model.config) if model.source == "config" else model.name, micro_batch=1)
    built = build_model(model, setup, device="meta", dtype=torch.float32)
    return {
        "name": model.name,
        "class": model.model_class,
        "task": model.task,
        # DeepSpeed's model_to_params (runtime/zero/stage3.py): shared parameters once; a layer is a module's own parameters.
        "parameters": sum(p.numel() for p in {id(p): p for p in built.parameters()}.values()),
        "largest_layer": max(sum(p.numel() for p in m.parameters(recurse=False)) for m in built.modules()),
        "accelerate_bytes": _accelerate_bytes(build_config(model, setup)),
        "shape": _shape(built),
    }


def _accelerate_bytes(config: Any) -> int | None:
    """Size in fp32 as `accelerate estimate-memory` finds it: AutoModel on the meta device, without a head (commands/estimate.py)."""
    import torch
    from accelerate import init_empty_weights
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoModel

    try:
        with init_empty_weights():
            return int(calculate_maximum_sizes(AutoModel.from_config(config, dtype=torch.float32))[0])
    except (ValueError, KeyError, RuntimeError):  # a class that AutoModel does not know
        return None


def _shape(built: Any) -> dict[str, int] | None:
    """A text model's shape by transformers' common names; None where it has no such names."""
    config = built.config
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if not all(isinstance(getattr(config, name, None), int) for name in names):
        return None
    layers, hidden, heads, vocabulary = (getattr(config, name) for name in names)
    width = next((v for n in ("intermediate_size", "ffn_dim", "n_inner") if isinstance(v := getattr(config, n, None), int)), 4 * hidden)
    gated = any(name.rpartition(".")[2] in ("gate_proj", "gate_up_proj", "w3") for name, _ in [*built.named_modules(), *built.named_parameters()])
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "feed_forward": width, "mlp_matrices": 3 if gated else 2, "vocabulary": vocabulary,
        "experts": getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0,
    }


def main() -> None:
    """Count what is missing."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--all", action="store_true", help="count every model again")
    known = {} if options.parse_args().all else load()
    for model in {m.key: m for m in (find_model(row.setup["model"]) for row in read())}.values():
        if model.key not in known:
            print(model.name, flush=True)
            known[model.key] = count(model)
    FACTS.write_text(json.dumps(dict(sorted(known.items(), key=lambda item: item[1]["name"])), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
