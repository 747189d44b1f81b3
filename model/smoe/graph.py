"""Graphs of tokens: each token's scores become a mixture of the scores of tokens like it.

    p_i = sum_j S_ij r_j

S is a softmax of inner products of per-token features, so p is made without it (`mixture.py`),
and S never exists: a graph only says which features.
Source: Nguyen et al. 2025, "Improving routing in sparse mixture of experts with graph of tokens".
The paper names no mask; in a language model S has to be causal, or the experts of a token depend on
the tokens that it is about to predict.

A new graph is a class here, a line of `GRAPHS` and a name in the config's `GraphName`.

Shapes: B batch, T tokens in a sequence, D width, E experts, A heads, H width of one head, G heads
that the graph chooses from (A, or a process's part of them), F width of the features.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from model.attention import AttentionTrace
from model.cache import LayerCache
from model.initialization import ZEROS, Initializer
from model.interface import FeedForwardContext
from model.smoe.config import SparseMoEConfig
from model.smoe.features import Features, head_entropies
from model.smoe.mixture import mix
from model.smoe.scores import wide

ENTROPY_MOMENTUM = 0.99
"""Of the running mean of head entropies, a step."""


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
