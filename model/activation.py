"""GELU and its derivative on a CPU, both in one pass.

    none    h P(h)    P: the normal distribution
    tanh    h s(h)    s = sigmoid(2 sqrt(2/pi) (h + 0.044715 h^3))

as PyTorch calls them; its own with tanh takes as long as the products of a small expert. `gelu.c`
is compiled when Polyad is installed. Where there was no compiler, PyTorch's is taken.

Shapes: m rows, F inner width.
"""

import ctypes
import functools
import importlib.util
from typing import Protocol

import torch
from torch import Tensor

NATIVE = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""What it is compiled for, in the names of its functions."""
FORMS = {"none": "erf", "tanh": "tanh"}
"""The same."""
VERSION = 1
"""Of the library that is called here; one of an older installation is left alone."""


class Gelu(Protocol):
    """Both directions, of contiguous rows, into memory that is there."""

    def forward(self, inner_mF: Tensor, bias_F: Tensor | None, active_mF: Tensor) -> None:
        """Writes the activation of the inner rows with the bias."""

    def backward(
        self,
        inner_mF: Tensor,
        bias_F: Tensor | None,
        active_mF: Tensor,
        change_mF: Tensor,
        for_bias_F: Tensor | None,
    ) -> None:
        """Writes the activation, turns its gradient into that of the inner rows, and sums them."""


def gelu_for(dtype: torch.dtype, approximate: str) -> Gelu:
    """The faster that is there.

    Args:
        dtype: Of the rows.
        approximate: As PyTorch's: `none` or `tanh`.
    """
    if dtype in NATIVE and has_native_gelu():
        return NativeGelu(f"{FORMS[approximate]}_{NATIVE[dtype]}")
    return TorchGelu(approximate)


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
        gelu_for(z_mF.dtype, "none").backward(z_mF.contiguous(), None, active_mF, change_mF, None)
        return active_mF
    torch.ops.aten.gelu_backward(change_mF, z_mF, grad_input=change_mF)
    return torch.nn.functional.gelu(z_mF)


def has_native_gelu() -> bool:
    """Whether it was compiled when Polyad was installed."""
    return _library() is not None


class NativeGelu:
    """Compiled: every number is rounded once, from fp32. Computes with PyTorch's threads.

    Args:
        name: Of form and dtype, in the library.
    """

    def __init__(self, name: str) -> None:
        self._forward = _function(f"polyad_gelu_forward_{name}", tensors=3)
        self._backward = _function(f"polyad_gelu_backward_{name}", tensors=5)

    def forward(self, inner_mF: Tensor, bias_F: Tensor | None, active_mF: Tensor) -> None:
        """See `Gelu.forward`."""
        where = _addresses(inner_mF, bias_F, active_mF)
        self._forward(*where, *inner_mF.shape, torch.get_num_threads())

    def backward(
        self,
        inner_mF: Tensor,
        bias_F: Tensor | None,
        active_mF: Tensor,
        change_mF: Tensor,
        for_bias_F: Tensor | None,
    ) -> None:
        """See `Gelu.backward`."""
        where = _addresses(inner_mF, bias_F, active_mF, change_mF, for_bias_F)
        self._backward(*where, *inner_mF.shape, torch.get_num_threads())


class TorchGelu:
    """PyTorch's.

    Args:
        approximate: See `gelu_for`.
    """

    def __init__(self, approximate: str) -> None:
        self.approximate = approximate

    def forward(self, inner_mF: Tensor, bias_F: Tensor | None, active_mF: Tensor) -> None:
        """See `Gelu.forward`."""
        shifted_mF = inner_mF if bias_F is None else inner_mF + bias_F
        torch.ops.aten.gelu.out(shifted_mF, approximate=self.approximate, out=active_mF)

    def backward(
        self,
        inner_mF: Tensor,
        bias_F: Tensor | None,
        active_mF: Tensor,
        change_mF: Tensor,
        for_bias_F: Tensor | None,
    ) -> None:
        """See `Gelu.backward`."""
        shifted_mF = inner_mF if bias_F is None else inner_mF + bias_F
        torch.ops.aten.gelu.out(shifted_mF, approximate=self.approximate, out=active_mF)
        torch.ops.aten.gelu_backward.grad_input(
            change_mF, shifted_mF, approximate=self.approximate, grad_input=change_mF
        )
        if for_bias_F is not None:
            torch.sum(change_mF, 0, out=for_bias_F)


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@functools.cache
def _function(name: str, tensors: int) -> "ctypes._NamedFuncPointer":
    """Of the library: addresses of so many tensors, the numbers of rows, columns and threads."""
    function: ctypes._NamedFuncPointer = getattr(_library(), name)
    function.argtypes = [*[ctypes.c_void_p] * tensors, *[ctypes.c_long] * 3]
    function.restype = None
    return function


@functools.cache
def _library() -> ctypes.CDLL | None:
    """It is no module of Python, but is found as one; None without it, or if it is not of today."""
    found = importlib.util.find_spec("model._gelu")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    try:
        version = ctypes.c_int.in_dll(library, "polyad_gelu_version").value
    except ValueError:
        return None
    return library if version == VERSION else None
