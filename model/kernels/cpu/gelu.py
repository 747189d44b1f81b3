"""GELU (tanh approximation) and its derivative, in one pass over the inner rows of an expert.

    h s(h)    s = sigmoid(2 sqrt(2/pi) (h + 0.044715 h^3))

PyTorch's own GELU takes as long as the products of a small expert. `gelu.c` is compiled when Polyad
is installed; without a compiler, and in other precisions, `has_gelu` is false and experts are
computed as on a GPU.

Shapes: m rows, F inner width.
"""

import ctypes
import functools
import importlib.util

import torch
from torch import Tensor

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


def gelu_forward(inner_mF: Tensor, bias_F: Tensor | None, active_mF: Tensor) -> None:
    """Writes the activation of the inner rows plus bias. All tensors are contiguous.

    Args:
        inner_mF: The rows.
        bias_F: Bias of each row; None for no bias.
        active_mF: Receives the activation.
    """
    _call("forward", inner_mF, bias_F, active_mF)


def gelu_backward(
    inner_mF: Tensor,
    bias_F: Tensor | None,
    active_mF: Tensor,
    change_mF: Tensor,
    for_bias_F: Tensor | None,
) -> None:
    """Writes the activation, the gradient of the inner rows, and its sum for the bias.

    Args:
        inner_mF: See `gelu_forward`.
        bias_F: See `gelu_forward`.
        active_mF: See `gelu_forward`.
        change_mF: The gradient of the activation; overwritten with that of the rows.
        for_bias_F: Receives the gradient of the bias; None if it is not needed.
    """
    _call("backward", inner_mF, bias_F, active_mF, change_mF, for_bias_F)


def has_gelu(dtype: torch.dtype) -> bool:
    """Returns whether `gelu.c` was compiled when Polyad was installed, and takes this precision."""
    return dtype in NATIVE and _LIBRARY is not None


def _call(direction: str, inner_mF: Tensor, *others: Tensor | None) -> None:
    """Calls the library with PyTorch's number of threads; it rounds once, from fp32."""
    if not switch.can_read():
        return
    tensors = (inner_mF, *others)
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
