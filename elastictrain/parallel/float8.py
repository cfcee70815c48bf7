"""Linear layers whose matrix products are in 8-bit floats, for GPUs that have them.

Inputs and weights are rounded to e4m3, gradients of outputs to e5m2 (Micikevicius et al. 2022, arXiv:2209.05433). Each
tensor is first scaled so that its largest value is the format's largest, anew in every pass; the product is scaled back.
All three products of a layer are made so, the sums in them are fp32's. Everything else runs in bf16, and weights that are
stored, gathered, reduced and updated are what they are without it.

On failure: what the machine lacks is said in one line before training starts (:func:`missing_for_float8`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from elastictrain.errors import UsageError
from elastictrain.parallel.forwards import Forwards

CAPABILITY = (8, 9)  # of the first GPUs that multiply such numbers
MULTIPLE = 16  # every dim of a product is one
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def missing_for_float8() -> str | None:
    """What this machine lacks; None: nothing."""
    needs = f"fp8 needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or newer"
    if not torch.cuda.is_available():
        return f"{needs}, and there is no GPU here"
    found = torch.cuda.get_device_capability()
    return None if found >= CAPABILITY else f"{needs}, and the one here has {found[0]}.{found[1]}"


def float8_modules(task: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Names of the linear layers within blocks whose products can be in float8.

    Raises:
        UsageError: there is none.
    """
    modules = dict(task.named_modules())
    names = [
        name
        for name, module in modules.items()
        if type(module) is nn.Linear
        and any(name == block or name.startswith(f"{block}.") for block in blocks)
        and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
    ]
    if not names:
        raise UsageError(
            f'MixedPrecision("fp8"): {type(task).__name__} has no block with an nn.Linear whose widths are multiples of'
            f' {MULTIPLE}; name its blocks in pipeline_units(), or use "bf16"'
        )
    return names


def use_float8(task: nn.Module, names: Sequence[str], forwards: Forwards) -> None:
    """Let those of the named layers that are there compute in float8."""
    modules = dict(task.named_modules())
    for name in names:
        if name in modules:
            forwards.replace(modules[name], _forward)


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, nn.Linear)
    if not x.numel():  # an expert without tokens: there is nothing to scale
        weights = (None if tensor is None else tensor.bfloat16() for tensor in (module.weight, module.bias))
        return F.linear(x.bfloat16(), *weights)
    y: Tensor = Float8Product.apply(x.flatten(0, -2), module.weight)  # type: ignore[no-untyped-call]
    y = y.unflatten(0, x.shape[:-1])
    return y if module.bias is None else y + module.bias.to(y.dtype)


class Float8Product(torch.autograd.Function):
    """``x @ weight.T`` in bf16, of x (rows, in_features) and weight (out_features, in_features) in any float dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        small, scale = rounded(x, _E4M3)
        ctx.save_for_backward(small, scale, weight)
        ctx.dtype = x.dtype
        return _product((small, scale), rounded(weight, _E4M3), torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, x_scale, weight = ctx.saved_tensors
        small, scale = rounded(gradients[0], _E5M2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            w, w_scale = rounded(weight, _E4M3)
            of_x = _product((small, scale), (w.t().contiguous(), w_scale), ctx.dtype)
        if ctx.needs_input_grad[1]:
            # The sum is over rows: zeros fill them up to a number that can be multiplied.
            columns = [_padded(t.view(torch.uint8).t().contiguous()).view(t.dtype) for t in (small, x)]
            of_weight = _product((columns[0], scale), (columns[1], x_scale), weight.dtype)
        return of_x, of_weight


def rounded(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor over its scale, in ``dtype``, and the scale: an fp32 scalar by which it is to be multiplied again."""
    largest = torch.finfo(dtype).max
    scale = tensor.detach().abs().amax().float().clamp(min=1e-12) / largest
    return (tensor.detach().float() / scale).clamp(-largest, largest).to(dtype), scale


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """``a @ b.T``, both (rows, the dim that is summed over), with their scales."""
    made: Tensor = F.scaled_mm(
        a[0],
        b[0].t(),
        scale_a=a[1],
        scale_recipe_a=ScalingType.TensorWise,
        scale_b=b[1],
        scale_recipe_b=ScalingType.TensorWise,
        output_dtype=dtype,
    )
    return made


def _padded(tensor: Tensor) -> Tensor:
    return F.pad(tensor, (0, -tensor.shape[1] % MULTIPLE))
