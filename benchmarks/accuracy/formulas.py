"""Closed formulas that people size training runs by, restated from their sources. Bytes throughout.

Symbols: s tokens, b samples, h hidden size, L layers, a attention heads, V vocabulary, P parameters, N GPUs (data parallel only).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """What the formulas ask of a decoder-only transformer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    """Width of the MLP."""
    mlp_matrices: int
    """2, or 3 for a gated MLP."""
    vocabulary: int
    experts: int = 0
    """0 for a dense model."""


def megatron_activations(d: Decoder, *, batch: int, sequence: int, recompute: bool, fused: bool) -> float:
    """Activations of one GPU in 16 bit: Korthikanti et al. 2022 (arXiv 2205.05198), no tensor or pipeline parallelism.

    A layer keeps s·b·h·(34 + 5·a·s/h) (equation 2); 34·s·b·h where nothing of size s² is kept (equation 6, there by selective
    recomputation, here by a fused attention kernel); its input, 2·s·b·h, where all of it is recomputed (table 2). Outside the layers
    (section 4.3): the dropout mask of the embedding, the inputs of the last norm and of the output projection, and logits in fp32.
    """
    sbh = sequence * batch * d.hidden
    layer = 2 * sbh if recompute else sbh * 34 + (0 if fused else 5 * d.heads * sequence**2 * batch)
    return layer * d.layers + sbh * (1 + 4 * (1 + d.vocabulary / d.hidden))


def cookbook_parameters(d: Decoder, *, sequence: int, experts: int | None = None) -> float:
    """Parameters as the calculator counts them: two embeddings, learned positions, biasless attention and MLP matrices, norms."""
    h, layers = d.hidden, d.layers
    rest = 2 * d.vocabulary * h + h * sequence + 8 * h * layers + 2 * h + int(2 * (1 + d.kv_heads / d.heads) * layers * h * h)
    return rest + max(1, d.experts if experts is None else experts) * d.mlp_matrices * layers * h * d.feed_forward


def cookbook(d: Decoder, *, batch: int, sequence: int, stage: int, gpus: int, checkpointing: bool, mixed: bool, allgather_bucket: int = 500_000_000, live_parameters: int = 1_000_000_000) -> float:
    """Memory of one GPU in training with AdamW: EleutherAI's cookbook, calc/calc_transformer_mem.py at commit 827ee3b, the companion of "Transformer Math 101".

    Weights (2 bytes a parameter, 4 in full precision), gradients (4, its default), optimizer (12), each divided among the GPUs from its
    ZeRO stage on; one all-gather bucket from stage 1 and the live parameters at stage 3 where there are several GPUs; activations
    s·b·h·L·(16w + 2 + (2w + 1)·a·s/h) with w bytes a value, without the last term under checkpointing.
    """
    value = 2 if mixed else 4
    parameters = cookbook_parameters(d, sequence=sequence)
    weights = parameters * value / (gpus if stage == 3 else 1)
    gradients = parameters * 4 / (gpus if stage >= 2 else 1)
    optimizer = parameters * 12 / (gpus if stage >= 1 else 1)
    buffers = 0
    if gpus > 1:
        buffers = (allgather_bucket * value if stage >= 1 else 0) + (live_parameters * value if stage == 3 else 0)
    attention = 0.0 if checkpointing else (2 * value + 1) * d.heads * sequence / d.hidden
    activations = sequence * batch * d.hidden * d.layers * (16 * value + 2 + attention)
    return weights + gradients + optimizer + buffers + activations
