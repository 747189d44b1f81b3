"""Products of groups of rows, each with its own matrix, like `torch.nn.functional.grouped_mm`.

torch has a kernel from compute capability 9.0 up, for bf16; on an A100 (8.0), and in fp32, it loops
over the groups, and the CPU waits to read their sizes (pytorch/pytorch#186620: this will not
change). Here the sizes stay on the device: as many programs are launched as any sizes could need,
and superfluous ones exit at once.

On an H100 torch's kernel is faster, and these have not been measured on an A100, so they are only
used with `POLYAD_KERNELS=triton`. This module needs the package `triton`. With `TRITON_INTERPRET=1`
the kernels run slowly on a CPU, as in tests.

Shapes: M rows, E groups, D and F widths.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 128
"""Rows and columns of the output per program."""
TERMS = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
"""Terms of a sum that a program loads at a time."""


def grouped_mm(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    """Computes the same as torch's `grouped_mm`.

    Args:
        a: [M, D] with [E, D, F], or [D, M] with [M, F]; of a dtype in `TERMS`.
        b: The other factors.
        offsets_E: End of each group's rows; int32. There may be further rows.

    Returns:
        [M, F], with arbitrary values in rows after the last group; or [E, D, F], zeros for empty
        groups.
    """
    if b.dim() == 3:
        return _rows_times_matrices(a, b, offsets_E)
    return _sums_of_products(a, b, offsets_E)


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _rows_times_matrices(a_MD: Tensor, b_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    (rows, width), columns = a_MD.shape, b_EDF.shape[2]
    out_MF = a_MD.new_empty(rows, columns)
    if not out_MF.numel():
        return out_MF
    starts_E = torch.cat([offsets_E.new_zeros(1), offsets_E[:-1]])
    # Tiles of ROWS rows do not span groups: T of them are enough for any sizes.
    tiles_E = (offsets_E - starts_E + ROWS - 1) // ROWS
    past_E = tiles_E.cumsum(0)
    tile_T = torch.arange(rows // ROWS + len(offsets_E), device=a_MD.device)
    group_T = torch.searchsorted(past_E, tile_T, right=True)
    real_T = group_T < len(offsets_E)
    group_T = group_T.clamp_max(len(offsets_E) - 1)
    first_T = starts_E[group_T] + (tile_T - (past_E - tiles_E)[group_T]) * ROWS
    end_T = torch.where(real_T, offsets_E[group_T], 0)
    _rows_kernel[(len(tile_T), triton.cdiv(columns, COLUMNS))](
        a_MD, b_EDF, out_MF, group_T, first_T, end_T, width, columns,
        *a_MD.stride(), *b_EDF.stride(), out_MF.stride(0),
        BM=ROWS, BN=COLUMNS, BK=TERMS[a_MD.dtype], PRECISION=_precision(), num_warps=8,
    )  # fmt: skip
    return out_MF


@triton.jit
def _rows_kernel(
    a, b, out, groups, firsts, ends, width, columns,
    a_row, a_column, b_group, b_row, b_column, out_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    first = tl.load(firsts + tile).to(tl.int64)
    end = tl.load(ends + tile).to(tl.int64)
    if first >= end:
        return
    group = tl.load(groups + tile).to(tl.int64)
    m = first + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for done in range(0, width, BK):
        inside = done + k < width
        x = tl.load(
            a + m[:, None] * a_row + (done + k)[None, :] * a_column,
            mask=(m < end)[:, None] & inside[None, :],
            other=0.0,
        )
        y = tl.load(
            b + group * b_group + (done + k)[:, None] * b_row + n[None, :] * b_column,
            mask=inside[:, None] & (n < columns)[None, :],
            other=0.0,
        )
        total = tl.dot(x, y, total, input_precision=PRECISION)
    place = out + m[:, None] * out_row + n[None, :]
    tl.store(
        place, total.to(out.dtype.element_ty), mask=(m < end)[:, None] & (n < columns)[None, :]
    )


def _sums_of_products(a_DM: Tensor, b_MF: Tensor, offsets_E: Tensor) -> Tensor:
    width, columns = a_DM.shape[0], b_MF.shape[1]
    out_EDF = a_DM.new_empty(len(offsets_E), width, columns)
    grid = len(offsets_E), triton.cdiv(width, ROWS), triton.cdiv(columns, COLUMNS)
    _sums_kernel[grid](
        a_DM, b_MF, out_EDF, offsets_E, width, columns,
        *a_DM.stride(), *b_MF.stride(), *out_EDF.stride()[:2],
        BM=ROWS, BN=COLUMNS, BK=TERMS[a_DM.dtype], PRECISION=_precision(), num_warps=8,
    )  # fmt: skip
    return out_EDF


@triton.jit
def _sums_kernel(
    a, b, out, ends, width, columns,
    a_row, a_column, b_row, b_column, out_group, out_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    first = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int64)
    end = tl.load(ends + group).to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for done in range(first, end, BK):
        inside = done + k < end
        x = tl.load(
            a + m[:, None] * a_row + (done + k)[None, :] * a_column,
            mask=(m < width)[:, None] & inside[None, :],
            other=0.0,
        )
        y = tl.load(
            b + (done + k)[:, None] * b_row + n[None, :] * b_column,
            mask=inside[:, None] & (n < columns)[None, :],
            other=0.0,
        )
        total = tl.dot(x, y, total, input_precision=PRECISION)
    place = out + group * out_group + m[:, None] * out_row + n[None, :]
    inside_out = (m < width)[:, None] & (n < columns)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside_out)
