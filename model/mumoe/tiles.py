"""Products of narrow factors in bf16, in the arrangement that a processor with tiles likes.

A factor is several times as wide as its rank. In a large product of few columns and long sums
oneDNN takes up to twice as long as it has to, with two threads as long as with one, so the same
sums are asked for in other pieces. Everywhere else these are the plain products.

Shapes: M tokens, I rows and C columns of a factor.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.processor import has_tiles

LARGE = 2**28
"""Multiplications of a product from which on it is asked for in pieces."""
PIECE = 256
"""Columns of one."""
ROWS = 1536
"""Of a factor's gradient at a time."""
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
    for piece in _pieces(a_MI, b_IC):
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
    for piece in _pieces(a_MI, b_IC):
        torch.addmm(bias_C[piece], a_MI, b_IC[:, piece], out=result_MC[:, piece])
    return result_MC


def transposed_matmul(a_MI: Tensor, b_MC: Tensor, out_IC: Tensor) -> None:
    """a^T b, the gradient of a factor.

    Args:
        a_MI: Tokens.
        b_MC: As many.
        out_IC: Where the result goes.
    """
    tiled = _is_tiled(a_MI)
    if tiled and 2 * a_MI.shape[1] <= b_MC.shape[1]:
        # Turned around it is copied in any case, a piece at a time and more than once.
        torch.mm(a_MI.t().contiguous(), b_MC, out=out_IC)
        return
    size = ROWS if tiled else len(out_IC)
    for first in range(0, len(out_IC), size):
        piece = slice(first, first + size)
        torch.mm(a_MI[:, piece].t(), b_MC, out=out_IC[piece])


def _pieces(a_MI: Tensor, b_IC: Tensor) -> Iterator[slice]:
    """The columns of a product: few at a time if it is large."""
    columns = b_IC.shape[1]
    size = PIECE if a_MI.numel() * columns >= LARGE else columns
    return (slice(first, min(first + size, columns)) for first in range(0, columns, size))


def _is_tiled(a_MI: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and a_MI.device.type == "cpu"
        and a_MI.dtype == torch.bfloat16
        and len(a_MI) >= FEWEST_TOKENS
        and has_tiles()
    )
