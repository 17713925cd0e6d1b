"""How long an estimate takes: `python benchmarks/speed.py [--record]`.

Replay with verdict, for every model whose tapes ship under eight setups; with --record (needs the [probe] extra) also
the recording of new tapes: three models of up to 1.5 B parameters and one of 70 B with 80 layers, in a process that has
imported torch and transformers, as the worker has. Seconds of processor time, so that a busy machine matters less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from explorer import Setup, estimate
from explorer.catalog import find_card, find_model, lengths, models
from explorer.dsconfig import resolve
from explorer.estimator import tapes

_CPU = {"device": "cpu"}
_WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 0": ({"stage": 0}, {}),
    "stage 1, of 8": ({"stage": 1}, {"world_size": 8}),
    "stage 2": ({"stage": 2}, {}),
    "stage 2, offloaded": ({"stage": 2, "offload_optimizer": _CPU}, {}),
    "stage 2, checkpointed": ({"stage": 2}, {"gradient_checkpointing": True, "micro_batch": 16}),
    "stage 3, of 8": ({"stage": 3}, {"world_size": 8}),
    "stage 3, offloaded": ({"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU}, {}),
    "stage 3, of 64, near the limit": ({"stage": 3}, {"world_size": 64, "near": True}),
}
_RECORDED: dict[str, Any] = {
    "gpt2": "gpt2",
    "meta-llama/Llama-3.2-1B": "meta-llama/Llama-3.2-1B",
    "openai/clip-vit-large-patch14": "openai/clip-vit-large-patch14",
    "Llama of 70 B, 80 layers": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192,
    },
}


def _seconds(action: Callable[[], Any], times: int = 3) -> float:
    """The median of a few runs, after one that does not count."""
    action()
    runs = []
    for _ in range(times):
        started = time.process_time()
        action()
        runs.append(time.process_time() - started)
    return statistics.median(runs)


def _setups() -> Iterator[tuple[str, Setup]]:
    for model in (m for m in models() if (tapes.SHIPPED / f"{m.key}.json.gz").exists()):
        for way, (zero, more) in _WAYS.items():
            near = more.get("near", False)
            given = {k: v for k, v in more.items() if k != "near"}
            setup = Setup.from_job({
                "model": model.name, "micro_batch": 4, "gpu": "H200", **given,
                "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}},
            })
            if near:
                setup = setup.replace(capacity_gib=min(139, estimate(setup, largest=False).peak.allocated_bytes * 1.08 / (1 << 30)))
            yield f"{model.name}, {way}", setup


def replay() -> None:
    """Print the median and the slowest."""
    read = sorted(((_seconds(lambda s=setup: estimate(s, largest=False)), name) for name, setup in _setups()), reverse=True)
    print(f"replay with verdict, {len(read)} setups: median {statistics.median(s for s, _ in read) * 1000:.0f} ms (bar 20), slowest {read[0][0] * 1000:.0f} ms (bar 100)")
    for seconds, name in read[:8]:
        print(f"  {seconds * 1000:4.0f} ms  {name}")


def record() -> None:
    """Print each model's."""
    from explorer.estimator.recorder import make_tape

    for name, model in _RECORDED.items():
        setup = Setup.from_job({"model": model, "micro_batch": 2, "deepspeed": {"bf16": {"enabled": True}}})
        found = find_model(setup.model)
        key = tapes.key(setup, resolve(setup).compute, found, lengths(setup, found), find_card("H200"))
        print(f"recording {name}: {_seconds(lambda s=setup, k=key: make_tape(s, k), 2):.1f} s (bar {4 if '70' in name else 2})")


def main() -> None:
    """Replay, and recording where asked."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--record", action="store_true", help="also record new tapes")
    given = options.parse_args()
    replay()
    if given.record:
        record()


if __name__ == "__main__":
    main()
