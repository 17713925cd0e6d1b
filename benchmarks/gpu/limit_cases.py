"""Which jobs limits.py runs, and under which limits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GiB = 1 << 30
ROWS = Path(__file__).resolve().parents[1] / "accuracy" / "rows.jsonl"

NAMES = (
    "gpt2-z2", "bert-z2", "lora-llama-1b-z2", "bart-z1-fp16", "bart-z0", "vitl-z2-fp16", "gpt2-z1-fp16", "siglip-z1-fp16", "clipb-z2-fp16", "opt-z3-of8", "whisper-z2-fp16",
    "gpt2-z1off", "bert-z2off-gas3", "vitl-z3offboth", "bart-z3offboth", "phi3-z3offboth", "trainer-clip-z2off", "bart-z2off-ckpt",
    "lora-gpt2-z0", "lora-llama-1b-z2-checkpointed", "lora-llama-1b-z3-of-8", "internvl-z2-lora", "clip-large-frozen-vision-z2", "siglip-z3-of8",
    "trainer-gpt2-z2", "trainer-bert-z3", "mixtral-s-z2-of8", "dinov2-z2-of8", "vitl-z1-bucket2e8-of2", "t5-z0-bf16", "gpt2-z2-expandable", "gpt2-z3-expandable", "qwen3-s512",
)
TRACED = ("llama1b-z2-autocast-of8", "whisper-z1-autocast", "gemma2-z3-of8", "clipb-z2-ckpt", "llama1b-z2-eager", "llama3b-z3-of8", "whisper-z2-eager", "clipb-z2-of2", "llama1b-z3-of8-ckpt", "pythia-z3-of2")
"""Run without a limit only, with --addresses: their reserved bytes are estimated worst."""
FACTORS = (0.99, 1.01, 1.02, 1.04, 1.06, 1.08, 1.11, 1.15)
PAIRED = {"gpt2-z2": (1.01, 1.06, 1.11), "bert-z2": (0.99, 1.02, 1.04), "lora-llama-1b-z2": (1.01, 1.03, 1.06), "bart-z1-fp16": (1.01, 1.06, 1.11)}
OPTIONS: dict[str, dict[str, Any]] = {
    "expandable": {"expandable_segments": True}, "split": {"max_split_size_mb": 128}, "collect": {"garbage_collection_threshold": 0.8}, "roundup": {"roundup_power2_divisions": 4},
}
EXTRA = {
    "internvl-z3-of8": {"model": "OpenGVLab/InternVL3-1B-hf", "micro_batch": 1, "sequence": 512, "world_size": 8, "gpu": "H200", "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}},
    "qwen25-z2off-of8": {"model": "Qwen/Qwen2.5-0.5B", "micro_batch": 1, "sequence": 1024, "world_size": 8, "gpu": "H200", "deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}},
}
_SMALL = {"micro_batch": 1, "sequence": 128, "gpu": "H200"}
_BUCKETS = {"reduce_bucket_size": 5000000, "allgather_bucket_size": 5000000}
FLATTEN: dict[str, tuple[dict[str, Any], float, tuple[float, ...]]] = {
    "llama1b-z2off": ({"model": "meta-llama/Llama-3.2-1B", **_SMALL, "deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, **_BUCKETS}, "bf16": {"enabled": True}}}, 2471628800, (1.1, 1.4, 1.7, 1.95, 2.05)),
    "llama1b-z1-of64": ({"model": "meta-llama/Llama-3.2-1B", **_SMALL, "world_size": 64, "deepspeed": {"zero_optimization": {"stage": 1, **_BUCKETS}, "bf16": {"enabled": True}}}, 2471628800, (1.3, 1.6, 1.95, 2.1)),
    "qwen25-z2-of8": ({"model": "Qwen/Qwen2.5-0.5B", **_SMALL, "world_size": 8, "deepspeed": {"zero_optimization": {"stage": 2, **_BUCKETS}, "fp16": {"enabled": True}}}, 988065536, (1.5, 1.9, 2.05, 2.4)),
    "gpt2l-z2off": ({"model": "gpt2-large", **_SMALL, "deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, **_BUCKETS}, "fp16": {"enabled": True}}}, 1548060160, (1.2, 1.6, 1.95, 2.05)),
}
"""Job, bytes of its 16-bit weights (parameters × 2), limits as multiples of them."""


@dataclass(slots=True)
class Case:
    """One run."""

    name: str
    job: dict[str, Any]
    expected: int
    """Bytes it may take of the card, for the planning only."""
    base: str | None = None
    factor: float | None = None
    """Limit as a multiple of the base's peak allocated, or of the weights where `weights` is set."""
    weights: int | None = None
    sees: str = "card"
    """What DeepSpeed is told is available: the card's free bytes, or the limit's."""
    fills: bool = False
    """Whether another process fills the card but for the limit."""
    pair: str | None = None


def cases() -> list[Case]:
    """Every run: jobs without a limit first, pairs soon after, then limits of the others."""
    rows = {row["name"]: row for row in map(json.loads, ROWS.read_text().splitlines())}
    bases = {name: Case(name, {k: v for k, v in rows[name]["setup"].items() if k != "schema"}, rows[name]["peak"]["reserved_bytes"]) for name in NAMES}
    bases |= {name: Case(name, dict(job), 12 * GiB) for name, job in EXTRA.items()}
    paired = [Case(f"{name}+{option}", {**bases[name].job, "allocator": setting}, bases[name].expected + 2 * GiB, pair=name) for name in PAIRED for option, setting in OPTIONS.items()]
    pairs = [under(bases[name], factor, option) for name, factors in PAIRED.items() for factor in factors for option in (None, *OPTIONS)]
    others = [name for name in bases if name not in PAIRED]
    limited = [under(bases[name], FACTORS[(i + 2 * k) % len(FACTORS)]) for k in range(4) for i, name in enumerate(others)]
    traced = [Case(name, {k: v for k, v in rows[name]["setup"].items() if k != "schema"}, rows[name]["peak"]["reserved_bytes"]) for name in TRACED]
    return [*bases.values(), *pairs, *flattening(), *limited, *paired, *traced, *filling()]


def under(base: Case, factor: float, option: str | None = None) -> Case:
    """A job again under a limit, with an allocator option or without."""
    job = {**base.job, "allocator": OPTIONS[option]} if option else dict(base.job)
    return Case(f"{base.name}{'+' + option if option else ''}@{factor:.2f}", job, base.expected + GiB, base=base.name, factor=factor, pair=base.name if option else None)


def flattening() -> list[Case]:
    """ZeRO-1/2 made ready with less room than weights and flat buffer take together."""
    return [
        Case(f"flatten-{name}-{sees}@{factor:.2f}", dict(job), int(weights * factor) + GiB, base=None, factor=factor, weights=weights, sees=sees)
        for name, (job, weights, factors) in FLATTEN.items() for factor in factors for sees in (("limit", "card") if factor in (1.4, 1.6) else ("limit",))
    ]


def filling() -> list[Case]:
    """The same with the card really full."""
    chosen = (("llama1b-z2off", 1.4), ("llama1b-z2off", 2.05), ("gpt2l-z2off", 1.6))
    return [Case(f"full-{name}@{factor:.2f}", dict(FLATTEN[name][0]), 0, factor=factor, weights=FLATTEN[name][1], fills=True) for name, factor in chosen]
