"""The mixture p = S r on a CPU, by blocks of query rows: S never exists as a whole.

Fused attention wants values as wide as keys, and pads the E scores of a token to the F features of
S; here they stay E wide, products are plain ones, and a causal block stops at its last row. For the
backward pass a number of each row is kept (the logarithm of its sum) and the rows are made again.

Shapes: B batch, T tokens in a sequence, F width of the features, E experts, R rows of a block, S
keys that a block sees.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from model.entropy import entropy

ROWS_AT_ONCE = 128
"""Query rows of a block. Fewer make narrow products, more leave the cache."""


def mix_on_host(
    query_BTF: Tensor,
    key_BTF: Tensor,
    scale: float,
    value_BTE: Tensor,
    causal: bool,
    entropy_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mixes values by the softmax over keys of scale * query . key.

    Args:
        query_BTF: Features of the tokens that are mixed for.
        key_BTF: Features of the tokens that take part.
        scale: Of their inner products.
        value_BTE: What is mixed, in the same dtype.
        causal: Whether a token sees itself and those before it alone.
        entropy_BT: Of each token's scores, if one sees those with no more than its own alone.

    Returns:
        [B, T, E], and with entropies the effective neighbours of each token, [B, T, 1].
    """
    mixed_BTE, _, neighbours_BT1 = _forward(
        query_BTF, key_BTF, scale, value_BTE, causal, entropy_BT
    )
    return mixed_BTE, neighbours_BT1


