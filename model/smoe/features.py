"""The features that make the matrix S of a graph of tokens, and what is measured of its rows.

    S_ij = softmax_j(scale q_i . k_j)

Shapes: B batch, T tokens, S tokens seen in all, A heads, G heads that are measured, F width of the
features, M rows that are measured.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.attention import AttentionTrace
from model.entropy import entropy
from model.kernels.mixture import matrix
from model.padding import token_mean
from model.smoe.scores import router_dtype

MEASURED_ROWS = 32
"""Query rows of a sequence at which entropies are measured: a sample of all rows."""
UNSEEN = -1e9
"""The exponent of padding: finite, so that a row of padding is, too; its exponential is 0."""


class Features(NamedTuple):
    """The factors of S: each row is the softmax over j of scale * query_i . key_j."""

    query_BTF: Tensor
    """Queries; in routing's precision, as the keys."""
    key_BTF: Tensor
    scale: float = 1.0


def without_padding(features: Features, mask_BT: Tensor) -> Features:
    """Features with one more, by which the softmax of each row gives padding a weight of 0.

    Args:
        features: Of all tokens; B, T and F may have other dimensions between them.
        mask_BT: False for padding.
    """
    query, key, scale = features
    real = mask_BT.view(len(mask_BT), *(1,) * (key.dim() - 3), -1, 1)
    far = torch.where(real, 0, UNSEEN / scale).to(key.dtype).expand(*key.shape[:-1], 1)
    ones = query.new_ones(*query.shape[:-1], 1)
    return Features(torch.cat([query, ones], -1), torch.cat([key, far], -1), scale)


def measured_rows(length: int, device: torch.device) -> Tensor:
    """Rows spread evenly over a sequence [M], the last one among them."""
    count = min(length, MEASURED_ROWS)
    part_M = torch.arange(1, count + 1, device=device)
    return (part_M * length).div(count, rounding_mode="floor") - 1


def measured_mean(values_BM: Tensor, mask_BT: Tensor | None) -> Tensor:
    """The mean over sequences and measured rows, [B, M, ...] -> [...], without padding."""
    real_N = None
    if mask_BT is not None:
        rows_M = measured_rows(mask_BT.shape[1], mask_BT.device)
        real_N = mask_BT.index_select(1, rows_M).flatten()
    return token_mean(values_BM.flatten(0, 1), real_N)


@torch.no_grad()
def row_entropies(
    query: Tensor, key: Tensor, scale: float, causal: bool, entropy_BS: Tensor | None = None
) -> Tensor:
    """Entropies of the rows softmax(scale * query . key) at rows spread evenly over a sequence, the
    last one among them; [..., T, F] -> [..., M], M = min(T, MEASURED_ROWS).
    """
    rows_M = measured_rows(query.shape[-2], query.device)
    rows_of_s = matrix(query, key, scale=scale, causal=causal, entropy_BS=entropy_BS, rows_M=rows_M)
    return entropy(rows_of_s)


def head_entropies(
    attention: AttentionTrace, causal: bool, mask_BT: Tensor | None = None
) -> Tensor:
    """The mean entropy of each head's attention over measured rows.

    Args:
        attention: What attention did.
        causal: Whether j <= i.
        mask_BT: False for padding.

    Returns:
        [G] in nats; no gradient.
    """
    query, key = attention.q_BATH.detach(), attention.k_BATH.detach()
    dtype = router_dtype(query.dtype)
    scale = query.shape[-1] ** -0.5
    features = Features(query.to(dtype), key.to(dtype), scale)
    if mask_BT is not None:
        features = without_padding(features, mask_BT)
    entropy_BAM = row_entropies(*features, causal)
    return measured_mean(entropy_BAM.transpose(1, 2), mask_BT)
