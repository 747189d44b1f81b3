"""What a graph's S is made of, and what S looks like: its entropies at some of its rows.

Shapes: B batch, T tokens in a sequence, F width of the features, A heads, H width of one head, R
rows that are looked at.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.attention import AttentionTrace
from model.entropy import entropy
from model.smoe.scores import wide

MEASURED_ROWS = 32
"""Query rows of a sequence that entropies are measured at: exact there, a sample of all."""


class Features(NamedTuple):
    """S_ij is the softmax over j of scale * query_i . key_j."""

    query_BTF: Tensor
    key_BTF: Tensor
    scale: float = 1.0


def _measured_rows(length: int, device: torch.device) -> Tensor:
    """Rows spread evenly over a sequence, the last one among them."""
    count = min(length, MEASURED_ROWS)
    return (torch.arange(1, count + 1, device=device) * length).div(
        count, rounding_mode="floor"
    ) - 1


@torch.no_grad()
def _row_entropies(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    """Entropies of the rows softmax(scale * query . key) at the measured rows; [..., T, F] ->
    [..., R].
    """
    length = query.shape[-2]
    rows_R = _measured_rows(length, query.device)
    dtype = wide(query.dtype)
    rows = scale * query.index_select(-2, rows_R).to(dtype)
    logits = rows @ key.to(dtype).transpose(-1, -2)
    if causal:
        seen_RT = torch.arange(length, device=query.device) <= rows_R[:, None]
        logits = logits.masked_fill(~seen_RT, -torch.inf)
    return entropy(logits.softmax(-1))


def effective_neighbours(features: Features, causal: bool) -> Tensor:
    """The mean of exp(entropy of S_i) over sampled rows: 1 where each token has itself alone.

    Args:
        features: That S is made of.
        causal: Whether j <= i.

    Returns:
        No dimensions; no gradient.
    """
    return _row_entropies(*features, causal).exp().mean()


def head_entropies(attention: AttentionTrace, causal: bool) -> Tensor:
    """The mean entropy of each head's attention over sampled rows.

    Args:
        attention: What attention did.
        causal: Whether j <= i.

    Returns:
        [G] in nats; no gradient.
    """
    query, key = attention.q_BATH, attention.k_BATH
    return _row_entropies(query, key, query.shape[-1] ** -0.5, causal).mean((0, 2))
