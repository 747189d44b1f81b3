"""Products of narrow factors in bf16, in the arrangement that a processor with tiles likes.

A rank is rarely a multiple of the 32 numbers that its products take at a time, and a factor is
several times as wide as its rank. oneDNN then takes up to twice as long as it has to, with all its
work on one core, so the same sums are asked for in other pieces. Everywhere else these are the
plain products.

Shapes: M tokens, I rows and C columns of a factor.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.processor import has_tiles

TILE = 32
"""Columns of a product whose multiples take no longer than they have to."""
PIECE = 256
"""The most columns of a product that sums over more than twice as many numbers as it has."""
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
    if not _is_tiled(a_MI):
        return a_MI @ b_IC
    result_MC = a_MI.new_empty(len(a_MI), b_IC.shape[1])
    for piece in _pieces(b_IC):
        torch.mm(a_MI, b_IC[:, piece], out=result_MC[:, piece])
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
    if not _is_tiled(a_MI):
        return torch.addmm(bias_C, a_MI, b_IC)
    result_MC = a_MI.new_empty(len(a_MI), b_IC.shape[1])
    for piece in _pieces(b_IC):
        torch.addmm(bias_C[piece], a_MI, b_IC[:, piece], out=result_MC[:, piece])
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


def _pieces(b_IC: Tensor) -> Iterator[slice]:
    """The columns of a product: few at a time if it is deep, or else whole tiles and the rest."""
    rows, columns = b_IC.shape
    size = PIECE if rows > 2 * columns else columns - columns % TILE or columns
    return (slice(first, min(first + size, columns)) for first in range(0, columns, size))


def _is_tiled(a_MI: Tensor) -> bool:
    return (
        a_MI.device.type == "cpu"
        and a_MI.dtype == torch.bfloat16
        and len(a_MI) >= FEWEST_TOKENS
        and has_tiles()
        and not torch.compiler.is_compiling()
    )
