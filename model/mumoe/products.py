"""Products of tokens with a factor, which save little for the backward pass.

Shapes: M tokens, C numbers of a token that are summed over, K columns of a factor.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu


def contract(
    x_MC: Tensor, factor: Tensor, *, modes: int = 1, bias: bool = False, activated: bool = False
) -> Tensor:
    """Multiplies tokens, or GELU of them, by a factor as a matrix.

    Only the two arguments are saved for the backward pass. GELU is computed again there: its output
    is as large as all else that a block saves, and costs a hundredth of the products. The factor is
    no view: autograd would keep a view's memory, which ZeRO 3 has to free after the forward pass.

    Args:
        x_MC: Tokens.
        factor: [C, ...], a parameter as it stands in its module. It may have one row more than
            tokens have numbers.
        modes: How many of its modes, from the first on, make up C.
        bias: Whether the last row is added.
        activated: Whether GELU is applied to the tokens first.

    Returns:
        [M, K], the other modes of the factor flattened.
    """
    result: Tensor = _Contraction.apply(x_MC, factor, modes, bias, activated)  # type: ignore[no-untyped-call]
    return result


class _Contraction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MC: Tensor, factor: Tensor, modes: int, bias: bool, activated: bool
    ) -> Tensor:
        ctx.save_for_backward(x_MC, factor)
        ctx.modes, ctx.bias, ctx.activated = modes, bias, activated
        weight_CK, bias_K = _split(factor, modes, x_MC.shape[1])
        active_MC = gelu(x_MC) if activated else x_MC
        return torch.addmm(bias_K, active_MC, weight_CK) if bias else active_MC @ weight_CK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient_MK: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_MC, factor = ctx.saved_tensors
        for_x_MC = for_factor = None
        if ctx.needs_input_grad[0]:
            weight_CK, _ = _split(factor, ctx.modes, x_MC.shape[1])
            for_x_MC = gradient_MK @ weight_CK.t()
            if ctx.activated:
                for_x_MC = torch.ops.aten.gelu_backward(for_x_MC, x_MC)
        if ctx.needs_input_grad[1]:
            for_factor = torch.empty_like(factor)
            for_weight_CK, for_bias_K = _split(for_factor, ctx.modes, x_MC.shape[1])
            active_MC = gelu(x_MC) if ctx.activated else x_MC
            torch.mm(active_MC.t(), gradient_MK, out=for_weight_CK)
            if ctx.bias:
                for_bias_K.copy_(gradient_MK.sum(0))
            else:
                for_bias_K.zero_()
        return for_x_MC, for_factor, None, None, None


def _split(factor: Tensor, modes: int, rows: int) -> tuple[Tensor, Tensor]:
    """The matrix that multiplies tokens, and the row below it; empty where there is none."""
    matrix = factor.flatten(0, modes - 1).flatten(1)
    return matrix[:rows], matrix[rows:].flatten()
