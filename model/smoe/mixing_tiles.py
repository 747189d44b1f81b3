"""The mixture p = S r and its gradients on a CPU that multiplies tiles of bf16, by `mixing.c`.

For features in bf16. Their products are exact and summed in fp32, so that S is no less precise
than by products in fp32, and takes a tenth of the time. In the backward pass the gradient of S's
exponents is rounded to bf16 before it is multiplied with features, as in every fused attention.

Shapes: B batch, T tokens in a sequence, F width of the features, E experts, M tokens that are
measured.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.native import load_tile_library
from model.smoe.features import Mixing, measured_rows

VERSION = 1
"""Of the library."""
DEPTH = 32
"""F is filled up to a multiple of it with zeros."""
FEWEST_TOKENS = 16
"""T of a sequence: rows of a tile."""


def takes(mixing: Mixing) -> bool:
    """Whether this is the way to compute it.

    Args:
        mixing: What is asked for.
    """
    return (
        takes_features(mixing.features.query_BTF)
        and mixing.value_BTE.dtype == torch.float32
        and mixing.value_BTE.shape[1] >= FEWEST_TOKENS
    )


def takes_features(features: Tensor) -> bool:
    """Whether features are multiplied in tiles, in sequences that are not very short.

    Args:
        features: Or something of the same precision at the same place.
    """
    return features.device.type == "cpu" and features.dtype == torch.bfloat16 and is_there()


def takes_heads(query_BATH: Tensor, key_BATH: Tensor) -> bool:
    """Whether `mean_entropies` can be asked.

    Args:
        query_BATH: Of attention.
        key_BATH: Of attention.
    """
    return (
        takes_features(query_BATH)
        and query_BATH.shape[2] >= FEWEST_TOKENS
        and query_BATH.shape[3] % DEPTH == 0
        and query_BATH.stride() == key_BATH.stride()
        and query_BATH.stride(3) == 1
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_there() -> bool:
    """Whether the processor has tiles, the system lets this process use them, and it was compiled
    when Polyad was installed.
    """
    return _library() is not None


def mix(mixing: Mixing) -> tuple[Tensor, Tensor, Tensor]:
    """See `mixing_rows.mix`."""
    asked = _Asked(mixing)
    mixed_BTE = torch.empty_like(asked.value_BTE)
    log_sum_BT = mixed_BTE.new_empty(mixed_BTE.shape[:2])
    neighbours_BT = torch.empty_like(log_sum_BT)
    asked.call(
        "forward",
        (asked.query_BTF, asked.key_BTF, *asked.lengths(), asked.value_BTE, asked.entropy_BT),
        (mixed_BTE, log_sum_BT, neighbours_BT),
    )
    if mixing.entropy_BT is None:
        rows_M = measured_rows(mixed_BTE.shape[1], mixed_BTE.device)
        neighbours_BT = neighbours_BT.index_select(1, rows_M)
    return mixed_BTE, log_sum_BT, neighbours_BT


def differentiate(
    mixing: Mixing, gradient_BTE: Tensor, mixed_BTE: Tensor, log_sum_BT: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See `mixing_rows.differentiate`."""
    asked = _Asked(mixing)
    gradient_BTE = gradient_BTE.contiguous()
    inner_BT = (gradient_BTE * mixed_BTE).sum(-1)
    for_value_BTE = torch.empty_like(asked.value_BTE)

    def gradient_of(own_BTF: Tensor, other_BTF: Tensor, *, as_query: bool, as_key: bool) -> Tensor:
        result_BTF = torch.empty_like(own_BTF)
        features = (own_BTF, other_BTF, *asked.lengths())
        of_rows = (asked.value_BTE, gradient_BTE, log_sum_BT, inner_BT, asked.entropy_BT)
        results = (result_BTF, for_value_BTE)
        asked.call("backward", (*features, *of_rows), results, as_query, as_key)
        return result_BTF[..., : mixing.features.query_BTF.shape[-1]]

    query_BTF, key_BTF = asked.query_BTF, asked.key_BTF
    if mixing.features.key_BTF is None:
        for_query_BTF = gradient_of(query_BTF, query_BTF, as_query=True, as_key=True)
        return for_query_BTF, None, for_value_BTE
    for_query_BTF = gradient_of(query_BTF, key_BTF, as_query=True, as_key=False)
    for_key_BTF = gradient_of(key_BTF, query_BTF, as_query=False, as_key=True)
    return for_query_BTF, for_key_BTF, for_value_BTE


