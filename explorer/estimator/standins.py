"""Make a recording on the meta device say what CUDA would allocate.

Two kinds of correction, each with its source. *Stand-ins* replace an operation whose CUDA kernel saves or lays out other
tensors than the composite one: attention, dropout, half-precision softmax. The *scratch table* adds what a kernel asks of
PyTorch's allocator inside itself. Formulas were read from the kernels' sources and checked block by block against
benchmarks/gpu/kernels.py on an H200 (torch 2.11, cuDNN 9.19). No figure here is fitted to a training run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from explorer.estimator.autocast import Autocast
from explorer.estimator.tape import Varying
from explorer.units import round_up

_annotation: list[Varying] = []


@contextmanager
def varying(**how: int) -> Iterator[None]:
    """Blocks allocated inside follow `Varying(**how)`: rounded lengths and thresholds that no polynomial expresses."""
    _annotation.append(Varying(**how))
    try:
        yield
    finally:
        _annotation.pop()


def annotation() -> Varying | None:
    """How the block being allocated varies, if in a special way."""
    return _annotation[-1] if _annotation else None


def _scratch(n_bytes: int) -> torch.Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device="meta")


# --- attention ---------------------------------------------------------------------------------------------------------


def attention_kernel(*, dtype_bytes: int, head_dim: int, masked: bool, mask_grad: bool, grouped: bool, packed: bool, generation: str) -> str:
    """The kernel `scaled_dot_product_attention` runs: "cudnn", "flash", "efficient" or "math" (ATen/native/transformers/cuda/sdp_utils.cpp).

    `generation`: "hopper" (compute capability 9.0 and newer, where cuDNN 9.15 or newer comes first), "ampere" (8.x), "older".
    `packed`: the last dimension of every input is contiguous, which all fused kernels want (T5's position bias is not).
    """
    if not packed:
        return "math"
    if dtype_bytes == 4 or mask_grad or generation == "older":
        return "math" if grouped else "efficient"
    if generation == "hopper" and head_dim <= 256:
        return "cudnn"
    if not masked and head_dim <= 256:
        return "flash"
    return "math" if grouped else "efficient"


class _Attention(torch.autograd.Function):
    """A fused attention: keeps q, k, v, its output, the log-sum-exp and the mask.

    The output is laid out as the query is, so that the usual transpose after it copies nothing; the memory-efficient kernel's
    always is (batch, sequence, heads, dim).
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, kernel: str) -> torch.Tensor:
        batch, heads, length, _ = q.shape
        seeds = [torch.empty(1, dtype=torch.int64, device=q.device) for _ in range(2)] if kernel == "cudnn" else []
        if kernel == "efficient" or v.shape[-1] != q.shape[-1]:
            out = torch.empty(batch, length, heads, v.shape[-1], dtype=q.dtype, device=q.device).transpose(1, 2)
        else:
            out = torch.empty_like(q)
        if kernel == "efficient":
            with varying(length=length, multiple=32):
                lse = torch.empty(batch, heads, round_up(length, 32), dtype=torch.float32, device=q.device)
        else:
            lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
        if kernel == "flash":
            seeds = [torch.empty(2, dtype=torch.int64, device=q.device)]
        ctx.save_for_backward(q, k, v, out, lse, *([] if mask is None else [mask]), *seeds)
        ctx.kernel, ctx.mask = kernel, mask is not None
        ctx.mask_shape = None if mask is None else mask.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, *_ = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        bias = _BACKWARD[ctx.kernel](q, k, v, ctx.needs_input_grad[3])
        if bias is not None:
            bias = bias.sum_to_size(ctx.mask_shape)
        return dq, dk, dv, bias, None


def _cudnn_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: bool) -> None:
    """One workspace: fp32 dQ, fp32 row sums, and dK and dV of every query head where heads are grouped."""
    batch, heads, length, dim = q.shape
    expanded = 2 * batch * heads * k.shape[2] * dim * q.element_size() if k.shape[1] != heads else 0
    _scratch(4 * batch * heads * length * (dim + 1) + expanded + 256)


def _flash_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: bool) -> None:
    """fp32 row sums and dQ over lengths rounded to 128; dK and dV of every query head where heads are grouped (flash_api.cpp, mha_bwd)."""
    batch, heads, length, dim = q.shape
    rounded_dim = round_up(dim, 32 if dim <= 128 else 64)
    rounded = round_up(length, 128)
    with varying(length=length, multiple=128):
        sums = _scratch(4 * batch * heads * rounded)
        accumulator = _scratch(4 * batch * rounded * heads * rounded_dim)
    expanded = [torch.empty(batch, k.shape[2], heads, dim, dtype=q.dtype, device=q.device) for _ in range(2)] if k.shape[1] != heads else []
    del sums, accumulator, expanded


