"""Stand-ins against what CUDA's kernels really asked of the allocator (benchmarks/gpu/kernels-h200.jsonl, read on an H200)."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from explorer.estimator.program import ALLOCATE, END_OF_FORWARD, FREE  # noqa: E402
from explorer.estimator.tape import column_sum_scratch  # noqa: E402
from explorer.estimator.trace import record  # noqa: E402

ROWS = {r["operation"]: r for r in map(json.loads, (Path(__file__).parents[2] / "benchmarks/gpu/kernels-h200.jsonl").read_text().splitlines())}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ATTENTION = re.compile(r"(?:(FLASH|EFFICIENT)_ATTENTION|sdpa) (\w+) b(\d+) h(\d+)(?:/(\d+))? s(\d+)(?: k(\d+))? d(\d+)(.*)")
FEW = 8192
"""Bytes that seeds, scalars and the loss of the trace make up."""


class Attention(torch.nn.Module):
    def __init__(self, causal, grouped, mask, dropout):
        super().__init__()
        self.causal, self.grouped, self.mask, self.dropout = causal, grouped, mask, dropout

    def forward(self, q, k, v):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.causal, dropout_p=self.dropout, enable_gqa=self.grouped)
        result = type("Output", (), {})()
        result.loss = out.sum()
        self.kept = out
        return result


def sizes(trace):
    """(forward, backward): signed bytes in order, as the measurements are written."""
    block, forward, backward = {}, [], []
    now = forward
    for event in trace.events:
        if event[0] == ALLOCATE:
            block[event[1]] = event[2]
            now.append(event[2])
        elif event[0] == FREE:
            now.append(-block[event[1]])
        elif event[0] == END_OF_FORWARD:
            now = backward
    return forward, backward


def attention_rows():
    for name, row in ROWS.items():
        match = ATTENTION.match(name)
        if match and "error" not in row and not ("EFFICIENT" in name and " d256" in name):
            yield pytest.param(match, row, id=name)


@pytest.mark.parametrize(("match", "row"), list(attention_rows()))
def test_attention(match, row):
    """What a fused kernel keeps, and the most its backward holds, to a few bytes.

    The memory-efficient kernel at 256 dimensions, which keeps more accumulators, is known to differ and left out.
    """
    forced, dtype, batch, heads, kv, length, kv_length, dim, rest = match.groups()
    dtype, batch, heads, length, dim = DTYPES[dtype], int(batch), int(heads), int(length), int(dim)
    kv, kv_length = int(kv or heads), int(kv_length or length)
    q = torch.empty(batch, length, heads, dim, dtype=dtype, device="meta").transpose(1, 2).requires_grad_()
    k, v = (torch.empty(batch, kv_length, kv, dim, dtype=dtype, device="meta").transpose(1, 2).requires_grad_() for _ in range(2))
    mask = None
    if "bool mask" in rest:
        mask = torch.empty(batch, 1, length, kv_length, dtype=torch.bool, device="meta")
    elif "float mask" in rest:
        mask = torch.empty(batch, 1, length, kv_length, dtype=dtype, device="meta")
    elif "bias grad" in rest:
        mask = torch.empty(1, heads, length, kv_length, dtype=dtype, device="meta", requires_grad=True)
    causal = mask is None and ("causal" in rest and "causal=False" not in rest)
    trace = record(Attention(causal, kv != heads, mask, 0.1 if "dropout" in rest else 0.0), {"q": q, "k": k, "v": v}, "hopper", forced.lower() if forced else None)
    forward, backward = sizes(trace)
    slack = FEW + padded(mask, length, heads, batch) + (4 * batch * heads * length if "bias grad" in rest else 0)  # Python lets go of the log-sum-exp last
    assert max(accumulate(backward)) == pytest.approx(max(accumulate(row["backward"])), abs=slack)
    if any("_attention" in op for op in row["forward_ops"]):
        assert sum(forward) == pytest.approx(sum(row["forward"]), abs=padded(mask, length, heads, batch) + FEW)


def padded(mask, length, heads, batch):
    """The memory-efficient kernel pads a mask whose length is no multiple of eight; that copy is not stood in for."""
    return 0 if mask is None or length % 8 == 0 else 4 * batch * length * (length % 8 + 8)


def test_sum_over_rows():
    """A bias's gradient: the last three blocks of the measured backward are the sum's buffer, its semaphores, and their frees."""
    for dtype in DTYPES:
        assert column_sum_scratch(8 * 257, 4096) in ROWS[f"linear bias {dtype}"]["backward"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "vocabulary", "width"), [(512, 50257, 768), (4096, 50257, 768), (4096, 128256, 2048), (32768, 50257, 768)])
def test_embedding_backward(dtype, tokens, vocabulary, width):
    row = ROWS[f"embedding {dtype} tokens{tokens} vocab{vocabulary} width{width}"]
    grad = vocabulary * width * DTYPES[dtype].itemsize
    measured = max(accumulate(row["backward"])) - grad
    partial = int(4.4 * width * tokens)
    assert measured == 0 if tokens <= 3072 else measured == pytest.approx(partial, rel=0.2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_convolution(dtype):
    from explorer.estimator.standins import scratch_after

    x = torch.empty(64, 3, 224, 224, dtype=DTYPES[dtype], device="meta")
    weight = torch.empty(1024, 3, 14, 14, dtype=DTYPES[dtype], device="meta")
    out = torch.nn.functional.conv2d(x, weight, stride=14)
    ((n_bytes, how),) = scratch_after(torch.ops.aten.convolution.default, (x, weight), out, set())
    assert how is None
    assert n_bytes in ROWS[f"conv2d patch14 {dtype} b64"]["forward"]
