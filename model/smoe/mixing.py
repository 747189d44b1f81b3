"""The mixture p = S r on a CPU, as one operation: S never exists as a whole.

Fused attention wants values as wide as keys, and pads the E scores of a token to the F features of
S; here they stay E wide. For the backward pass a number of each row is kept (the logarithm of its
sum) and the rows are made again.

Shapes: B batch, T tokens in a sequence, F width of the features, E experts, M tokens that are
measured.
"""

from typing import Any

import torch
from torch import Tensor

from model.kernels import mixture as mixing_rows
from model.smoe.features import MEASURED_ROWS, Features, Mixing


def mix_on_host(mixing: Mixing) -> tuple[Tensor, Tensor]:
    """Mixes values by the softmax over keys.

    Args:
        mixing: What is asked for.

    Returns:
        [B, T, E], and the effective neighbours [B, M] of some tokens: with entropies of all, or
        else of the measured rows.
    """
    features, *others = mixing
    mixed_BTE, _, neighbours_BM = _forward(*features, *others)
    return mixed_BTE, neighbours_BM


# Operations of our own: a compiler would unroll the loops over blocks, and finds none in C.
@torch.library.custom_op("polyad::mix_on_host", mutates_args=())
def _forward(
    query_BTF: Tensor,
    key_BTF: Tensor | None,
    scale: float,
    normalized: bool,
    value_BTE: Tensor,
    causal: bool,
    entropy_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    features = Features(query_BTF, key_BTF, scale, normalized)
    mixing = Mixing(features, value_BTE, causal, entropy_BT)
    return mixing_rows.mix(mixing)


@_forward.register_fake
def _like_forward(
    query_BTF: Tensor,
    key_BTF: Tensor | None,
    scale: float,
    normalized: bool,
    value_BTE: Tensor,
    causal: bool,
    entropy_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length = value_BTE.shape[:2]
    measured = min(length, MEASURED_ROWS) if entropy_BT is None else length
    return (
        value_BTE.new_empty(value_BTE.shape),
        value_BTE.new_empty(batch, length),
        value_BTE.new_empty(batch, measured),
    )


@torch.library.custom_op("polyad::mix_on_host_backward", mutates_args=())
def _backward(
    gradient_BTE: Tensor,
    mixed_BTE: Tensor,
    log_sum_BT: Tensor,
    query_BTF: Tensor,
    key_BTF: Tensor | None,
    scale: float,
    normalized: bool,
    value_BTE: Tensor,
    causal: bool,
    entropy_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    features = Features(query_BTF, key_BTF, scale, normalized)
    mixing = Mixing(features, value_BTE, causal, entropy_BT)
    for_query_BTF, for_key_BTF, for_value_BTE = mixing_rows.differentiate(
        mixing, gradient_BTE, mixed_BTE, log_sum_BT
    )
    if for_key_BTF is None:
        for_key_BTF = query_BTF.new_empty(0)  # an operation cannot return None
    return for_query_BTF, for_key_BTF, for_value_BTE


@_backward.register_fake
def _like_backward(
    gradient_BTE: Tensor,
    mixed_BTE: Tensor,
    log_sum_BT: Tensor,
    query_BTF: Tensor,
    key_BTF: Tensor | None,
    scale: float,
    normalized: bool,
    value_BTE: Tensor,
    causal: bool,
    entropy_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(query_BTF),
        query_BTF.new_empty(0) if key_BTF is None else torch.empty_like(key_BTF),
        torch.empty_like(value_BTE),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query_BTF, key_BTF, ctx.scale, ctx.normalized, value_BTE, ctx.causal, entropy_BT = inputs
    mixed_BTE, log_sum_BT, _ = output
    ctx.set_materialize_grads(False)  # of what counts for no loss
    ctx.save_for_backward(mixed_BTE, log_sum_BT, query_BTF, key_BTF, value_BTE, entropy_BT)


def _differentiate(ctx: Any, gradient_BTE: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if gradient_BTE is None:
        return (None,) * 7
    *of_rows, query_BTF, key_BTF, value_BTE, entropy_BT = ctx.saved_tensors
    features = Features(query_BTF, key_BTF, ctx.scale, ctx.normalized)
    mixing = Mixing(features, value_BTE, ctx.causal, entropy_BT)
    for_query_BTF, for_key_BTF, for_value_BTE = _backward(
        gradient_BTE, *of_rows, *features, *mixing[1:]
    )
    if key_BTF is None:
        for_key_BTF = None
    return for_query_BTF, for_key_BTF, None, None, for_value_BTE, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
