"""The mixture p = S r, by the fastest way that the device and the graph allow.

Shapes: B batch, T tokens in a sequence, E experts, F width of the features, R query rows at once, S
tokens that a row may see.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from model.cache import LayerCache, attend_cached
from model.entropy import entropy
from model.kernels.mixture import ROWS_AT_ONCE
from model.smoe.config import SparseMoEConfig
from model.smoe.features import Features, Mixing
from model.smoe.measures import effective_neighbours
from model.smoe.mixing import mix_on_host


def mix(
    features: Features,
    scores_BTE: Tensor,
    config: SparseMoEConfig,
    causal: bool,
    cache: LayerCache | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes p = S r without S.

    Args:
        features: That S is made of.
        scores_BTE: r.
        config: Of the layer.
        causal: Whether j <= i; in generation it is so always.
        cache: In generation: what is before these tokens.

    Returns:
        p [B, T, E], and the effective neighbours as `Mixed` has them.
    """
    lower_only = config.lower_entropy_only
    if cache is None and goes_by_blocks(scores_BTE):
        entropy_BT = entropy(scores_BTE.detach()) if lower_only else None
        mixed_BTE, neighbours_BM = mix_on_host(Mixing(features, scores_BTE, causal, entropy_BT))
        return mixed_BTE, neighbours_BM.detach().mean()
    query_BTF, key_BTF = features.in_full()
    if lower_only:
        causal = causal or cache is not None
        return _mix_lower_entropy(query_BTF * features.scale, key_BTF, scores_BTE, causal, cache)
    width, experts = query_BTF.shape[-1], scores_BTE.shape[-1]
    # One width for keys and values, and a multiple of 8: what fused kernels take.
    padded = -(-max(width, experts) // 8) * 8
    query, key, value = (
        _padded(x_BTF, padded).unsqueeze(1) for x_BTF in (query_BTF, key_BTF, scores_BTE)
    )
    if cache is not None:
        mixed = attend_cached(query, key, value, cache, scale=features.scale)
        return mixed[:, 0, :, :experts], None
    mixed = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=features.scale)
    neighbours = effective_neighbours(query_BTF, key_BTF, features.scale, causal)
    return mixed[:, 0, :, :experts], neighbours


def goes_by_blocks(scores_BTE: Tensor) -> bool:
    """Whether plain products by blocks of rows are faster here than fused attention."""
    return scores_BTE.device.type == "cpu"


def _padded(x_BTF: Tensor, width: int) -> Tensor:
    missing = width - x_BTF.shape[-1]
    return pad(x_BTF, (0, missing)) if missing else x_BTF


def _mix_lower_entropy(
    query_BTF: Tensor,
    key_BSF: Tensor,
    value_BSE: Tensor,
    causal: bool,
    cache: LayerCache | None,
) -> tuple[Tensor, Tensor | None]:
    """As `mix`, over the tokens j whose scores have no more entropy than those of i.

    The mask depends on the data, so this goes by blocks of query rows; the backward pass computes
    each block again and nothing of size T x T is kept.
    """
    start = 0
    if cache is not None:
        start = cache.length
        padded = max(key_BSF.shape[-1], value_BSE.shape[-1])
        keys, values = cache.append(
            *(_padded(x, padded).unsqueeze(1) for x in (key_BSF, value_BSE))
        )
        key_BSF = keys[:, 0, :, : key_BSF.shape[-1]]
        value_BSE = values[:, 0, :, : value_BSE.shape[-1]]
    entropy_BS = entropy(value_BSE.detach())
    blocks, neighbours = [], []
    for first in range(0, query_BTF.shape[1], ROWS_AT_ONCE):
        rows_BRF = query_BTF[:, first : first + ROWS_AT_ONCE]
        arguments = (rows_BRF, key_BSF, value_BSE, entropy_BS, start + first, causal)
        if torch.is_grad_enabled():
            block_BRE, count = checkpoint(
                _mix_rows, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            block_BRE, count = _mix_rows(*arguments)
        blocks.append(block_BRE)
        neighbours.append(count)
    return torch.cat(blocks, 1), torch.cat(neighbours, 1).mean() if cache is None else None


def _mix_rows(
    rows_BRF: Tensor,
    key_BSF: Tensor,
    value_BSE: Tensor,
    entropy_BS: Tensor,
    first: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Rows first .. first + R of S r, and the effective neighbours [B, R] of each."""
    size, length = rows_BRF.shape[1], key_BSF.shape[1]
    mask_BRS = entropy_BS[:, None, :] <= entropy_BS[:, first : first + size, None]
    if causal:
        mask_BRS = mask_BRS & _seen(first, size, length, rows_BRF.device)
    logits_BRS = (rows_BRF @ key_BSF.transpose(1, 2)).masked_fill(~mask_BRS, -torch.inf)
    weights_BRS = logits_BRS.softmax(-1)
    return weights_BRS @ value_BSE, entropy(weights_BRS.detach()).exp()


def _seen(first: int, rows: int, length: int, device: torch.device) -> Tensor:
    """[R, S]: whether row first + i sees token j."""
    row_R = torch.arange(first, first + rows, device=device)
    return torch.arange(length, device=device) <= row_R[:, None]
