"""Graphs of tokens: each token's scores become a mixture of the scores of tokens like it.

    p_i = sum_j S_ij r_j

S is a softmax of inner products of per-token features, so p is one call of fused attention, or on a
CPU goes by blocks of rows (`mixing.py`), and S never exists: a graph only says which features.
Source: Nguyen et al. 2025, "Improving routing in sparse mixture of experts with graph of tokens".
The paper names no mask; in a language model S has to be causal, or the experts of a token depend on
the tokens that it is about to predict.

A new graph is a class here, a line of `GRAPHS` and a name in the config's `GraphName`.

Shapes: B batch, T tokens in a sequence, D width, E experts, A heads, H width of one head, G heads
that the graph chooses from (A, or a process's part of them), F width of the features, R rows that
measures are taken at.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from model.attention import AttentionTrace
from model.cache import LayerCache, attend_cached
from model.entropy import entropy
from model.initialization import ZEROS, Initializer
from model.interface import FeedForwardContext
from model.smoe.config import SparseMoEConfig
from model.smoe.mixing import ROWS_AT_ONCE, mix_on_host
from model.smoe.scores import wide

MEASURED_ROWS = 32
"""Query rows of a sequence that entropies are measured at: exact there, a sample of all."""
ENTROPY_MOMENTUM = 0.99
"""Of the running mean of head entropies, a step."""


class Features(NamedTuple):
    """S_ij is the softmax over j of scale * query_i . key_j."""

    query_BTF: Tensor
    key_BTF: Tensor
    scale: float = 1.0


class Mixed(NamedTuple):
    """What a graph makes of scores."""

    scores_BTE: Tensor
    """p, each row summing to 1: what top-K sees."""
    effective_neighbours: Tensor | None
    """The mean of exp(entropy of S_i) over sampled rows; None without a graph, and in
    generation."""
    head_entropy_A: Tensor | None
    """The mean entropy of each head's attention over sampled rows, in nats; None unless the graph
    chooses a head by it."""


class Graph(nn.Module, ABC):
    """The interface of a graph.

    Args:
        config: Of the layer.
        context: What the model says.
    """

    needs_attention = False
    """Whether `forward` is to be told what the block's attention did."""

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.causal = context.causal and config.causal_graph

    def initializers(self) -> dict[str, Initializer]:
        """Says how each buffer starts; see `model/initialization.py`."""
        return {}

    @abstractmethod
    def forward(
        self,
        scores_BTE: Tensor,
        u_BTD: Tensor,
        attention: AttentionTrace | None = None,
        cache: LayerCache | None = None,
    ) -> Mixed:
        """Mixes scores.

        Args:
            scores_BTE: r, each row summing to 1.
            u_BTD: The tokens as the experts see them.
            attention: What the block's attention did, if `needs_attention`.
            cache: In generation: features and scores of earlier tokens, to which these are added.

        Returns:
            The mixture, and measures of it.
        """

    @torch.no_grad()
    def update(self, head_entropy_A: Tensor | None) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            head_entropy_A: As `Mixed` has it, averaged over the whole step.
        """


class NoGraph(Graph):
    """Each token for itself: S is the identity."""

    def forward(
        self,
        scores_BTE: Tensor,
        u_BTD: Tensor,
        attention: AttentionTrace | None = None,
        cache: LayerCache | None = None,
    ) -> Mixed:
        """See `Graph.forward`."""
        return Mixed(scores_BTE, None, None)


class SimilarityGraph(Graph):
    """S_i = softmax_j(u_i . u_j / tau), or with the cosine in place of the dot product."""

    def features(self, u_BTD: Tensor) -> Features:
        """The token itself, as query and as key.

        Args:
            u_BTD: Tokens.

        Returns:
            Features, F = D.
        """
        key_BTF = u_BTD.to(wide(u_BTD.dtype))
        if self.config.similarity == "cosine":
            key_BTF = normalize(key_BTF, dim=-1)
        # The temperature apart: one tensor for both, or two were kept for the backward pass.
        return Features(key_BTF, key_BTF, 1 / self.config.tau)

    def forward(
        self,
        scores_BTE: Tensor,
        u_BTD: Tensor,
        attention: AttentionTrace | None = None,
        cache: LayerCache | None = None,
    ) -> Mixed:
        """See `Graph.forward`."""
        features = self.features(u_BTD)
        mixed_BTE, neighbours = mix(features, scores_BTE, self.config, self.causal, cache)
        return Mixed(mixed_BTE, neighbours, None)


class AttentionGraph(Graph):
    """The posterior over the token that one head attended to, given the attention's output.

        S_ij  proportional to  A_h[i, j] * exp(-|o_i - m_j|^2 / (2 sigma^2)),   m_j = A v_j,h W_O,h

    |o_i|^2 cancels in the softmax and o_i . m_j = A (W_O,h o_i) . v_j,h, which makes the exponent
    an inner product of 2 H + 1 features. The head is the one whose attention has the least entropy,
    by a running mean: a batch's own entropies would depend on the tokens to be predicted.
    """

    needs_attention = True
    head_entropy: Tensor

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(config, context)
        assert context.num_heads is not None
        self.num_heads = context.num_heads
        # From zero, every head's mean is short by the same factor: their order is right at once.
        self.register_buffer("head_entropy", torch.empty(context.num_heads))

    def initializers(self) -> dict[str, Initializer]:
        """All heads alike: the first is taken until something is known."""
        return {"head_entropy": ZEROS}

    @torch.no_grad()
    def update(self, head_entropy_A: Tensor | None) -> None:
        """See `Graph.update`."""
        if head_entropy_A is not None:
            self.head_entropy.lerp_(
                head_entropy_A.to(self.head_entropy.dtype), 1 - ENTROPY_MOMENTUM
            )

    def features(self, attention: AttentionTrace, head: Tensor) -> Features:
        """What makes S of one head.

        Args:
            attention: What attention did.
            head: [1], the head's index among those of the trace.

        Returns:
            Features, F = 2 H + 1.
        """
        q_BATH, k_BATH, v_BATH, output_BTD, weight_DM = attention
        dtype = wide(q_BATH.dtype)
        q_BTH, k_BTH, v_BTH = (
            x.index_select(1, head).squeeze(1).to(dtype) for x in (q_BATH, k_BATH, v_BATH)
        )
        size = q_BTH.shape[-1]
        weight_DH = weight_DM.view(weight_DM.shape[0], -1, size).index_select(1, head).squeeze(1)
        scaled_DH = self.num_heads * weight_DH.to(dtype)  # m_j = scaled_DH v_j
        variance = self.config.sigma**2
        query_BTF = torch.cat(
            [
                q_BTH / math.sqrt(size),
                output_BTD.to(dtype) @ scaled_DH / variance,
                torch.ones_like(q_BTH[..., :1]),
            ],
            -1,
        )
        square_BT1 = ((v_BTH @ (scaled_DH.T @ scaled_DH)) * v_BTH).sum(-1, keepdim=True)
        return Features(query_BTF, torch.cat([k_BTH, v_BTH, square_BT1 / (-2 * variance)], -1))

    def forward(
        self,
        scores_BTE: Tensor,
        u_BTD: Tensor,
        attention: AttentionTrace | None = None,
        cache: LayerCache | None = None,
    ) -> Mixed:
        """See `Graph.forward`."""
        assert attention is not None
        head = self.head_entropy.argmin(keepdim=True)
        features = self.features(attention, head)
        mixed_BTE, neighbours = mix(features, scores_BTE, self.config, self.causal, cache)
        entropy_A = None if cache is not None else head_entropies(attention, self.context.causal)
        return Mixed(mixed_BTE, neighbours, entropy_A)


GRAPHS: dict[str, Callable[[SparseMoEConfig, FeedForwardContext], Graph]] = {
    "none": NoGraph,
    "similarity": SimilarityGraph,
    "attention": AttentionGraph,
}


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
    if config.lower_entropy_only:
        return _mix_lower_entropy(features, scores_BTE, causal or cache is not None, cache)
    if cache is None and goes_by_blocks(scores_BTE):
        mixed_BTE = mix_on_host(*features, value_BTE=scores_BTE, causal=causal)
        return mixed_BTE, effective_neighbours(features, causal)
    width, experts = features.key_BTF.shape[-1], scores_BTE.shape[-1]
    # One width for keys and values, and a multiple of 8: what fused kernels take.
    padded = -(-max(width, experts) // 8) * 8
    query, key, value = (
        pad(x, (0, padded - x.shape[-1])).unsqueeze(1) for x in (*features[:2], scores_BTE)
    )
    if cache is not None:
        mixed = attend_cached(query, key, value, cache, scale=features.scale)
    else:
        mixed = scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=features.scale
        )
    neighbours = effective_neighbours(features, causal) if cache is None else None
    return mixed[:, 0, :, :experts], neighbours


def goes_by_blocks(scores_BTE: Tensor) -> bool:
    """Whether plain products by blocks of rows are faster here than fused attention."""
    return scores_BTE.device.type == "cpu"


def _mix_lower_entropy(
    features: Features, scores_BTE: Tensor, causal: bool, cache: LayerCache | None
) -> tuple[Tensor, Tensor | None]:
    """As `mix`, over the tokens j whose scores have no more entropy than those of i.

    The mask depends on the data, so this goes by blocks of query rows; the backward pass computes
    each block again and nothing of size T x T is kept.
    """
    query_BTF, key_BSF, value_BSE = features.query_BTF, features.key_BTF, scores_BTE
    query_BTF = query_BTF * features.scale
    start = 0
    if cache is not None:
        start = cache.length
        padded = max(key_BSF.shape[-1], value_BSE.shape[-1])
        keys, values = cache.append(
            *(pad(x, (0, padded - x.shape[-1])).unsqueeze(1) for x in (key_BSF, value_BSE))
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
    logits = scale * query.index_select(-2, rows_R) @ key.transpose(-1, -2)
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
    dtype = wide(attention.q_BATH.dtype)
    query, key = (x.detach().to(dtype) for x in (attention.q_BATH, attention.k_BATH))
    return _row_entropies(query, key, query.shape[-1] ** -0.5, causal).mean((0, 2))
