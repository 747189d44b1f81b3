"""Experts on a CPU: plain products into buffers, one expert after the other.

On a CPU the counts can be read at no cost, and a small expert's activations stay in the cache
between its products. For the backward pass only the inner rows before bias and activation are
saved, half of what a dense MLP saves. A compiler cannot follow the loop.

PyTorch's own GELU takes as long as the products of a small expert. `cpu/gelu.c`, the tanh
approximation and its derivative in one pass over the inner rows of an expert, is compiled when
Polyad is installed; without a compiler, and in other precisions, `has_gelu` is false and experts
are computed as on a GPU.

Shapes: M rows, E experts, D width, F inner width; m rows of one expert.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyad.model.kernels import switch

NATIVE = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Precisions that it is compiled for, with their parts of function names."""
VERSION = 2
"""The version of the library that this module calls; other versions are not used."""


def _load() -> ctypes.CDLL | None:
    """Loads the compiled library; None if it is missing, or from an older installation."""
    spec = importlib.util.find_spec("polyad.model.kernels.cpu._gelu")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    try:
        version = ctypes.c_int.in_dll(library, "polyad_gelu_version").value
    except ValueError:
        return None
    return library if version == VERSION else None


_LIBRARY = _load()


def has_gelu(dtype: torch.dtype) -> bool:
    """Returns whether `gelu.c` was compiled when Polyad was installed, and takes this precision."""
    return dtype in NATIVE and _LIBRARY is not None


def native_gelu(
    direction: Literal["forward", "backward"],
    inner_mF: Tensor,
    bias_F: Tensor | None,
    active_mF: Tensor,
    *gradients: Tensor | None,
) -> None:
    """Writes the activation of the inner rows plus bias; backward also their gradients.

    It uses PyTorch's number of threads and rounds once, from fp32. All tensors are contiguous.

    Args:
        direction: `forward` or `backward`.
        inner_mF: The rows.
        bias_F: Bias of each row; None for no bias.
        active_mF: Receives the activation.
        gradients: Of `backward`: the gradient of the activation, which is overwritten with that of
            the rows; and what receives the gradient of the bias, or None.
    """
    if not switch.can_read():
        return
    tensors = (inner_mF, bias_F, active_mF, *gradients)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    function = _function(f"polyad_gelu_{direction}_{NATIVE[inner_mF.dtype]}", len(tensors))
    function(*addresses, *inner_mF.shape, torch.get_num_threads())


@functools.cache
def _function(name: str, tensors: int) -> "ctypes._NamedFuncPointer":
    """Returns a library function; it takes tensor addresses, then rows, columns and threads."""
    function: ctypes._NamedFuncPointer = getattr(_LIBRARY, name)
    function.argtypes = [*[ctypes.c_void_p] * tensors, *[ctypes.c_long] * 3]
    function.restype = None
    return function


def experts_on_cpu(
    rows_MD: Tensor, up_EDF: Tensor, bias_EF: Tensor | None, down_EFD: Tensor, counts_E: Tensor
) -> Tensor:
    """Runs every row through its expert: up, GELU (approximated by tanh), down.

    Args:
        rows_MD: All rows of expert 0, then all of expert 1, and so on.
        up_EDF: First layers.
        bias_EF: Biases of the first layers; None if they have none.
        down_EFD: Second layers.
        counts_E: Number of rows of each expert; may be 0. There may be further rows.

    Returns:
        [M, D], in the same order. Rows after the last expert's hold arbitrary values, and so do
        their gradients.
    """
    output_MD: Tensor = _Experts.apply(rows_MD, up_EDF, bias_EF, down_EFD, counts_E)  # type: ignore[no-untyped-call]
    return output_MD


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_MD: Tensor,
        up_EDF: Tensor,
        bias_EF: Tensor | None,
        down_EFD: Tensor,
        counts_E: Tensor,
    ) -> Tensor:
        output_MD = torch.empty_like(rows_MD)
        inner_MF = rows_MD.new_empty(len(rows_MD), up_EDF.shape[2])
        counts = _counts(counts_E, len(rows_MD))
        buffer_mF = inner_MF.new_empty(max(counts), inner_MF.shape[1])
        for expert, rows in _rows_of_experts(counts):
            inner_mF = inner_MF[rows]
            active_mF = buffer_mF[: len(inner_mF)]
            torch.mm(rows_MD[rows], up_EDF[expert], out=inner_mF)
            native_gelu(
                "forward", inner_mF, None if bias_EF is None else bias_EF[expert], active_mF
            )
            torch.mm(active_mF, down_EFD[expert], out=output_MD[rows])
        ctx.save_for_backward(rows_MD, inner_MF, up_EDF, bias_EF, down_EFD, counts_E)
        return output_MD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, inner_MF, up_EDF, bias_EF, down_EFD, counts_E = ctx.saved_tensors
        # Frozen weights need no gradient.
        gradients = [
            torch.empty_like(x) if needed else None
            for x, needed in zip(
                (rows_MD, up_EDF, bias_EF, down_EFD), ctx.needs_input_grad[:4], strict=True
            )
        ]
        for_rows_MD, for_up_EDF, for_bias_EF, for_down_EFD = gradients
        counts = _counts(counts_E, len(rows_MD))
        idle = [expert for expert, count in enumerate(counts) if not count]
        for of_weights in gradients[1:]:
            if of_weights is not None:
                of_weights[idle] = 0
        buffers_mF = inner_MF.new_empty(2, max(counts), inner_MF.shape[1])
        for expert, rows in _rows_of_experts(counts):
            inner_mF = inner_MF[rows]
            active_mF, change_mF = buffers_mF[:, : len(inner_mF)]
            gradient_mD, bias_F = gradient_MD[rows], None if bias_EF is None else bias_EF[expert]
            if for_rows_MD is not None or for_up_EDF is not None or for_bias_EF is not None:
                torch.mm(gradient_mD, down_EFD[expert].t(), out=change_mF)
                for_bias_F = None if for_bias_EF is None else for_bias_EF[expert]
                native_gelu("backward", inner_mF, bias_F, active_mF, change_mF, for_bias_F)
            else:
                native_gelu("forward", inner_mF, bias_F, active_mF)
            if for_down_EFD is not None:
                torch.mm(active_mF.t(), gradient_mD, out=for_down_EFD[expert])
            if for_up_EDF is not None:
                torch.mm(rows_MD[rows].t(), change_mF, out=for_up_EDF[expert])
            if for_rows_MD is not None:
                torch.mm(change_mF, up_EDF[expert].t(), out=for_rows_MD[rows])
        return *gradients, None


def _counts(counts_E: Tensor, rows: int) -> list[int]:
    """Returns the number of rows of each expert; where only shapes are known, equal ones."""
    if switch.can_read():
        counts: list[int] = counts_E.tolist()
        return counts
    experts = len(counts_E)
    return [rows // experts + (expert < rows % experts) for expert in range(experts)]


def _rows_of_experts(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """Yields each expert that has rows, and which rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
