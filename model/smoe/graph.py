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

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.attention import AttentionTrace
from model.cache import LayerCache
from model.initialization import ZEROS, Initializer
from model.interface import FeedForwardContext
from model.smoe.config import SparseMoEConfig
from model.smoe.features import Features
from model.smoe.measures import head_entropies
from model.smoe.mixture import mix
from model.smoe.posterior import posterior_features

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

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.causal = context.causal and config.causal_graph

    def initializers(self) -> dict[str, Initializer]:
        """Says how each buffer starts; see `model/initialization.py`."""
        return {}

    def attention_head(self) -> Tensor | None:
        """See `FeedForward.attention_head`."""
        return None

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
            attention: What the block's attention did, if `attention_head` names one.
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
        return Features(u_BTD, None, 1 / self.config.tau, self.config.similarity == "cosine")

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

    def attention_head(self) -> Tensor:
        """See `FeedForward.attention_head`."""
        return self.head_entropy.argmin(keepdim=True)

    def features(self, attention: AttentionTrace) -> Features:
        """What makes S.

        Args:
            attention: What attention did.

        Returns:
            Features.
        """
        return posterior_features(
            attention, self.attention_head(), self.num_heads, self.config.sigma
        )

    def forward(
        self,
        scores_BTE: Tensor,
        u_BTD: Tensor,
        attention: AttentionTrace | None = None,
        cache: LayerCache | None = None,
    ) -> Mixed:
        """See `Graph.forward`."""
        assert attention is not None
        features = self.features(attention)
        mixed_BTE, neighbours = mix(features, scores_BTE, self.config, self.causal, cache)
        entropy_A = None if cache is not None else head_entropies(attention, self.context.causal)
        return Mixed(mixed_BTE, neighbours, entropy_A)


GRAPHS: dict[str, Callable[[SparseMoEConfig, FeedForwardContext], Graph]] = {
    "none": NoGraph,
    "similarity": SimilarityGraph,
    "attention": AttentionGraph,
}