def mean_entropies(
    query_BATH: Tensor, key_BATH: Tensor, rows_M: Tensor, scale: float, causal: bool
) -> Tensor:
    """The mean entropy of each head's attention at some rows.

    Args:
        query_BATH: Of attention.
        key_BATH: Of attention, with the same strides.
        rows_M: Which rows, in ascending order.
        scale: Of the inner products.
        causal: Whether a token sees itself and those before it alone.

    Returns:
        [B, A], fp32, in nats.
    """
    entropies_BA = torch.empty(query_BATH.shape[:2])
    tensors = (query_BATH, key_BATH, rows_M, entropies_BA)
    numbers = (*query_BATH.shape, *query_BATH.stride()[:3], len(rows_M), scale, causal)
    _call("entropies", tensors, numbers, width=query_BATH.shape[-1])
    return entropies_BA


def takes_product(features_NF: Tensor) -> bool:
    """Whether `product` can be asked.

    Args:
        features_NF: Of tokens.
    """
    enough = len(features_NF) >= FEWEST_TOKENS and features_NF.shape[1] % DEPTH == 0
    return enough and takes_features(features_NF)


def product(features_NF: Tensor, directions_FP: Tensor) -> Tensor:
    """Features along directions: what PyTorch's product of bf16 would round to bf16.

    Args:
        features_NF: Of tokens.
        directions_FP: One a column.

    Returns:
        [N, P], fp32.
    """
    (tokens, width), count = features_NF.shape, directions_FP.shape[1]
    result_NP = torch.empty(tokens, count)
    tensors = (features_NF.contiguous(), directions_FP.T.contiguous(), result_NP)
    _call("project", tensors, (tokens, width, count), width=width)
    return result_NP


class _Asked:
    """A mixture as the library wants it: contiguous, F a multiple of `DEPTH`.

    Args:
        mixing: What is asked for.
    """

    def __init__(self, mixing: Mixing) -> None:
        self.mixing = mixing
        self.query_BTF = _filled(mixing.features.query_BTF)
        key_BTF = mixing.features.key_BTF
        self.key_BTF = self.query_BTF if key_BTF is None else _filled(key_BTF)
        self.value_BTE = mixing.value_BTE.contiguous()
        self.entropy_BT = mixing.entropy_BT
        if self.entropy_BT is not None:
            self.entropy_BT = self.entropy_BT.contiguous()

    def lengths(self) -> tuple[Tensor | None, Tensor | None]:
        """Where one over the lengths of a product's first and second features can go."""
        if not self.mixing.features.normalized:
            return None, None
        over_BT = self.value_BTE.new_empty(self.value_BTE.shape[:2])
        return over_BT, over_BT if self.key_BTF is self.query_BTF else torch.empty_like(over_BT)

    def call(
        self,
        direction: str,
        inputs: tuple[Tensor | None, ...],
        outputs: tuple[Tensor, ...],
        *parts: bool,
    ) -> None:
        """Calls the library's function of a direction."""
        shape, experts = self.query_BTF.shape, self.value_BTE.shape[-1]
        numbers = (*shape, experts, self.mixing.features.scale, self.mixing.causal, *parts)
        backward = direction == "backward"
        tensors = (*inputs, *outputs)
        _call(direction, tensors, numbers, width=shape[-1], experts=experts, backward=backward)


def _call(
    name: str,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    *,
    width: int,
    experts: int = 0,
    backward: bool = False,
) -> None:
    """Calls one of the library's functions with as many threads as PyTorch has, and scratch."""
    library, threads = _library(), torch.get_num_threads()
    assert library is not None
    each = library.polyad_mixing_scratch(width, experts, backward)
    scratch = torch.empty(threads * each, dtype=torch.uint8)
    where = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    getattr(library, f"polyad_mixing_{name}")(*where, *numbers, scratch.data_ptr(), threads)


def _filled(features_BTF: Tensor) -> Tensor:
    """With zeros, up to a multiple of `DEPTH`."""
    missing = -features_BTF.shape[-1] % DEPTH
    return pad(features_BTF, (0, missing)) if missing else features_BTF.contiguous()


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_tile_library("model.smoe._mixing", VERSION)
    if library is None:
        return None
    pointer, number, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    shape: list[Any] = [*[number] * 4, ctypes.c_float, flag]
    after: list[Any] = [pointer, number]
    library.polyad_mixing_forward.argtypes = [*[pointer] * 9, *shape, *after]
    library.polyad_mixing_backward.argtypes = [*[pointer] * 11, *shape, flag, flag, *after]
    library.polyad_mixing_entropies.argtypes = [
        *[pointer] * 4,
        *[number] * 8,
        ctypes.c_float,
        flag,
        *after,
    ]
    library.polyad_mixing_project.argtypes = [*[pointer] * 3, *[number] * 3, *after]
    library.polyad_mixing_scratch.argtypes = [number, number, flag]
    library.polyad_mixing_scratch.restype = number
    for name in ("forward", "backward", "entropies", "project"):
        getattr(library, f"polyad_mixing_{name}").restype = None
    return library
