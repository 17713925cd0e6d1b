"""Linear layers with frozen weights in 4 bit, as bitsandbytes holds and uses them (torch; on the meta device only).

What it stores and allocates was read from bitsandbytes 0.49 (nn/modules.py, `Linear4bit`; autograd/_functions.py, `MatMul4Bit`;
functional.py, `quantize_4bit` and `dequantize_4bit`); the package itself needs a GPU, and nothing of it is run here. Which layers
become such is transformers' own choice (integrations/bitsandbytes.py, `replace_with_bnb_linear`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from explorer.errors import BadInput, CouldNotRun, shown

BLOCK = 64
"""Weights that share one scale."""
BLOCK_OF_SCALES = 256
"""Scales that share one, in double quantisation."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Linear4bit(torch.nn.Linear):
    """A frozen weight of half a byte an element, kept in elements of the model's dtype, so that ZeRO-3 can divide it (`bnb_4bit_quant_storage`).

    `whole_numel` counts the weight's own elements. Its scales are buffers here and no module's in bitsandbytes: on every rank either way.
    """

    def __init__(self, outputs: int, inputs: int, bias: torch.nn.Parameter | None, *, dtype: torch.dtype, compute: torch.dtype, double: bool) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = inputs, outputs, bias
        self.whole_numel = inputs * outputs
        self.compute, self.double, self.copies_output = compute, double, False
        self.weight = torch.nn.Parameter(torch.empty(-(-self.whole_numel // (2 * dtype.itemsize)), 1, device="meta", dtype=dtype), requires_grad=False)
        scales = -(-self.whole_numel // BLOCK)
        self.register_buffer("absmax", torch.empty(scales, device="meta", dtype=torch.uint8 if double else torch.float32), persistent=False)
        if double:
            self.register_buffer("absmax_of_absmax", torch.empty(-(-scales // BLOCK_OF_SCALES), device="meta", dtype=torch.float32), persistent=False)

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in full, for a moment, and in double quantisation its scales for a shorter one."""
        scales = torch.empty(self.absmax.shape, device="meta", dtype=torch.float32) if self.double else None
        weight = torch.empty(self.out_features, self.in_features, device="meta", dtype=self.weight.dtype)
        del scales
        return weight.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compute = x.dtype if x.dtype in (torch.float32, torch.bfloat16) else self.compute
        out = _Product.apply(x.to(compute), None if self.bias is None else self.bias.to(compute), self).to(x.dtype)
        return out.clone() if self.copies_output else out


class _Product(torch.autograd.Function):
    """Nothing is saved: backward makes the whole weight once more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: Linear4bit) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.whole(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        to_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return torch.matmul(grad, ctx.layer.whole(grad.dtype)) if ctx.needs_input_grad[0] else None, to_bias, None


def quantize(built: Any, section: Mapping[str, Any], *, device: str, dtype: torch.dtype) -> None:
    """Replace the layers that transformers would, in place. Raises CouldNotRun off the meta device, BadInput naming a dtype that is none."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    if device != "meta":
        raise CouldNotRun("model: its quantization_config asks for weights in 4 bit, which the probe does not build; the estimate derives their memory, or take quantization_config out")
    named = str(section.get("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")
    if named not in _DTYPES:
        raise BadInput("model", f"the config's quantization_config.bnb_4bit_compute_dtype is {shown(named)}; choose one of {', '.join(_DTYPES)}")
    skipped = HfQuantizer.get_modules_to_not_convert(built, section.get("llm_int8_skip_modules"), built._keep_in_fp32_modules)
    for name, module in list(built.named_modules()):
        if should_convert_module(name, skipped) and (isinstance(module, Conv1D) or type(module) is torch.nn.Linear):
            outputs, inputs = module.weight.shape if type(module) is torch.nn.Linear else reversed(module.weight.shape)
            built.set_submodule(name, Linear4bit(outputs, inputs, module.bias, dtype=dtype, compute=_DTYPES[named], double=bool(section.get("bnb_4bit_use_double_quant"))))


def copy_outputs_under_adapters(adapted: Any) -> None:
    """peft copies what a 4-bit layer gives before it adds an adapter's part (tuners/lora/bnb.py, `Linear4bit.forward`)."""
    for module in adapted.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, Linear4bit):
            base.copies_output = True


def packed_away(built: Any) -> int:
    """Elements of 4-bit weights beyond those they are kept in: what the model has more than its parameters count."""
    return sum(m.whole_numel - m.weight.numel() for m in built.modules() if isinstance(m, Linear4bit))
