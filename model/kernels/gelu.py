"""GELU and its derivative on a CPU, both in one pass.

    none    h P(h)    P: the normal distribution
    tanh    h s(h)    s = sigmoid(2 sqrt(2/pi) (h + 0.044715 h^3))

as PyTorch calls them; its own with tanh takes as long as the products of a small expert. `gelu.c`
is compiled when Polyad is installed. Where there was no compiler, PyTorch's is taken.

Shapes: m rows, F inner width.
"""

import ctypes
import functools

import torch
from torch import Tensor

from model.kernels.cpu.native import load_library

NATIVE = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""What it is compiled for, in the names of its functions."""
FORMS = {"none": "erf", "tanh": "tanh"}
"""The same."""
VERSION = 1
"""Of the library that is called here; one of an older installation is left alone."""


def gelu_forward(
    inner_mF: Tensor, bias_F: Tensor | None, active_mF: Tensor, *, approximate: str
) -> None:
    """Writes the activation of the inner rows with the bias. All tensors are contiguous.

    Args:
        inner_mF: The rows.
        bias_F: Of them; None: 0.
        active_mF: Where the activation goes.
        approximate: As PyTorch's: `none` or `tanh`.
    """
    if _is_native(inner_mF.dtype):
        _call("forward", inner_mF, approximate, inner_mF, bias_F, active_mF)
        return
    shifted_mF = inner_mF if bias_F is None else inner_mF + bias_F
    torch.ops.aten.gelu.out(shifted_mF, approximate=approximate, out=active_mF)


def gelu_backward(
    inner_mF: Tensor,
    bias_F: Tensor | None,
    active_mF: Tensor,
    change_mF: Tensor,
    for_bias_F: Tensor | None,
    *,
    approximate: str,
) -> None:
    """Writes the activation, turns its gradient into that of the inner rows, and sums them.

    Args:
        inner_mF: See `gelu_forward`.
        bias_F: The same.
        active_mF: The same.
        change_mF: The gradient, which is overwritten.
        for_bias_F: Where the sum goes; None: nowhere.
        approximate: See `gelu_forward`.
    """
    if _is_native(inner_mF.dtype):
        tensors = (inner_mF, bias_F, active_mF, change_mF, for_bias_F)
        _call("backward", inner_mF, approximate, *tensors)
        return
    shifted_mF = inner_mF if bias_F is None else inner_mF + bias_F
    torch.ops.aten.gelu.out(shifted_mF, approximate=approximate, out=active_mF)
    torch.ops.aten.gelu_backward.grad_input(
        change_mF, shifted_mF, approximate=approximate, grad_input=change_mF
    )
    if for_bias_F is not None:
        torch.sum(change_mF, 0, out=for_bias_F)


def gelu_again(z_mF: Tensor, change_mF: Tensor) -> Tensor:
    """GELU, `none`, in a backward pass; turns its gradient into that of z, in place.

    Args:
        z_mF: What it is applied to.
        change_mF: The gradient.

    Returns:
        [m, F].
    """
    if z_mF.device.type == "cpu" and not torch.compiler.is_compiling():
        active_mF = torch.empty_like(change_mF)
        gelu_backward(z_mF.contiguous(), None, active_mF, change_mF, None, approximate="none")
        return active_mF
    torch.ops.aten.gelu_backward(change_mF, z_mF, grad_input=change_mF)
    return torch.nn.functional.gelu(z_mF)


def has_native_gelu() -> bool:
    """Whether it was compiled when Polyad was installed."""
    return _library() is not None


def _is_native(dtype: torch.dtype) -> bool:
    return dtype in NATIVE and has_native_gelu()


def _call(direction: str, inner_mF: Tensor, approximate: str, *tensors: Tensor | None) -> None:
    """The library's, by as many threads as PyTorch has: each number is rounded once, from fp32."""
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    name = f"polyad_gelu_{direction}_{FORMS[approximate]}_{NATIVE[inner_mF.dtype]}"
    where = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    _function(name, len(tensors))(*where, *inner_mF.shape, torch.get_num_threads())


@functools.cache
def _function(name: str, tensors: int) -> "ctypes._NamedFuncPointer":
    """Of the library: addresses of so many tensors, the numbers of rows, columns and threads."""
    function: ctypes._NamedFuncPointer = getattr(_library(), name)
    function.argtypes = [*[ctypes.c_void_p] * tensors, *[ctypes.c_long] * 3]
    function.restype = None
    return function


def _library() -> ctypes.CDLL | None:
    return load_library("model.kernels.cpu._gelu", VERSION)
