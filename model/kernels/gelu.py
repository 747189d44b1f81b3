"""GELU and its derivative on a CPU, both in one pass.

    none    h P(h)    P: the normal distribution
    tanh    h s(h)    s = sigmoid(2 sqrt(2/pi) (h + 0.044715 h^3))

as PyTorch calls them; its own with tanh takes as long as the products of a small expert.
`cpu/gelu.c` is compiled when Polyad is installed. Where there was no compiler, in other precisions
and for `POLYAD_KERNELS=reference` the definition is taken, which is PyTorch's.

Shapes: m rows, F inner width.
"""

import ctypes
import functools

import torch
from torch import Tensor

from model.kernels import switch
from model.kernels.cpu.native import load_library

NATIVE = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""What it is compiled for, in the names of its functions."""
FORMS = {"none": "erf", "tanh": "tanh"}
"""What PyTorch calls a form, and what its functions are called."""
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
    if _is_native(inner_mF):
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
    if _is_native(inner_mF):
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
    # A compiler makes one pass of the definition itself.
    if switch.REFERENCE or torch.compiler.is_compiling() or z_mF.device.type == "cuda":
        return gelu_again_by_definition(z_mF, change_mF)
    active_mF: Tensor = _again(z_mF, change_mF)
    return active_mF


def gelu_again_by_definition(z_mF: Tensor, change_mF: Tensor) -> Tensor:
    """As `gelu_again`."""
    torch.ops.aten.gelu_backward(change_mF, z_mF, grad_input=change_mF)
    return torch.nn.functional.gelu(z_mF)


# It has no derivative: that of a derivative is refused.
@torch.library.custom_op("polyad::gelu_again", mutates_args=("change_mF",))
def _again(z_mF: Tensor, change_mF: Tensor) -> Tensor:
    active_mF = torch.empty_like(change_mF, memory_format=torch.contiguous_format)
    contiguous_mF = change_mF.contiguous()
    gelu_backward(z_mF.contiguous(), None, active_mF, contiguous_mF, None, approximate="none")
    if contiguous_mF is not change_mF:
        change_mF.copy_(contiguous_mF)
    return active_mF


@_again.register_fake
def _like_again(z_mF: Tensor, change_mF: Tensor) -> Tensor:
    return torch.empty_like(change_mF, memory_format=torch.contiguous_format)


def has_native_gelu() -> bool:
    """Whether it was compiled when Polyad was installed."""
    return _library() is not None


def _is_native(inner_mF: Tensor) -> bool:
    on_cpu = inner_mF.device.type == "cpu" and inner_mF.dtype in NATIVE
    return on_cpu and not switch.REFERENCE and has_native_gelu()


def _call(direction: str, inner_mF: Tensor, approximate: str, *tensors: Tensor | None) -> None:
    """The library's, by as many threads as PyTorch has: each number is rounded once, from fp32."""
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    name = f"polyad_gelu_{direction}_{FORMS[approximate]}_{NATIVE[inner_mF.dtype]}"
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    _function(name, len(tensors))(*addresses, *inner_mF.shape, torch.get_num_threads())


@functools.cache
def _function(name: str, tensors: int) -> "ctypes._NamedFuncPointer":
    """Of the library: addresses of so many tensors, the numbers of rows, columns and threads."""
    function: ctypes._NamedFuncPointer = getattr(_library(), name)
    function.argtypes = [*[ctypes.c_void_p] * tensors, *[ctypes.c_long] * 3]
    function.restype = None
    return function


def _library() -> ctypes.CDLL | None:
    return load_library("model.kernels.cpu._gelu", VERSION)
