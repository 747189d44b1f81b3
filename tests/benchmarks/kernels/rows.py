"""Weighted sums of rows, and their gradients, each in one pass over the rows.

Shapes: N tokens, K rows of a token, M = N K rows, D width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 1024
"""Numbers of a row that a program has at a time."""


@torch.library.custom_op("polyad::sum_rows", mutates_args=())
def sum_rows(rows_MD: Tensor, row_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    """sum_k weight_nk row_nk, summed in fp32.

    Args:
        rows_MD: Rows; contiguous.
        row_NK: Which rows a token has; contiguous, as are the weights.
        weights_NK: None: all are 1.

    Returns:
        [N, D].
    """
    num_tokens, top_k = row_NK.shape
    width = rows_MD.shape[1]
    out_ND = rows_MD.new_empty(num_tokens, width)
    block = min(WIDTH, triton.next_power_of_2(width))
    _sum_kernel[(num_tokens, triton.cdiv(width, block))](
        rows_MD, row_NK if weights_NK is None else weights_NK, row_NK, out_ND, width, top_k,
        WEIGHTS=weights_NK is not None, BLOCK=block,
    )  # fmt: skip
    return out_ND


@sum_rows.register_fake
def _like_sum_rows(rows_MD: Tensor, row_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    return rows_MD.new_empty(row_NK.shape[0], rows_MD.shape[1])


@triton.jit
def _sum_kernel(rows, weights, row, out, width, top_k, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(0, top_k):
        place = tl.load(row + token * top_k + k)
        x = tl.load(rows + place * width + d, mask=d < width, other=0.0).to(tl.float32)
        if WEIGHTS:
            x = x * tl.load(weights + token * top_k + k).to(tl.float32)
        total += x
    tl.store(out + token * width + d, total.to(out.dtype.element_ty), mask=d < width)


@torch.library.custom_op("polyad::spread_rows", mutates_args=())
def spread_rows(
    gradient_ND: Tensor, rows_MD: Tensor, weights_NK: Tensor, assignment_M: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `sum_rows`.

    Args:
        gradient_ND: That of the sums; contiguous, as all.
        rows_MD: Rows.
        weights_NK: Weights.
        assignment_M: n K + k of the row that is the k-th of token n.

    Returns:
        Those of the rows and of the weights.
    """
    top_k, width = weights_NK.shape[1], rows_MD.shape[1]
    for_rows_MD, for_weights_NK = torch.empty_like(rows_MD), torch.empty_like(weights_NK)
    block = min(WIDTH, triton.next_power_of_2(width))
    _spread_kernel[(len(rows_MD),)](
        gradient_ND, rows_MD, weights_NK, assignment_M, for_rows_MD, for_weights_NK, width, top_k,
        BLOCK=block,
    )  # fmt: skip
    return for_rows_MD, for_weights_NK


@spread_rows.register_fake
def _like_spread_rows(
    gradient_ND: Tensor, rows_MD: Tensor, weights_NK: Tensor, assignment_M: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows_MD), torch.empty_like(weights_NK)


@triton.jit
def _spread_kernel(
    gradient, rows, weights, assignment, for_rows, for_weights, width, top_k, BLOCK: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64)
    a = tl.load(assignment + m)
    token = a // top_k
    weight = tl.load(weights + a).to(tl.float32)
    inner = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        d = first + tl.arange(0, BLOCK)
        g = tl.load(gradient + token * width + d, mask=d < width, other=0.0).to(tl.float32)
        x = tl.load(rows + m * width + d, mask=d < width, other=0.0).to(tl.float32)
        change = (weight * g).to(for_rows.dtype.element_ty)
        tl.store(for_rows + m * width + d, change, mask=d < width)
        inner += g * x
    tl.store(for_weights + a, tl.sum(inner, 0).to(for_weights.dtype.element_ty))
