"""Products of narrow factors in bf16, in the arrangement that a processor with tiles likes.

A rank is rarely a multiple of the 32 numbers that its products take at a time, and a factor is
several times as wide as its rank. oneDNN then takes up to half longer than it has to, so the same
sums are asked for in another order. Everywhere else these are the plain products.

Shapes: M tokens, I rows of a factor, C columns of a factor, F wide, both of two matrices.
"""

import torch
from torch import Tensor

from model.processor import has_tiles

TILE = 32
"""Columns of a product whose multiples take no longer than they have to."""
FEWEST_TOKENS = 128
"""Below, a product of its own takes longer than it saves."""


def matmul(a_MI: Tensor, b_IC: Tensor) -> Tensor:
    """a b.

    Args:
        a_MI: Tokens.
        b_IC: A factor or its transposed view.

    Returns:
        [M, C].
    """
    cut = _cut(a_MI, b_IC)
    if not cut:
        return a_MI @ b_IC
    result_MC = a_MI.new_empty(len(a_MI), b_IC.shape[1])
    torch.mm(a_MI, b_IC[:, :cut], out=result_MC[:, :cut])
    torch.mm(a_MI, b_IC[:, cut:], out=result_MC[:, cut:])
    return result_MC


def addmm(bias_C: Tensor, a_MI: Tensor, b_IC: Tensor) -> Tensor:
    """a b, with a row added to every token's.

    Args:
        bias_C: The row.
        a_MI: Tokens.
        b_IC: A factor.

    Returns:
        [M, C].
    """
    cut = _cut(a_MI, b_IC)
    if not cut:
        return torch.addmm(bias_C, a_MI, b_IC)
    result_MC = a_MI.new_empty(len(a_MI), b_IC.shape[1])
    torch.addmm(bias_C[:cut], a_MI, b_IC[:, :cut], out=result_MC[:, :cut])
    torch.addmm(bias_C[cut:], a_MI, b_IC[:, cut:], out=result_MC[:, cut:])
    return result_MC


def transposed_matmul(a_MI: Tensor, b_MC: Tensor, out_IC: Tensor) -> None:
    """a^T b, the gradient of a factor.

    A narrow matrix is the one that is turned around: as the first of a product it is copied, and if
    it is the second, the product is made the other way round and turned itself.

    Args:
        a_MI: Tokens.
        b_MC: As many.
        out_IC: Where the result goes.
    """
    tiled = _is_tiled(a_MI)
    if tiled and 2 * a_MI.shape[1] <= b_MC.shape[1]:
        torch.mm(a_MI.t().contiguous(), b_MC, out=out_IC)
    elif tiled and 2 * b_MC.shape[1] <= a_MI.shape[1]:
        turned_CI = b_MC.t().contiguous() @ a_MI
        for first in range(0, len(turned_CI), TILE):  # so many numbers are a line of the cache
            rows = slice(first, first + TILE)
            out_IC[:, rows].copy_(turned_CI[rows].t())
    else:
        torch.mm(a_MI.t(), b_MC, out=out_IC)


def _cut(a_MI: Tensor, b_IC: Tensor) -> int:
    """How many columns go before the rest that fill no tile; 0 if all go together."""
    columns = b_IC.shape[1]
    return columns - columns % TILE if columns % TILE and _is_tiled(a_MI) else 0


def _is_tiled(a_MI: Tensor) -> bool:
    return (
        a_MI.device.type == "cpu"
        and a_MI.dtype == torch.bfloat16
        and len(a_MI) >= FEWEST_TOKENS
        and has_tiles()
        and not torch.compiler.is_compiling()
    )
