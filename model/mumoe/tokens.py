"""What a muMoE computes for each token by itself on a CPU, by `tokens.c`.

PyTorch's operations for it are many on little: entmax-1.5 by Newton's method takes five a step, and
a token's product of a small matrix with a flat one as much for its call as for its numbers.
`tokens.c` is compiled when Polyad is installed. Where there was no compiler, they are PyTorch's.

Shapes: M tokens, N experts of a level, P and Q of a token's small matrix, R columns of the other.
"""

import ctypes
import functools

import torch
from torch import Tensor

from model.kernels.cpu.native import load_library

VERSION = 1
"""Of the library."""
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""What products are compiled for."""


def takes_scores(*tensors: Tensor) -> bool:
    """Whether entmax of these is computed here.

    Args:
        tensors: Scores, or what goes with them.
    """
    return _is_here(*tensors) and all(x.dtype == torch.float32 for x in tensors)


def entmax15(scores_MN: Tensor, steps: int, small: float) -> tuple[Tensor, Tensor]:
    """Entmax-1.5 over the last dimension, and its root.

    Args:
        scores_MN: fp32.
        steps: Of Newton's method, at most.
        small: One that changes the threshold by no more than this is the last.

    Returns:
        The root and the coefficients, both of the same shape.
    """
    root_MN, p_MN = torch.empty_like(scores_MN), torch.empty_like(scores_MN)
    size = scores_MN.shape[-1]
    numbers = (scores_MN.numel() // size, size, steps, small)
    _call("entmax_forward", (scores_MN, root_MN, p_MN), numbers)
    return root_MN, p_MN


def entmax15_gradient(root_MN: Tensor, gradient_MN: Tensor) -> Tensor:
    """The gradient of the scores.

    Args:
        root_MN: Of the coefficients.
        gradient_MN: Of the coefficients.
    """
    result_MN = torch.empty_like(root_MN)
    size = root_MN.shape[-1]
    tensors = (root_MN, gradient_MN, result_MN)
    _call("entmax_backward", tensors, (root_MN.numel() // size, size))
    return result_MN


def takes_product(a_MPQ: Tensor, *others: Tensor) -> bool:
    """Whether a token's product with its first factor is computed here.

    Args:
        a_MPQ: The first factor.
        others: The other, and perhaps a gradient.
    """
    return (
        _is_here(a_MPQ, *others)
        and a_MPQ.dtype in TYPES
        and all(x.dtype == a_MPQ.dtype for x in others)
        and max(a_MPQ.shape[1:]) <= _order()
    )


def token_product(a_MPQ: Tensor, b_MQR: Tensor) -> Tensor:
    """a b of each token.

    Args:
        a_MPQ: The small matrices.
        b_MQR: The others.

    Returns:
        [M, P, R], summed in fp32.
    """
    (tokens, p, q), r = a_MPQ.shape, b_MQR.shape[2]
    c_MPR = a_MPQ.new_empty(tokens, p, r)
    name = f"product_forward_{TYPES[a_MPQ.dtype]}"
    _call(name, (a_MPQ, b_MQR, c_MPR), (tokens, p, q, r))
    return c_MPR


def token_product_gradients(
    a_MPQ: Tensor, b_MQR: Tensor, gradient_MPR: Tensor
) -> tuple[Tensor, Tensor]:
    """Those of both factors.

    Args:
        a_MPQ: The small matrices.
        b_MQR: The others.
        gradient_MPR: Of the product.
    """
    for_a_MPQ, for_b_MQR = torch.empty_like(a_MPQ), torch.empty_like(b_MQR)
    name = f"product_backward_{TYPES[a_MPQ.dtype]}"
    tensors = (a_MPQ, b_MQR, gradient_MPR, for_a_MPQ, for_b_MQR)
    _call(name, tensors, (*a_MPQ.shape, b_MQR.shape[2]))
    return for_a_MPQ, for_b_MQR


def has_native_tokens() -> bool:
    """Whether it was compiled when Polyad was installed."""
    return _library() is not None


def _is_here(*tensors: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and all(x.device.type == "cpu" and x.is_contiguous() for x in tensors)
        and all(x.numel() for x in tensors)
        and has_native_tokens()
    )


def _call(name: str, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]) -> None:
    """Calls one of the library's functions, for as many threads as PyTorch has."""
    kinds = tuple(type(number) for number in numbers)
    addresses = [tensor.data_ptr() for tensor in tensors]
    _function(name, len(tensors), kinds)(*addresses, *numbers, torch.get_num_threads())


@functools.cache
def _function(name: str, tensors: int, kinds: tuple[type, ...]) -> "ctypes._NamedFuncPointer":
    function: ctypes._NamedFuncPointer = getattr(_library(), f"polyad_{name}")
    numbers = [ctypes.c_float if kind is float else ctypes.c_long for kind in kinds]
    function.argtypes = [*[ctypes.c_void_p] * tensors, *numbers, ctypes.c_long]
    function.restype = None
    return function


@functools.cache
def _order() -> int:
    library = _library()
    assert library is not None
    return ctypes.c_int.in_dll(library, "polyad_product_order").value


def _library() -> ctypes.CDLL | None:
    return load_library("model.mumoe._tokens", VERSION)