def mix_rows(
    query_BTF: Tensor,
    key_BTF: Tensor,
    scale: float,
    value_BTE: Tensor,
    causal: bool,
    entropy_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mixture, the logarithm of the sum of each row's exponentials, [B, T, 1], neighbours."""
    mixed_BTE, log_sum_BT1, neighbours_BT1 = _like_forward(
        query_BTF, key_BTF, scale, value_BTE, causal, entropy_BT
    )
    for rows, seen in _blocks(query_BTF.shape[1], causal):
        weights_BRS = _logits(query_BTF, key_BTF, scale, causal, entropy_BT, rows, seen)
        most_BR1 = weights_BRS.amax(-1, keepdim=True)
        weights_BRS.sub_(most_BR1).exp_()
        sum_BR1 = weights_BRS.sum(-1, keepdim=True)
        torch.div(torch.bmm(weights_BRS, value_BTE[:, seen]), sum_BR1, out=mixed_BTE[:, rows])
        torch.add(most_BR1, sum_BR1.log(), out=log_sum_BT1[:, rows])
        if entropy_BT is not None:
            neighbours_BT1[:, rows] = entropy(weights_BRS.div_(sum_BR1)).exp_().unsqueeze(-1)
    return mixed_BTE, log_sum_BT1, neighbours_BT1


def differentiate_rows(
    gradient_BTE: Tensor,
    query_BTF: Tensor,
    key_BTF: Tensor,
    scale: float,
    value_BTE: Tensor,
    mixed_BTE: Tensor,
    log_sum_BT1: Tensor,
    causal: bool,
    entropy_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value from that of the mixture."""
    for_query_BTF = torch.empty_like(query_BTF)
    for_key_BTF, for_value_BTE = torch.zeros_like(key_BTF), torch.zeros_like(value_BTE)
    # sum_j S_ij dS_ij, which the softmax takes off each row, without the row.
    inner_BT1 = (gradient_BTE * mixed_BTE).sum(-1, keepdim=True)
    for rows, seen in _blocks(query_BTF.shape[1], causal):
        gradient_BRE = gradient_BTE[:, rows]
        weights_BRS = _logits(query_BTF, key_BTF, scale, causal, entropy_BT, rows, seen)
        weights_BRS.sub_(log_sum_BT1[:, rows]).exp_()
        for_value_BTE[:, seen].baddbmm_(weights_BRS.mT, gradient_BRE)
        change_BRS = torch.bmm(gradient_BRE, value_BTE[:, seen].mT)
        change_BRS.sub_(inner_BT1[:, rows]).mul_(weights_BRS)
        for_query_BTF[:, rows] = _product(change_BRS, key_BTF[:, seen], scale)
        for_key_BTF[:, seen].baddbmm_(change_BRS.mT, query_BTF[:, rows], alpha=scale)
    return for_query_BTF, for_key_BTF, for_value_BTE


def _blocks(length: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Rows that are computed together, and the keys that any of them sees."""
    for first in range(0, length, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, length)
        yield slice(first, last), slice(0, last if causal else length)


def _logits(
    query_BTF: Tensor,
    key_BTF: Tensor,
    scale: float,
    causal: bool,
    entropy_BT: Tensor | None,
    rows: slice,
    seen: slice,
) -> Tensor:
    """The exponents of some rows; if causal, of the last R keys some rows see a part."""
    logits_BRS = _product(query_BTF[:, rows], key_BTF[:, seen].mT, scale)
    if causal:
        size = logits_BRS.shape[1]
        unseen_RR = torch.ones(size, size, dtype=torch.bool, device=logits_BRS.device).triu_(1)
        logits_BRS[:, :, -size:].masked_fill_(unseen_RR, -torch.inf)
    if entropy_BT is not None:
        more_BRS = entropy_BT[:, None, seen] > entropy_BT[:, rows, None]
        logits_BRS.masked_fill_(more_BRS, -torch.inf)
    return logits_BRS


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a @ b, without a pass over the result for the scale."""
    result = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return torch.baddbmm(result, a, b, beta=0, alpha=scale, out=result)


# Operations of our own: a compiler would unroll the loop over blocks.
@torch.library.custom_op("polyad::mix_on_host", mutates_args=())
def _forward(
    query_BTF: Tensor,
    key_BTF: Tensor,
    scale: float,
    value_BTE: Tensor,
    causal: bool,
    entropy_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return mix_rows(query_BTF, key_BTF, scale, value_BTE, causal, entropy_BT)


@_forward.register_fake
def _like_forward(
    query_BTF: Tensor,
    key_BTF: Tensor,
    scale: float,
    value_BTE: Tensor,
    causal: bool,
    entropy_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length = value_BTE.shape[:2]
    return (
        value_BTE.new_empty(value_BTE.shape),
        value_BTE.new_empty(batch, length, 1),
        value_BTE.new_empty(batch, 0 if entropy_BT is None else length, 1),
    )


@torch.library.custom_op("polyad::mix_on_host_backward", mutates_args=())
def _backward(
    gradient_BTE: Tensor,
    query_BTF: Tensor,
    key_BTF: Tensor,
    scale: float,
    value_BTE: Tensor,
    mixed_BTE: Tensor,
    log_sum_BT1: Tensor,
    causal: bool,
    entropy_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return differentiate_rows(
        gradient_BTE,
        query_BTF,
        key_BTF,
        scale,
        value_BTE,
        mixed_BTE,
        log_sum_BT1,
        causal,
        entropy_BT,
    )


@_backward.register_fake
def _like_backward(
    gradient_BTE: Tensor,
    query_BTF: Tensor,
    key_BTF: Tensor,
    scale: float,
    value_BTE: Tensor,
    mixed_BTE: Tensor,
    log_sum_BT1: Tensor,
    causal: bool,
    entropy_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(query_BTF),
        torch.empty_like(key_BTF),
        torch.empty_like(value_BTE),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query_BTF, key_BTF, ctx.scale, value_BTE, ctx.causal, entropy_BT = inputs
    mixed_BTE, log_sum_BT1, _ = output
    ctx.set_materialize_grads(False)  # of what counts for no loss
    ctx.save_for_backward(query_BTF, key_BTF, value_BTE, mixed_BTE, log_sum_BT1, entropy_BT)


def _differentiate(ctx: Any, gradient_BTE: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if gradient_BTE is None:
        return (None,) * 6
    query_BTF, key_BTF, *others, entropy_BT = ctx.saved_tensors
    for_query_BTF, for_key_BTF, for_value_BTE = _backward(
        gradient_BTE, query_BTF, key_BTF, ctx.scale, *others, ctx.causal, entropy_BT
    )
    return for_query_BTF, for_key_BTF, None, for_value_BTE, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
