"""Small jobs for real engines: what they hold is counted in their parameters."""

from __future__ import annotations

from typing import Any

import pytest

from explorer.estimator import estimate as estimator
from explorer.estimator import replay, work
from explorer.profile import Profile
from explorer.setup import Setup

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128}
GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
"""Without dropout: with it the CPU's attention keeps what CUDA's does not."""
PARAMETERS = {"llama": 2 * 512 * 64 + 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64, "gpt2": (512 + 128) * 64 + 4 * (12 * 64 * 64 + 13 * 64) + 2 * 64}


def job(model: dict[str, Any], stage: int, *, world_size: int = 1, offload: bool = False, accumulation: int = 1, precision: str = "bf16", **fields: Any) -> Setup:
    """A job of a quarter of a million parameters, with buckets to scale."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 100_000}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": 20_000, "stage3_param_persistence_threshold": 1000}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    deepspeed: dict[str, Any] = {"zero_optimization": zero, "gradient_accumulation_steps": accumulation, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    if precision != "fp32":
        deepspeed[precision] = {"enabled": True}
    return Setup(model=model, micro_batch=2, sequence=64, world_size=world_size, deepspeed=deepspeed, **fields)


def estimated(setup: Setup) -> Profile:
    """The estimate without what a CPU has not: the workspaces of cuBLAS and cuBLASLt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "DEFAULT_WORKSPACE", 512)
        patch.setattr(replay, "CUBLASLT_BYTES", 512)
        return estimator.estimate(setup, largest=False)