def _efficient_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: bool) -> torch.Tensor | None:
    """fp32 dQ over lengths rounded to 64 and dims to 64 or 128; row sums; the bias's own gradient (attention_backward.cu)."""
    batch, heads, length, dim = q.shape
    grad_bias = torch.empty(batch, heads, length, k.shape[2], dtype=q.dtype, device=q.device) if bias else None
    if q.dtype == torch.float32:
        product = torch.empty(batch, heads, length, dim, dtype=torch.float32, device=q.device)
        summed = torch.empty(batch, length, heads, dtype=torch.float32, device=q.device)
        delta = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
        del product, summed
    else:
        delta = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    rows = 128 if dim > 64 else 64
    per_block = 4 * rows * round_up(dim, 64) + 16 * (rows // 64)
    blocks = -(-length // rows)
    with varying(length=length, multiple=rows):
        workspace = _scratch(batch * heads * blocks * per_block)
    del workspace, delta
    return grad_bias


_BACKWARD: dict[str, Callable[..., torch.Tensor | None]] = {"cudnn": _cudnn_backward, "flash": _flash_backward, "efficient": _efficient_backward}


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout_p: float, is_causal: bool, scale: float | None, grouped: bool) -> torch.Tensor:
    """The unfused kernel, step by step, with CUDA's dropout (`_scaled_dot_product_attention_math` in ATen/native/transformers/attention.cpp)."""
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    half_scale = (scale if scale is not None else q.shape[-1] ** -0.5) ** 0.5
    q = q * half_scale
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, torch.scalar_tensor(0.0, dtype=q.dtype, device=q.device), torch.scalar_tensor(-math.inf, dtype=q.dtype, device=q.device))
    if grouped:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], -3) for t in (k, v))
    weights = q @ (k.transpose(-2, -1) * half_scale)
    if mask is not None:
        weights.add_(mask)
    weights = torch.ops.aten._safe_softmax(weights, -1)
    if dropout_p > 0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    return (weights @ v).to(dtype)


def attention(generation: str, forced: str | None, autocast: Autocast | None = None) -> Callable[..., torch.Tensor]:
    """A `scaled_dot_product_attention` that allocates as CUDA's kernels do on that generation of cards."""

    def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):  # noqa: ANN001, ANN202 (torch's signature)
        if autocast is not None:
            query, key, value = (autocast.lower(t) for t in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = autocast.lower(attn_mask)
        grouped = enable_gqa and key.shape[1] != query.shape[1]
        kernel = forced or attention_kernel(
            dtype_bytes=query.element_size(), head_dim=query.shape[-1], masked=attn_mask is not None,
            mask_grad=attn_mask is not None and attn_mask.requires_grad, grouped=grouped, generation=generation,
            packed=all(t is None or t.stride(-1) == 1 for t in (query, key, value, attn_mask)),
        )
        if attn_mask is not None and attn_mask.dtype == torch.bool and kernel != "math":
            attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype, device=query.device)
        if kernel == "math":
            with torch._C.DisableTorchFunction():
                return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, grouped)
        return _Attention.apply(query, key, value, attn_mask, kernel)

    return scaled_dot_product_attention


# --- dropout and softmax ------------------------------------------------------------------------------------------------


def dropout(input, p=0.5, training=True, inplace=False):  # noqa: A002, ANN001, ANN201 (torch's signature)
    """CUDA's fused dropout, which keeps a mask of one byte an element (ATen/native/Dropout.cpp)."""
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


class _HalfSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(out)
        ctx.dtype = x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        result = torch.empty(out.shape, dtype=ctx.dtype, device=out.device)
        torch.empty_like(grad)
        return result


def softmax(plain: Callable[..., torch.Tensor], autocast: Autocast | None = None) -> Callable[..., torch.Tensor]:
    """CUDA reads fp16 and writes fp32 in one kernel where the composite makes an fp32 copy first (ATen/native/SoftMax.cpp)."""

    def wrapped(input, dim=None, _stacklevel=3, dtype=None):  # noqa: A002, ANN001, ANN202 (torch's signature)
        if autocast is not None and dtype is None:
            dtype = torch.float32
        if input.dtype == torch.float16 and dtype == torch.float32:
            return _HalfSoftmax.apply(input)
        return plain(input, dim=dim, dtype=dtype)

    return wrapped


class _GroupedProduct(torch.autograd.Function):
    """The grouped matrix product of an expert layer (the meta kernel takes bf16 only, CUDA's every float type)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return torch.empty(x.shape[0], weight.shape[-1], dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


def grouped_mm(mat_a, mat_b, *, offs=None, **_):  # noqa: ANN001, ANN003, ANN201 (torch's signature)
    """`torch.nn.functional.grouped_mm` by shape alone."""
    return _GroupedProduct.apply(mat_a, mat_b, offs)


class _MaskedScatter(torch.autograd.Function):
    """Image features put in the place of their tokens; no meta kernel counts the mask's ones, which are the source's rows here.

    CUDA makes an int64 prefix sum of the expanded mask and a copy of it (ATen/native/cuda/IndexKernel.cu, `masked_scatter__cuda`). Backward, `masked_select`
    copies the expanded mask again, for the places of its ones: three int64 each (`nonzero`, then `index`).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.source = source.shape
        out = x.clone()
        _scratch(9 * x.numel())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        to_x = grad.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[2]:
            return to_x, None, None
        expanded = _scratch(grad.numel())
        places = _scratch(grad.dim() * 8 * ctx.source.numel())
        del expanded
        to_source = torch.empty(ctx.source, dtype=grad.dtype, device=grad.device)
        del places
        return to_x, None, to_source


