"""The features of the attention-aware graph: what one head attended to, given what attention did.

    A_h[i, j] exp(o_i . m_j / sigma^2 - |m_j|^2 / (2 sigma^2)),   m_j = A W_O,h v_j,h

where |o_i|^2 cancels in the softmax. As o_i . m_j = A (W_O,h^T o_i) . v_j,h, the exponent is an
inner product of 2 H + 1 features,

    [q_i, z_i, 1] . [k_j, v_j, s_j] / sqrt(H)

Shapes: B batch, T tokens in a sequence, N = B T, D width, A heads, H width of one head, M = A H, F
width of the features.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.attention import AttentionTrace
from model.interface import refuse_autocast
from model.smoe.features import Features
from model.smoe.scores import wide


def posterior_features(
    attention: AttentionTrace, head: Tensor, num_heads: int, sigma: float
) -> Features:
    """What makes S of one head.

    Args:
        attention: What attention did.
        head: [1], its index among those of the trace: which columns of the projection are its.
        num_heads: A, of all processes.
        sigma: Of the distance between o and m.

    Returns:
        Features.
    """
    refuse_autocast(attention.of_head_BT3H, "a graph of attention")
    query_BTF, key_BTF = _PosteriorFeatures.apply(*attention[1:], head, num_heads, sigma)  # type: ignore[no-untyped-call]
    return Features(query_BTF, key_BTF, 1 / math.sqrt(attention.of_head_BT3H.shape[-1]))


class _PosteriorFeatures(torch.autograd.Function):
    """By hand: autograd would make gradients of the output and the projection in routing's
    precision, and take a dozen small steps where one will do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        of_head_BT3H: Tensor,
        output_BTD: Tensor,
        weight_DM: Tensor,
        bias_D: Tensor | None,
        head: Tensor,
        num_heads: int,
        sigma: float,
    ) -> tuple[Tensor, Tensor]:
        size = of_head_BT3H.shape[-1]
        # Of z and s, which are divided by sqrt(H) afterwards as everything is.
        ctx.of_along = num_heads * math.sqrt(size) / sigma**2
        ctx.of_square = -(num_heads**2) * math.sqrt(size) / (2 * sigma**2)
        weight_DH = weight_DM.view(len(weight_DM), -1, size).index_select(1, head).squeeze(1)
        q_BTH, k_BTH, v_BTH = of_head_BT3H.unbind(2)
        wide_DH = weight_DH.to(wide(weight_DH.dtype))
        along_NH = output_BTD.flatten(0, 1).to(wide_DH.dtype) @ wide_DH
        if bias_D is not None:  # o is without it
            along_NH -= bias_D.to(wide_DH.dtype) @ wide_DH
        along_BTH = along_NH.mul_(ctx.of_along).view_as(q_BTH)
        gram_HH = wide_DH.T @ wide_DH
        wide_BTH = v_BTH.to(wide_DH.dtype)
        square_BT1 = (wide_BTH @ gram_HH).mul_(wide_BTH).sum(-1, keepdim=True).mul_(ctx.of_square)
        # No parameter: under ZeRO 3 another module's is not there in the backward pass.
        ctx.weight_shape = weight_DM.shape
        kept_D = None if bias_D is None else bias_D.clone()
        ctx.save_for_backward(of_head_BT3H, output_BTD, weight_DH, kept_D, gram_HH, head)
        ones_BT1 = torch.ones_like(square_BT1)
        return (
            torch.cat([q_BTH.to(wide_DH.dtype), along_BTH, ones_BT1], -1),
            torch.cat([k_BTH.to(wide_DH.dtype), wide_BTH, square_BT1], -1),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_query_BTF: Tensor, for_key_BTF: Tensor) -> tuple[Tensor | None, ...]:
        of_head_BT3H, output_BTD, weight_DH, bias_D, gram_HH, head = ctx.saved_tensors
        size, dtype = of_head_BT3H.shape[-1], gram_HH.dtype
        v_BTH = of_head_BT3H.select(2, 2).to(dtype)
        for_square_BT1 = for_key_BTF[..., 2 * size :].to(dtype) * ctx.of_square
        for_v_BTH = for_key_BTF[..., size : 2 * size].to(dtype)
        for_v_BTH = torch.addcmul(for_v_BTH, v_BTH @ gram_HH, for_square_BT1, value=2)
        for_gram_HH = ((v_BTH * for_square_BT1).flatten(0, 1).T @ v_BTH.flatten(0, 1)).mul_(2)

        for_along_BTH = for_query_BTF[..., size : 2 * size] * ctx.of_along
        narrow_BTH = for_along_BTH.to(output_BTD.dtype)
        for_output_BTD = narrow_BTH @ weight_DH.T
        for_weight_DH = output_BTD.flatten(0, 1).T @ narrow_BTH.flatten(0, 1)
        for_weight_DH.addmm_(weight_DH, for_gram_HH.to(weight_DH.dtype))
        for_bias_D = None
        if bias_D is not None:
            sum_H = for_along_BTH.sum((0, 1), dtype=dtype).to(bias_D.dtype)
            for_bias_D = (weight_DH @ sum_H).neg_()
            for_weight_DH.addr_(bias_D, sum_H, alpha=-1)
        for_weight_DM = weight_DH.new_zeros(ctx.weight_shape)
        by_head = for_weight_DM.view(len(weight_DH), -1, size)
        by_head.index_copy_(1, head, for_weight_DH.unsqueeze(1))

        of_head = for_query_BTF[..., :size], for_key_BTF[..., :size], for_v_BTH
        for_head_BT3H = torch.stack([x_BTH.to(of_head_BT3H.dtype) for x_BTH in of_head], 2)
        return for_head_BT3H, for_output_BTD, for_weight_DM, for_bias_D, None, None, None
