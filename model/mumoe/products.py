"""Matrix products of a muMoE that keep little for the backward pass.

Shapes: M tokens, I input width, C columns of a factor, its further modes flattened.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu

from model.kernels.gelu import gelu_again
from model.mumoe import tokens


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
    """What was mixed with the output factor, or coefficients with an expert factor.

    Args:
        mixed_MC: Tokens.
        factor: [..., O], C numbers in front: a parameter as it stands in its module.

    Returns:
        [M, O].
    """
    result: Tensor = _Product.apply(mixed_MC, factor)  # type: ignore[no-untyped-call]
    return result


def token_product(a_MPQ: Tensor, b_MQR: Tensor) -> Tensor:
    """Of each token's own small matrices.

    Args:
        a_MPQ: By far the smaller one.
        b_MQR: The other.

    Returns:
        [M, P, R].
    """
    result: Tensor = _TokenProduct.apply(a_MPQ, b_MQR)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    """By hand for its gradients' products alone."""

    @staticmethod
    def forward(ctx: Any, mixed_MC: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(mixed_MC, factor)
        return mixed_MC @ factor.flatten(0, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        mixed_MC, factor = ctx.saved_tensors
        for_mixed_MC = for_factor = None
        if ctx.needs_input_grad[0]:
            for_mixed_MC = gradient_MO @ factor.flatten(0, -2).t()
        if ctx.needs_input_grad[1]:
            for_factor = torch.empty_like(factor)
            torch.mm(mixed_MC.t(), gradient_MO, out=for_factor.view(-1, factor.shape[-1]))
        return for_mixed_MC, for_factor


class _TokenProduct(torch.autograd.Function):
    """By hand for a copy that costs nothing: transposed, a product on a CPU takes half longer."""

    @staticmethod
    def forward(ctx: Any, a_MPQ: Tensor, b_MQR: Tensor) -> Tensor:
        ctx.save_for_backward(a_MPQ, b_MQR)
        if tokens.takes_product(a_MPQ, b_MQR):
            return tokens.token_product(a_MPQ, b_MQR)
        return a_MPQ @ b_MQR

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MPR: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a_MPQ, b_MQR = ctx.saved_tensors
        if all(ctx.needs_input_grad) and tokens.takes_product(a_MPQ, b_MQR, gradient_MPR):
            return tokens.token_product_gradients(a_MPQ, b_MQR, gradient_MPR)
        for_a_MPQ = for_b_MQR = None
        if ctx.needs_input_grad[0]:
            for_a_MPQ = gradient_MPR @ b_MQR.transpose(1, 2)
        if ctx.needs_input_grad[1]:
            for_b_MQR = a_MPQ.transpose(1, 2).contiguous() @ gradient_MPR
        return for_a_MPQ, for_b_MQR


class _Affine(torch.autograd.Function):
    """By hand: autograd would keep GELU's output, and join the gradients of weight and bias."""

    @staticmethod
    def forward(ctx: Any, z_MI: Tensor, factor: Tensor, bias: bool, activated: bool) -> Tensor:
        ctx.save_for_backward(z_MI, factor)
        ctx.bias, ctx.activated = bias, activated
        active_MI = gelu(z_MI) if activated else z_MI
        flat, inputs = factor.flatten(1), z_MI.shape[1]
        if bias:
            return torch.addmm(flat[inputs], active_MI, flat[:inputs])
        return active_MI @ flat[:inputs]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MC: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        z_MI, factor = ctx.saved_tensors
        inputs = z_MI.shape[1]
        for_z_MI = for_factor = None
        active_MI = z_MI
        if ctx.needs_input_grad[0]:
            for_z_MI = gradient_MC @ factor.flatten(1)[:inputs].t()
            if ctx.activated:
                active_MI = gelu_again(z_MI, for_z_MI)
        elif ctx.activated:
            active_MI = gelu(z_MI)
        if ctx.needs_input_grad[1]:
            for_factor = torch.empty_like(factor)
            flat = for_factor.view(factor.shape[0], -1)
            torch.mm(active_MI.t(), gradient_MC, out=flat[:inputs])
            if ctx.bias:
                torch.sum(gradient_MC, 0, out=flat[inputs])
            else:
                flat[inputs:] = 0
        return for_z_MI, for_factor, None, None
