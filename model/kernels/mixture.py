"""The mixture p = S r over a graph of tokens, where S is a softmax of inner products of features.

    S_ij = softmax_j(scale q_i . k_j)        p_i = sum_j S_ij r_j

The reference stores S, T x S values per sequence. Faster implementations avoid that:

- by blocks of query rows, as one operation. For the backward pass one value per row is saved (the
  logarithm of its sum) and the rows are recomputed. A causal block stops at its last row.
- on a GPU by PyTorch's fused attention. It needs values as wide as keys, so the E scores of a token
  are padded to the F features: on a CPU the blocks are faster.

Shapes: B batch, S tokens, of which the last T are queries, F width of the features, E experts, M
requested rows, R rows of a block.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from polyad.model.kernels import switch

ROWS_AT_ONCE = 128
"""Query rows per block: with fewer, products are narrow; with more, they exceed the cache."""


def matrix(
    query_BTF: Tensor,
    key_BSF: Tensor,
    *,
    scale: float,
    causal: bool,
    entropy_BS: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Computes the matrix S, or some of its rows. B may stand for any number of dimensions.

    Args:
        query_BTF: Queries of the last T tokens.
        key_BSF: Keys of all tokens.
        scale: The factor of the inner products.
        causal: Whether a token only sees itself and earlier tokens.
        entropy_BS: The entropy of each token's scores, if a token only sees tokens with at most its
            own entropy.
        rows: Indices of the T rows, [M], or [B, M] for separate ones per B; None for all.

    Returns:
        [B, M, S], each row summing to 1.
    """
    new, length = query_BTF.shape[-2], key_BSF.shape[-2]
    token_S = torch.arange(length, device=query_BTF.device)
    token_M = token_S[length - new :]
    if rows is not None:
        token_M = token_M[rows]  # [M] or [B, M]
        if rows.dim() == 1:
            query_BTF = query_BTF.index_select(-2, rows)
        else:
            query_BTF = query_BTF.take_along_dim(rows.unsqueeze(-1), -2)
    exponents_BMS = scale * (query_BTF @ key_BSF.mT)
    if causal:
        exponents_BMS = exponents_BMS.masked_fill(token_S > token_M[..., None], -torch.inf)
    if entropy_BS is not None:
        # Dimensions between B and S, such as heads, share the same values.
        between = (1,) * (query_BTF.dim() - 3)
        entropy_BS = entropy_BS.view(entropy_BS.shape[0], *between, entropy_BS.shape[-1])
        of_row_BM = (
            entropy_BS[..., token_M]
            if token_M.dim() == 1
            else entropy_BS.take_along_dim(token_M, -1)
        )
        unseen_BMS = entropy_BS.unsqueeze(-2) > of_row_BM.unsqueeze(-1)
        exponents_BMS = exponents_BMS.masked_fill(unseen_BMS, -torch.inf)
    return exponents_BMS.softmax(-1)


def mixture_by_definition(
    query_BTF: Tensor,
    key_BSF: Tensor,
    value_BSE: Tensor,
    *,
    scale: float,
    causal: bool,
    entropy_BS: Tensor | None = None,
) -> Tensor:
    """Reference implementation of `mixture`, with S as a matrix."""
    s_BTS = matrix(query_BTF, key_BSF, scale=scale, causal=causal, entropy_BS=entropy_BS)
    return s_BTS @ value_BSE


def mixture(
    query_BTF: Tensor,
    key_BSF: Tensor,
    value_BSE: Tensor,
    *,
    scale: float,
    causal: bool,
    entropy_BS: Tensor | None = None,
) -> Tensor:
    """Computes the mixture p = S r.

    Args:
        query_BTF: See `matrix`.
        key_BSF: See `matrix`.
        value_BSE: r, of the same dtype.
        scale: See `matrix`.
        causal: See `matrix`.
        entropy_BS: See `matrix`; no gradient flows to it.

    Returns:
        p [B, T, E].
    """
    tensors = query_BTF, key_BSF, value_BSE
    if switch.REFERENCE:
        return mixture_by_definition(*tensors, scale=scale, causal=causal, entropy_BS=entropy_BS)
    whole = query_BTF.shape[1] == key_BSF.shape[1]
    on_gpu = not (switch.on_cpu(query_BTF) or query_BTF.is_meta)
    if on_gpu and whole and entropy_BS is None:
        return mixture_by_attention(*tensors, scale=scale, causal=causal)
    mixed_BTE: Tensor = _by_blocks(*tensors, scale, causal, entropy_BS)[0]
    return mixed_BTE


