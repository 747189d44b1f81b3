"""Selects rows of tokens, sorted by expert, and sums rows for each token.

Autograd's gradient of an index adds rows atomically, on a GPU in any order, and in bf16 with a
rounding for each. Here the inverse of the permutation is known, so that both directions only read.

Assignment a = n K + k is the k-th expert of token n.

Shapes: N tokens, K experts of a token, M = N K rows of as many assignments (A), D width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyad.model.kernels import switch


def take_by_definition(tokens_ND: Tensor, assignment_M: Tensor, top_k: int) -> Tensor:
    """`take` in plain PyTorch."""
    return tokens_ND.index_select(0, assignment_M if top_k == 1 else assignment_M // top_k)


def combine_by_definition(
    rows_MD: Tensor, weights_NK: Tensor, assignment_M: Tensor, row_A: Tensor
) -> Tensor:
    """`combine` in plain PyTorch."""
    rows_NKD = rows_MD.index_select(0, row_A).view(*weights_NK.shape, rows_MD.shape[1])
    return (weights_NK.unsqueeze(-1) * rows_NKD).sum(1)


def take(tokens_ND: Tensor, assignment_M: Tensor, row_A: Tensor, top_k: int) -> Tensor:
    """Selects the token of each row.

    Args:
        tokens_ND: Tokens.
        assignment_M: The assignment of each row.
        row_A: The row of each assignment: the inverse permutation.
        top_k: K; with 1 rows are only reordered.

    Returns:
        [M, D].
    """
    if switch.REFERENCE:
        return take_by_definition(tokens_ND, assignment_M, top_k)
    rows_MD: Tensor = _Take.apply(tokens_ND, assignment_M, row_A, top_k)  # type: ignore[no-untyped-call]
    return rows_MD


def combine(rows_MD: Tensor, weights_NK: Tensor, assignment_M: Tensor, row_A: Tensor) -> Tensor:
    """Computes the weighted sum of the rows of each token.

    Args:
        rows_MD: Rows.
        weights_NK: The weights of each token's rows, in the same dtype.
        assignment_M: See `take`.
        row_A: See `take`.

    Returns:
        [N, D].
    """
    if switch.REFERENCE:
        return combine_by_definition(rows_MD, weights_NK, assignment_M, row_A)
    y_ND: Tensor = _Combine.apply(rows_MD, weights_NK, assignment_M, row_A)  # type: ignore[no-untyped-call]
    return y_ND


def _sum_rows(rows_MD: Tensor, row_NK: Tensor, weights_NK: Tensor | None = None) -> Tensor:
    """Computes sum_k weight_nk row_nk, in fp32 at least; the plain sum without weights. [N, D]."""
    num_tokens, top_k = row_NK.shape
    if top_k == 1 and weights_NK is None:  # a permutation: nothing is summed
        return rows_MD.index_select(0, row_NK.view(-1))
    if not row_NK.numel():  # a rank without any rows
        return rows_MD.new_zeros(num_tokens, rows_MD.shape[1])
    rows_NKD = rows_MD.index_select(0, row_NK.view(-1)).view(num_tokens, top_k, -1)
    if weights_NK is None:
        return rows_NKD.sum(1)
    if torch.compiler.is_compiling():  # one kernel, as below
        return (weights_NK.unsqueeze(-1) * rows_NKD).sum(1)
    return torch.bmm(weights_NK.unsqueeze(1), rows_NKD).squeeze(1)


def _products(x_MD: Tensor, y_MD: Tensor) -> Tensor:
    """Computes x_m . y_m, rounded once. [M]."""
    if torch.compiler.is_compiling():  # one kernel, whose products and sums are in fp32
        return (x_MD * y_MD).sum(1)
    return torch.bmm(x_MD.unsqueeze(1), y_MD.unsqueeze(2)).view(-1)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_ND: Tensor, assignment_M: Tensor, row_A: Tensor, top_k: int
    ) -> Tensor:
        ctx.save_for_backward(row_A)
        ctx.top_k = top_k
        return take_by_definition(tokens_ND, assignment_M, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (row_A,) = ctx.saved_tensors
        return _sum_rows(gradients[0], row_A.view(-1, ctx.top_k)), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, weights_NK: Tensor, assignment_M: Tensor, row_A: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_MD, weights_NK, assignment_M, row_A)
        y_ND = _sum_rows(rows_MD, row_A.view_as(weights_NK), weights_NK)
        return y_ND.to(rows_MD.dtype)  # under autocast it is in another precision

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_MD, weights_NK, assignment_M, row_A = ctx.saved_tensors
        (gradient_ND,), (of_rows, of_weights, *_) = gradients, ctx.needs_input_grad
        for_rows_MD = for_weights_NK = None
        token_M = assignment_M // weights_NK.shape[1]
        weight_M = weights_NK.reshape(-1).index_select(0, assignment_M)
        # The gradient of each row's token is used for both.
        gradient_MD = gradient_ND.index_select(0, token_M)
        if of_rows:
            for_rows_MD = gradient_MD * weight_M.unsqueeze(1)
        if of_weights:
            products_M = _products(rows_MD, gradient_MD)
            for_weights_NK = products_M.index_select(0, row_A).view_as(weights_NK)
        return for_rows_MD, for_weights_NK, None, None
