"""What `torch.autocast` casts on CUDA, done on the meta device, which has no autocast of its own (torch).

The lists are ATen/autocast_mode.h's (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE), as far as models call
them. A weight is cast once a forward and kept, as `cached_cast` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

LOWER = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "einsum", "chain_matmul", "prelu",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
}
FP32 = {
    "layer_norm", "group_norm", "pow", "__pow__", "__rpow__", "exp", "log", "log1p", "rsqrt", "reciprocal", "softplus", "logsumexp", "norm", "cosine_similarity",
    "nll_loss_nd", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits", "cdist",
}
FP32_RESULT = {"softmax", "log_softmax", "sum", "cumsum", "prod"}
"""Whose result is fp32 unless the caller says otherwise."""
WIDEST = {"cat", "concat", "stack", "addcmul", "addcdiv", "tensordot", "dot", "index_put", "scatter_add"}
_HALF = (torch.float16, torch.bfloat16)


class Autocast(TorchFunctionMode):
    """One forward under autocast to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.cache: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name, kwargs = func.__name__, dict(kwargs or {})
        if name == "cross_entropy":
            return _cross_entropy(*args, **kwargs)
        cast = self.lower if name in LOWER else _fp32 if name in FP32 | FP32_RESULT else _widest(args) if name in WIDEST else None
        if name in FP32_RESULT and (kwargs.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in args)):
            cast = None
        if cast is not None:
            args, kwargs = _each(args, cast), {k: _each(v, cast) for k, v in kwargs.items()}
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        self.cache.clear()
        super().__exit__(*error)

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the lower precision; a weight's cast is made once."""
        if tensor.dtype != torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad) or tensor._is_view():
            return tensor.to(self.dtype)
        if id(tensor) not in self.cache:
            self.cache[id(tensor)] = tensor.to(self.dtype)
        return self.cache[id(tensor)]


def _cross_entropy(input: torch.Tensor, target: torch.Tensor, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0) -> torch.Tensor:  # noqa: A002 (torch's signature)
    """Not a cast of its own: log_softmax is given its input's dtype (ATen/native/LossNLL.cpp), and the loss after it casts to fp32."""
    if target.is_floating_point() or label_smoothing:
        return F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    return F.nll_loss(_fp32(F.log_softmax(input, 1, dtype=input.dtype)), target, weight, ignore_index=ignore_index, reduction=reduction)


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _widest(args: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Mixed inputs meet in fp32."""
    found: set[torch.dtype] = set()
    _each(args, lambda t: found.add(t.dtype) or t)
    return _fp32 if torch.float32 in found and found & set(_HALF) else None


def _each(value: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return cast(value)
    if isinstance(value, tuple | list):
        return type(value)(_each(v, cast) for v in value)
    return value
