"""Matrix products of a muMoE that keep little for the backward pass.

Shapes: M tokens, I input width, C columns of a factor, its further modes flattened.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from model.processor import has_bf16_products


def affine(z_MI: Tensor, factor: Tensor, *, bias: bool, activated: bool) -> Tensor:
    """The input, or GELU of it, with a factor's first mode.

    Args:
        z_MI: Tokens.
        factor: [I, ...], or [I + 1, ...] with a bias row last: a parameter as it stands in its
            module, for what is saved of it is what ZeRO 3 gathers again.
        bias: Whether such a row is added; if not, it may be there.
        activated: Whether GELU is applied first. Its output is not kept but computed again: it is
            as large as all else that a block keeps, and costs a hundredth of the products.

    Returns:
        [M, C].
    """
    result: Tensor = _Affine.apply(z_MI, factor, bias, activated)  # type: ignore[no-untyped-call]
    return result


def product(mixed_MC: Tensor, factor: Tensor) -> Tensor:
    """What was mixed, with the output factor.

    Args:
        mixed_MC: Tokens.
        factor: [..., O], C numbers in front: a parameter as it stands in its module.

    Returns:
        [M, O].
    """
    result: Tensor = _Product.apply(mixed_MC, factor)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    """By hand for the gradient of the factor alone, which takes a third of the time."""

    @staticmethod
    def forward(ctx: Any, mixed_MC: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(mixed_MC, factor)
        return mixed_MC @ factor.flatten(0, -2)

    @staticmethod
    def backward(ctx: Any, gradient_MO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        mixed_MC, factor = ctx.saved_tensors
        for_mixed_MC = for_factor = None
        if ctx.needs_input_grad[0]:
            for_mixed_MC = gradient_MO @ factor.flatten(0, -2).t()
        if ctx.needs_input_grad[1]:
            mixed_CM = mixed_MC.t()
            if _is_slow_transposed(mixed_MC, gradient_MO):
                mixed_CM = mixed_CM.contiguous()
            for_factor = (mixed_CM @ gradient_MO).view(factor.shape)
        return for_mixed_MC, for_factor


def _is_slow_transposed(narrow_MC: Tensor, wide_MO: Tensor) -> bool:
    """Whether a product of the transposed rows takes longer than it and a copy of them.

    So it is with oneDNN's in bf16: for 1,024 x 552 with 1,024 x 3,072 numbers by half.
    """
    return (
        narrow_MC.device.type == "cpu"
        and narrow_MC.dtype == torch.bfloat16
        and has_bf16_products()
        and 2 * narrow_MC.shape[1] <= wide_MO.shape[1]
    )


class _Affine(torch.autograd.Function):
    """By hand: autograd would keep GELU's output, and join the gradients of weight and bias."""

    @staticmethod
    def forward(ctx: Any, z_MI: Tensor, factor: Tensor, bias: bool, activated: bool) -> Tensor:
        ctx.save_for_backward(z_MI, factor)
        ctx.bias, ctx.activated = bias, activated
        active_MI = gelu(z_MI) if activated else z_MI
        flat, inputs = factor.flatten(1), z_MI.shape[1]
        if not bias:
            return active_MI @ flat[:inputs]
        return torch.addmm(flat[inputs], active_MI, flat[:inputs])

    @staticmethod
    def backward(ctx: Any, gradient_MC: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        z_MI, factor = ctx.saved_tensors
        inputs = z_MI.shape[1]
        for_z_MI = for_factor = None
        if ctx.needs_input_grad[0]:
            for_z_MI = gradient_MC @ factor.flatten(1)[:inputs].t()
            if ctx.activated:
                for_z_MI = torch.ops.aten.gelu_backward(for_z_MI, z_MI)
        if ctx.needs_input_grad[1]:
            active_MI = gelu(z_MI) if ctx.activated else z_MI
            for_factor = torch.empty_like(factor)
            flat = for_factor.view(factor.shape[0], -1)
            torch.mm(active_MI.t(), gradient_MC, out=flat[:inputs])
            if ctx.bias:
                torch.sum(gradient_MC, 0, out=flat[inputs])
            else:
                flat[inputs:] = 0
        return for_z_MI, for_factor, None, None