def masked_scatter(x, mask, source):  # noqa: ANN001, ANN201 (torch's signature)
    """`Tensor.masked_scatter` as CUDA's kernels allocate."""
    return _MaskedScatter.apply(x, mask, source)


@contextmanager
def _whole_tensor_methods() -> Iterator[None]:
    """`Tensor.masked_scatter` replaced, and transformers' checks of how many ones its mask has, which a recording cannot answer, left out."""
    kept, checks = torch.Tensor.masked_scatter, os.environ.get("TRANSFORMERS_DISABLE_TORCH_CHECK")
    torch.Tensor.masked_scatter = masked_scatter
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    try:
        yield
    finally:
        torch.Tensor.masked_scatter = kept
        if checks is None:
            del os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"]
        else:
            os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = checks


@contextmanager
def installed(generation: str, forced: str | None = None, autocast: Autocast | None = None) -> Iterator[None]:
    """All stand-ins in place of torch's functions; under `autocast` they cast as what they stand for would."""
    replaced = {"scaled_dot_product_attention": attention(generation, forced, autocast), "dropout": dropout, "softmax": softmax(F.softmax, autocast), "grouped_mm": grouped_mm}
    kept = {name: getattr(F, name) for name in replaced if hasattr(F, name)}
    for name in kept:
        setattr(F, name, replaced[name])
    try:
        with _whole_tensor_methods():
            yield
    finally:
        for name, function in kept.items():
            setattr(F, name, function)


# --- scratch table -------------------------------------------------------------------------------------------------------


def scratch_after(func: Any, args: tuple[Any, ...], out: Any, safe: set[int]) -> Iterator[tuple[float, Varying | None]]:
    """(bytes, how they vary) of each block the CUDA kernel of `func` holds inside itself once its results are allocated.

    `safe`: storages of the trace's safe softmaxes, which CUDA makes of simpler operations; kept here from call to call.
    """
    name = func.name()
    if name == "aten::_safe_softmax":
        safe.add(out.untyped_storage()._cdata)
        return iter([(out.numel(), None), (out.numel() // out.shape[-1], None)])
    if name == "aten::_softmax_backward_data":  # grad × output first (ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out)
        return iter([(args[0].numel() * args[0].element_size(), None)])
    rule = _SCRATCH.get(name)
    return rule(args, out) if rule else iter(())


def _convolution_layout(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> int:
    """cuDNN's copies to channels-last, with input channels padded to a multiple of 16 bytes."""
    per = x.element_size()
    channels = round_up(weight.shape[1], 16 // per)
    spatial = math.prod(x.shape[2:])
    return per * (x.shape[0] * channels * spatial + out.numel() + weight.shape[0] * channels * math.prod(weight.shape[2:]))


def _convolution(args: tuple[Any, ...], out: Any) -> Iterator[tuple[float, Varying | None]]:
    yield _convolution_layout(args[0], args[1], out) + 16, None


def _convolution_backward(args: tuple[Any, ...], out: Any) -> Iterator[tuple[float, Varying | None]]:
    grad, x, weight = args[:3]
    accumulators = 3 * 4 * weight.shape[0] * round_up(weight.shape[1], 8) * math.prod(weight.shape[2:]) if x.element_size() == 2 else 0
    yield _convolution_layout(x, weight, grad) + accumulators + 144, None


def _embedding_backward(args: tuple[Any, ...], out: Any) -> Iterator[tuple[float, Varying | None]]:
    """Above 3072 indices they are sorted, and partial sums kept in fp32: one row a different index, and one more every ten indices
    (ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu)."""
    grad, indices, rows = args[:3]
    tokens = indices.numel()
    how = Varying(length=tokens, above=3072)
    width = grad.shape[-1]
    for _ in range(6):
        yield 8 * tokens, how
    yield 8.8 * tokens, how
    yield 4 * width, how._replace(most=rows)


def _column_sum(args: tuple[Any, ...], out: Any) -> Iterator[tuple[float, Varying | None]]:
    """Gradients of biases and norm weights: a sum over all but the last dimension."""
    x, dims = args[0], args[1]
    if dims and x.dim() > 1 and sorted(d % x.dim() for d in dims) == list(range(x.dim() - 1)) and x.is_contiguous():
        yield 1, Varying(length=x.numel() // x.shape[-1], columns=x.shape[-1])


_SCRATCH: dict[str, Callable[[tuple[Any, ...], Any], Iterator[tuple[float, Varying | None]]]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::sum.dim_IntList": _column_sum,
}
