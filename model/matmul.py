"""Products of matrices in bf16 on a CPU that multiplies tiles of them, by `matmul.c`.

PyTorch's own (oneDNN's) take up to three times as long where the sums are long and the columns few,
and no less with two threads than with one: the shapes of narrow factors. `matmul.c` is compiled
when Polyad is installed. Without it, and everywhere else, products are PyTorch's.

Shapes: M rows, K summands, N columns.
"""

import ctypes
import functools

import torch
from torch import Tensor

from model.native import load_tile_library

VERSION = 1
"""Of the library."""
FEWEST = 32
"""Rows, summands and columns: those of a block."""
SMALL = 2**24
"""Multiplications of a product that takes about as long as calling the library."""
MANY = 1024
"""Rows from which on PyTorch's products are faster, if sums are short and no factor is turned."""


def matmul(
    a_MK: Tensor, b_KN: Tensor, *, row_N: Tensor | None = None, out_MN: Tensor | None = None
) -> Tensor:
    """a b. No gradient is recorded.

    Args:
        a_MK: The first factor, or a transposed view.
        b_KN: The second, or a transposed view.
        row_N: Added to every row of the product.
        out_MN: Where the product goes; None: a new tensor.

    Returns:
        [M, N], summed in fp32 and rounded once if it is bf16.
    """
    if not _takes(a_MK, b_KN, row_N, out_MN):
        if row_N is None:
            return torch.mm(a_MK, b_KN, out=out_MN)
        return torch.addmm(row_N, a_MK, b_KN, out=out_MN)
    library, threads = _library(), torch.get_num_threads()
    assert library is not None
    (rows, depth), columns = a_MK.shape, b_KN.shape[1]
    if out_MN is None:
        out_MN = a_MK.new_empty(rows, columns)
    scratch = torch.empty(threads * library.polyad_matmul_scratch(), dtype=torch.uint8)
    library.polyad_matmul(
        *(None if x is None else x.data_ptr() for x in (a_MK, b_KN, row_N, out_MN)),
        *(rows, depth, columns),
        *(*a_MK.stride(), *b_KN.stride(), out_MN.stride(0)),
        *(scratch.data_ptr(), threads),
    )
    return out_MN


def has_native_matmul() -> bool:
    """Whether large products in bf16 on the CPU are `matmul.c`'s."""
    return _library() is not None


def _takes(a_MK: Tensor, b_KN: Tensor, row_N: Tensor | None, out_MN: Tensor | None) -> bool:
    """Whether the library is there for this product."""
    if torch.compiler.is_compiling():
        return False
    tensors = [x for x in (a_MK, b_KN, row_N, out_MN) if x is not None]
    if any(x.dtype != torch.bfloat16 or x.device.type != "cpu" for x in tensors):
        return False
    (rows, depth), columns = a_MK.shape, b_KN.shape[1]
    return (
        min(rows, depth, columns) >= FEWEST
        and rows * depth * columns >= SMALL
        and (a_MK.stride(1) != 1 or depth > columns or rows < MANY)
        and _is_dense(a_MK)
        and _is_dense(b_KN)
        and (row_N is None or row_N.stride(0) == 1)
        and (out_MN is None or out_MN.stride(1) == 1)
        and _library() is not None
    )


def _is_dense(matrix: Tensor) -> bool:
    """Whether rows, or columns, are contiguous and do not overlap."""
    (rows, columns), (of_row, of_column) = matrix.shape, matrix.stride()
    return (of_column == 1 and of_row >= columns) or (of_row == 1 and of_column >= rows)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_tile_library("model._matmul", VERSION)
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    library.polyad_matmul.argtypes = [*[pointer] * 4, *[number] * 8, pointer, number]
    library.polyad_matmul.restype = None
    library.polyad_matmul_scratch.restype = number
    return library