def mixture_by_attention(
    query_BTF: Tensor, key_BTF: Tensor, value_BTE: Tensor, *, scale: float, causal: bool
) -> Tensor:
    """Computes `mixture` over all tokens by one call of fused attention."""
    experts = value_BTE.shape[-1]
    # Fused kernels need one width for keys and values, a multiple of 8.
    width = -(-max(query_BTF.shape[-1], experts) // 8) * 8
    query, key, value = (
        pad(x_BTF, (0, width - x_BTF.shape[-1])).unsqueeze(1)
        for x_BTF in (query_BTF, key_BTF, value_BTE)
    )
    mixed = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
    return mixed[:, 0, :, :experts]


# A custom operation: a compiler would unroll the loop over blocks.
@torch.library.custom_op("polyad::mixture", mutates_args=())
def _by_blocks(
    query_BTF: Tensor,
    key_BSF: Tensor,
    value_BSE: Tensor,
    scale: float,
    causal: bool,
    entropy_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes the mixture, and the logarithm of the sum of each row's exponentials [B, T]."""
    mixed_BTE = value_BSE.new_empty(*query_BTF.shape[:2], value_BSE.shape[2])
    log_sum_BT1 = value_BSE.new_empty(*query_BTF.shape[:2], 1)
    for rows, seen in _blocks(query_BTF, key_BSF, causal):
        weights_BRS = _exponents(query_BTF, key_BSF, rows, seen, scale, causal, entropy_BS)
        most_BR1 = weights_BRS.amax(-1, keepdim=True)
        weights_BRS.sub_(most_BR1).exp_()
        sum_BR1 = weights_BRS.sum(-1, keepdim=True)
        torch.div(weights_BRS @ value_BSE[:, seen], sum_BR1, out=mixed_BTE[:, rows])
        torch.add(most_BR1, sum_BR1.log(), out=log_sum_BT1[:, rows])
    return mixed_BTE, log_sum_BT1.squeeze(-1)


@_by_blocks.register_fake
def _like_by_blocks(
    query_BTF: Tensor,
    key_BSF: Tensor,
    value_BSE: Tensor,
    scale: float,
    causal: bool,
    entropy_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    mixed_BTE = value_BSE.new_empty(*query_BTF.shape[:2], value_BSE.shape[2])
    return mixed_BTE, value_BSE.new_empty(query_BTF.shape[:2])


# A separate operation without a derivative, so that second derivatives raise an error.
@torch.library.custom_op("polyad::mixture_backward", mutates_args=())
def _by_blocks_backward(
    gradient_BTE: Tensor,
    mixed_BTE: Tensor,
    log_sum_BT: Tensor,
    query_BTF: Tensor,
    key_BSF: Tensor,
    value_BSE: Tensor,
    scale: float,
    causal: bool,
    entropy_BS: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    for_query_BTF = torch.empty_like(query_BTF, memory_format=torch.contiguous_format)
    for_key_BSF = torch.zeros_like(key_BSF, memory_format=torch.contiguous_format)
    for_value_BSE = torch.zeros_like(value_BSE, memory_format=torch.contiguous_format)
    # sum_j S_ij dS_ij, which the softmax subtracts from each row, computed without the row.
    inner_BT1 = (gradient_BTE * mixed_BTE).sum(-1, keepdim=True)
    for rows, seen in _blocks(query_BTF, key_BSF, causal):
        gradient_BRE = gradient_BTE[:, rows]
        weights_BRS = _exponents(query_BTF, key_BSF, rows, seen, scale, causal, entropy_BS)
        weights_BRS.sub_(log_sum_BT[:, rows, None]).exp_()
        for_value_BSE[:, seen].baddbmm_(weights_BRS.mT, gradient_BRE)
        change_BRS = (gradient_BRE @ value_BSE[:, seen].mT).sub_(inner_BT1[:, rows])
        change_BRS.mul_(weights_BRS)
        torch.mul(change_BRS @ key_BSF[:, seen], scale, out=for_query_BTF[:, rows])
        for_key_BSF[:, seen].baddbmm_(change_BRS.mT, query_BTF[:, rows], alpha=scale)
    return for_query_BTF, for_key_BSF, for_value_BSE


@_by_blocks_backward.register_fake
def _like_by_blocks_backward(
    gradient_BTE: Tensor,
    mixed_BTE: Tensor,
    log_sum_BT: Tensor,
    query_BTF: Tensor,
    key_BSF: Tensor,
    value_BSE: Tensor,
    scale: float,
    causal: bool,
    entropy_BS: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (query_BTF, key_BSF, value_BSE))  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query_BTF, key_BSF, value_BSE, ctx.scale, ctx.causal, entropy_BS = inputs
    ctx.set_materialize_grads(False)  # the logarithms are not used outside
    ctx.save_for_backward(*output, query_BTF, key_BSF, value_BSE, entropy_BS)


def _differentiate(ctx: Any, gradient_BTE: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if gradient_BTE is None:
        return (None,) * 6
    *tensors, entropy_BS = ctx.saved_tensors
    gradients = _by_blocks_backward(gradient_BTE, *tensors, ctx.scale, ctx.causal, entropy_BS)
    return (*gradients, None, None, None)


_by_blocks.register_autograd(_differentiate, setup_context=_keep)
for _device in ("cpu", "cuda"):
    _by_blocks.register_autocast(_device, torch.float32)


def _blocks(query_BTF: Tensor, key_BSF: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yields blocks of rows, and the keys that any of their rows sees."""
    new, length = query_BTF.shape[1], key_BSF.shape[1]
    for first in range(0, new, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, new)
        yield slice(first, last), slice(0, length - new + last if causal else length)


def _exponents(
    query_BTF: Tensor,
    key_BSF: Tensor,
    rows: slice,
    seen: slice,
    scale: float,
    causal: bool,
    entropy_BS: Tensor | None,
) -> Tensor:
    """Computes the logits of some rows of S, [B, R, S]; -inf for tokens that a row does not see."""
    exponents_BRS = (query_BTF[:, rows] @ key_BSF[:, seen].mT).mul_(scale)
    size = exponents_BRS.shape[1]
    if causal:  # some rows see only a part of the last R keys
        unseen_RR = torch.ones(size, size, dtype=torch.bool, device=query_BTF.device).triu_(1)
        exponents_BRS[:, :, -size:].masked_fill_(unseen_RR, -torch.inf)
    if entropy_BS is not None:
        of_rows_BR = entropy_BS[:, entropy_BS.shape[1] - query_BTF.shape[1] :][:, rows]
        exponents_BRS.masked_fill_(entropy_BS[:, None, seen] > of_rows_BR[:, :, None], -torch.inf)
    return exponents_BRS
