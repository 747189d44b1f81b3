"""What S and attention look like: entropies at some of their rows.

Shapes: B batch, T tokens in a sequence, F width of the features, A heads, H width of one head, M
rows that are measured.
"""

import torch
from torch import Tensor

from model.attention import AttentionTrace
from model.entropy import entropy
from model.smoe.features import measured_rows
from model.smoe.scores import wide


@torch.no_grad()
def _row_entropies(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    """Entropies of the rows softmax(scale * query . key) at the measured rows; [..., T, F] ->
    [..., M].
    """
    length = query.shape[-2]
    rows_M = measured_rows(length, query.device)
    dtype = wide(query.dtype)
    rows = scale * query.index_select(-2, rows_M).to(dtype)
    logits = rows @ key.to(dtype).transpose(-1, -2)
    if causal:
        seen_MT = torch.arange(length, device=query.device) <= rows_M[:, None]
        logits = logits.masked_fill(~seen_MT, -torch.inf)
    return entropy(logits.softmax(-1))


def effective_neighbours(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    """The mean of exp(entropy of S_i) over sampled rows: 1 where each token has itself alone.

    Args:
        query: Features that S is made of, [..., T, F].
        key: The same.
        scale: Of their inner products.
        causal: Whether j <= i.

    Returns:
        No dimensions; no gradient.
    """
    return _row_entropies(query, key, scale, causal).exp().mean()


@torch.no_grad()
def head_entropies(attention: AttentionTrace, causal: bool) -> Tensor:
    """The mean entropy of each head's attention over sampled rows.

    Args:
        attention: What attention did.
        causal: Whether j <= i.

    Returns:
        [G] in nats; no gradient.
    """
    query, key = attention.q_BATH, attention.k_BATH
    scale = query.shape[-1] ** -0.5
    return _row_entropies(query, key, scale, causal).mean((0, 2))
