"""Graphs of tokens: each token's scores become a mixture of those of similar tokens.

    p_i = sum_j S_ij r_j        S_ij = softmax_j(scale q_i . k_j)

A graph defines the features q and k of S. For many tokens fused attention mixes, without storing S.
Source: Nguyen et al. 2025, "Improving routing in sparse mixture of experts with graph of tokens".
The paper mentions no mask; in a language model S must be causal, or the experts of a token depend
on the tokens to be predicted.

To add a graph, write a class here and add a line to `GRAPHS`, also in a plugin.

Shapes: B batch, T routed tokens, S tokens seen in all (T except in generation), D width, E experts,
A heads, H width of one head, G heads that the graph chooses from (A, or this rank's part of them),
F width of the features, M measured rows.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad, scaled_dot_product_attention

from polyad.model.attention import AttentionTrace
from polyad.model.feedforward import NOTHING_ELSE, BlockInput, FeedForwardContext, refuse_autocast
from polyad.model.initialization import ONES, ZEROS, Initializer
from polyad.model.layers import RealTokens
from polyad.model.output import NO_TENSORS, StatisticsModule, entropy
from polyad.model.smoe.config import GRAPHS, SparseMoEConfig

ENTROPY_MOMENTUM = 0.99
"""Momentum of the running mean of head entropies, per step."""
MEASURED_ROWS = 32
"""Number of query rows per sequence for which entropies are measured: a sample of all rows."""


def router_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the precision of routing: fp32, or the model's if higher."""
    return torch.promote_types(dtype, torch.float32)


class MeasuredRows(NamedTuple):
    """Rows spread evenly over each sequence, including its last: a sample of all rows."""

    rows: Tensor
    """[1, M], M = min(T, MEASURED_ROWS), or [B, M] if sequences have padding."""
    weights_BM: Tensor | None = None
    """The share of the real tokens that each row represents; None if all are equal."""

    def mean(self, values: Tensor) -> Tensor:
        """Returns the mean over the rows of all sequences: of [B, M] a scalar, of [B, G, M] [G]."""
        if self.weights_BM is None:
            return values.mean((0, -1))
        weights = self.weights_BM.view(len(values), *(1,) * (values.dim() - 2), -1)
        return (values * weights.to(values.dtype)).sum((0, -1))


def _measured_rows(
    length: int, device: torch.device, real: RealTokens | None = None
) -> MeasuredRows:
    if real is None:
        count = min(length, MEASURED_ROWS)
        part_1M = torch.arange(1, count + 1, device=device).unsqueeze(0)
        return MeasuredRows((part_1M * length).div(count, rounding_mode="floor") - 1)
    # The rows that each sequence would have without padding; of M, only the first `count` are used.
    length_B1 = real.mask_BT.sum(1, keepdim=True)
    count_B1 = length_B1.clamp(max=MEASURED_ROWS)
    part_M = torch.arange(1, MEASURED_ROWS + 1, device=device)
    rows_BM = (part_M * length_B1).div(count_B1, rounding_mode="floor") - 1
    each_B1 = length_B1 / count_B1 / length_B1.sum()
    weights_BM = torch.where(part_M <= count_B1, each_B1, 0)
    return MeasuredRows(rows_BM.clamp(max=length - 1), weights_BM)


class Features(NamedTuple):
    """The factors of S: each row is the softmax over j of scale * query_i . key_j."""

    query_BTF: Tensor
    """Queries of the last T tokens; in routing's precision, like the keys."""
    key_BSF: Tensor
    """Keys of all tokens. There may be any dimensions between B and T or S."""
    scale: float = 1.0
    causal: bool = True
    """Whether a token only sees itself and earlier tokens."""
    seen_BS: Tensor | None = None
    """False for tokens that no token sees, if not causal; None: there are none."""

    def mix(self, value_BSE: Tensor) -> Tensor:
        """Computes the mixture p = S r, for many tokens by fused attention, without storing S.

        Args:
            value_BSE: r, of the same dtype.

        Returns:
            p [B, T, E].
        """
        query_BTF, key_BSF, scale, causal, seen_BS = self
        experts, (new, length) = value_BSE.shape[-1], (query_BTF.shape[1], key_BSF.shape[1])
        # Fused kernels need one width for keys and values, a multiple of 8.
        width = -(-max(query_BTF.shape[-1], experts) // 8) * 8
        if length <= 2 * width:  # S is no larger than the padded scores and mixture
            return self.matrix() @ value_BSE
        query, key, value = (
            (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))).unsqueeze(1)
            for x in (query_BTF, key_BSF, value_BSE)
        )
        mask = None if seen_BS is None else seen_BS[:, None, None, :]
        if causal and 1 < new < length:  # in generation; one new token sees all others
            mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril(length - new)
        is_causal = causal and new == length
        mixed = scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale
        )
        return mixed[:, 0, :, :experts]

    def matrix(self, rows: Tensor | None = None) -> Tensor:
        """Computes the matrix S, or some of its rows.

        Args:
            rows: Indices of the T rows, [B, M], with as many dimensions as the features before T; B
                may be 1. None for all.

        Returns:
            [B, M, S], each row summing to 1.
        """
        query_BTF, key_BSF, scale, causal, seen_BS = self
        new, length = query_BTF.shape[-2], key_BSF.shape[-2]
        token_S = torch.arange(length, device=query_BTF.device)
        token_M = token_S[length - new :]
        if rows is not None:
            token_M = token_M[rows]
            query_BTF = query_BTF.take_along_dim(rows.unsqueeze(-1), -2)
        exponents_BMS = scale * (query_BTF @ key_BSF.mT)
        if causal:
            exponents_BMS = exponents_BMS.masked_fill(token_S > token_M[..., None], -torch.inf)
        if seen_BS is not None:
            unseen_BS = ~seen_BS.view(len(seen_BS), *(1,) * (query_BTF.dim() - 2), length)
            exponents_BMS = exponents_BMS.masked_fill(unseen_BS, -torch.inf)
        return exponents_BMS.softmax(-1)

    def row_entropies(self, measured: MeasuredRows) -> Tensor:
        """Computes the entropies of measured rows of S, [..., M], without gradient."""
        rows = measured.rows
        if self.query_BTF.dim() > 3:
            rows = rows.unsqueeze(1)  # the same rows for every head
        with torch.no_grad():  # a compiler cannot trace a decorated method of a tuple
            return entropy(self.matrix(rows))


class Mixed(NamedTuple):
    """The output of a graph."""

    scores_BTE: Tensor
    """p, each row summing to 1: the scores for top-K selection."""
    measures: dict[str, Tensor] = NO_TENSORS
    """By name, as in `RoutingStats`:

    effective_neighbours    mean of exp(entropy of S_i) over measured rows: 1 if each token uses
                            only itself; not in generation, or when no record is due
    head_entropy_A          mean entropy of each head's attention over measured rows, in nats, if
                            the graph chooses a head by it
    attention_head          index of the head that defines S, if one does
    """


class Graph(StatisticsModule):
    """The interface of a graph, and no mixing: S is the identity."""

    def attention_head(self) -> Tensor | None:
        """See `FeedForward.attention_head`."""
        return None

    def forward(self, scores_BTE: Tensor, u_BTD: Tensor, given: BlockInput = NOTHING_ELSE) -> Mixed:
        """Mixes scores.

        Args:
            scores_BTE: r, each row summing to 1.
            u_BTD: The input of the experts.
            given: The trace of the block's attention, if `attention_head` names a head; in
                generation a cache of earlier tokens' features and scores, to which these are added;
                and the real tokens, since padding is neither mixed in nor measured.

        Returns:
            The mixture and its statistics.
        """
        return Mixed(scores_BTE)

    def update(self, measures: Mapping[str, Tensor]) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            measures: Those of `Mixed`, averaged over the whole step, among others.
        """


class MixingGraph(Graph):
    """The base class of graphs that mix.

    Args:
        config: The layer's configuration.
        context: Settings of the model.
    """

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__()
        self.config, self.context = config, context

    def mix(self, features: Features, scores_BTE: Tensor, given: BlockInput) -> Mixed:
        """Computes p = S r.

        Args:
            features: The features that define S.
            scores_BTE: r.
            given: See `forward`; with a cache S is always causal.

        Returns:
            p [B, T, E], and the effective neighbours.
        """
        query_BTF, key_BSF, scale, *_ = features
        refuse_autocast(query_BTF, "a graph of tokens")
        cache, real, value_BSE = given.cache, given.real, scores_BTE
        if cache is not None:
            both = cache.feed_forward.append(key_BSF.unsqueeze(1), scores_BTE.unsqueeze(1))
            key_BSF, value_BSE = (x.squeeze(1) for x in both)
        causal = self.context.causal or cache is not None
        features = Features(query_BTF, key_BSF, scale, causal, _seen(real, causal))
        mixed_BTE = features.mix(value_BSE)
        if cache is not None or not self.measures:
            return Mixed(mixed_BTE)
        measured = _measured_rows(features.query_BTF.shape[-2], scores_BTE.device, real)
        neighbours = measured.mean(features.row_entropies(measured).exp())
        return Mixed(mixed_BTE, {"effective_neighbours": neighbours})


def _seen(real: RealTokens | None, causal: bool) -> Tensor | None:
    """Returns which tokens may be seen at all, [B, S]; None for all. A causal mask hides padding,
    which comes last, by itself."""
    return None if real is None or causal else real.mask_BT


def head_entropies(
    attention: AttentionTrace, causal: bool, real: RealTokens | None = None
) -> Tensor:
    """Computes the mean entropy of each head's attention over measured rows.

    Args:
        attention: The attention trace.
        causal: Whether only j <= i is attended to.
        real: The tokens that are not padding; None for all.

    Returns:
        [G] in nats; no gradient.
    """
    query, key, _ = attention.qkv_BT3AH.detach().transpose(1, 3).unbind(2)
    dtype = router_dtype(query.dtype)
    measured = _measured_rows(query.shape[-2], query.device, real)
    scale, seen_BS = query.shape[-1] ** -0.5, _seen(real, causal)
    features = Features(query.to(dtype), key.to(dtype), scale, causal, seen_BS)
    return measured.mean(features.row_entropies(measured))


class SimilarityGraph(MixingGraph):
    """S_i = softmax_j(u_i . u_j / tau), or with the cosine instead of the dot product."""

    def forward(self, scores_BTE: Tensor, u_BTD: Tensor, given: BlockInput = NOTHING_ELSE) -> Mixed:
        """See `Graph.forward`."""
        u_BTD = u_BTD.to(router_dtype(u_BTD.dtype))
        if self.config.similarity == "cosine":
            u_BTD = normalize(u_BTD, dim=-1)
        features = Features(u_BTD, u_BTD, 1 / self.config.tau)
        return self.mix(features, scores_BTE, given)


class AttentionGraph(MixingGraph):
    """The posterior over the token that one head attended to, given the attention's output.

        S_ij  proportional to  A_h[i, j] * exp(-|o_i - m_j|^2 / (2 sigma^2)),   m_j = A v_j,h W_O,h

    |o_i|^2 cancels in the softmax and o_i . m_j = A (W_O,h o_i) . v_j,h, so the exponent is an
    inner product of 2 H + 1 features:

        q_i . k_j / sqrt(H) + (A W_O,h o_i / sigma^2) . v_j + 1 . (-|m_j|^2 / (2 sigma^2))

    The factor A is needed because the paper writes attention as a mean over heads; without it
    (`head_mean: false`) m_j is the head's contribution to the sum over heads.

    The head is a fixed one, or the one whose attention has the lowest entropy by a running mean:
    the entropies of the current batch would depend on the tokens to be predicted.
    """

    head_entropy: Tensor

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(config, context)
        assert context.num_heads is not None
        self.num_heads = context.num_heads
        self.factor = context.num_heads if config.head_mean else 1
        self.chooses = config.fixed_head is None
        # A fixed head comes from the configuration, not a checkpoint.
        head_entropy = torch.empty(context.num_heads)
        self.register_buffer("head_entropy", head_entropy, persistent=self.chooses)

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer: zero, so the first head is chosen until there are statistics; or
        zero for a fixed head and one for the others, which stay so.

        All heads' means start too small by the same factor, so their order is right.
        """
        fixed = self.config.fixed_head
        return {"head_entropy": ZEROS if fixed is None else ONES.without_row(fixed)}

    @torch.no_grad()
    def update(self, measures: Mapping[str, Tensor]) -> None:
        """See `Graph.update`; updates the running mean of the entropies."""
        if (entropy_A := measures.get("head_entropy_A")) is not None:
            self.head_entropy.lerp_(entropy_A.to(self.head_entropy.dtype), 1 - ENTROPY_MOMENTUM)

    def chosen_head(self) -> Tensor:
        """Returns [1], the index among all heads of the model of the head that defines S."""
        return self.head_entropy.argmin(keepdim=True)

    def attention_head(self) -> Tensor:
        """See `FeedForward.attention_head`."""
        return self.chosen_head()

    def features(self, attention: AttentionTrace) -> Features:
        """Computes the features of S.

        Args:
            attention: The attention trace.

        Returns:
            Features, F = 2 H + 1.
        """
        factor, variance = self.factor, self.config.sigma**2
        dtype = router_dtype(attention.of_head_BT3H.dtype)
        q_BTH, k_BTH, v_BTH = attention.of_head_BT3H.to(dtype).unbind(2)
        width, size = len(attention.output_weight_DM), q_BTH.shape[-1]
        weight_DAH = attention.output_weight_DM.view(width, -1, size)
        weight_DH = weight_DAH.index_select(1, self.attention_head()).squeeze(1).to(dtype)
        along_BTH = attention.output_BTD.to(dtype) @ weight_DH
        if attention.output_bias_D is not None:  # o must exclude it
            along_BTH = along_BTH - attention.output_bias_D.to(dtype) @ weight_DH
        # |W v|^2 = v (W^T W) v avoids a product of the model's width for each token.
        square_BT1 = ((v_BTH @ (weight_DH.T @ weight_DH)) * v_BTH).sum(-1, keepdim=True)
        query = (q_BTH / size**0.5, along_BTH * (factor / variance), torch.ones_like(square_BT1))
        key = (k_BTH, v_BTH, square_BT1 * (-(factor**2) / (2 * variance)))
        return Features(torch.cat(query, -1), torch.cat(key, -1))

    def forward(self, scores_BTE: Tensor, u_BTD: Tensor, given: BlockInput = NOTHING_ELSE) -> Mixed:
        """See `Graph.forward`."""
        attention = given.attention
        assert attention is not None
        measures = {"attention_head": self.chosen_head().squeeze(0)}
        if self.chooses and given.cache is None:
            entropy_A = head_entropies(attention, self.context.causal, given.real)
            measures["head_entropy_A"] = entropy_A
        mixed = self.mix(self.features(attention), scores_BTE, given)
        return mixed._replace(measures=mixed.measures | measures)


GRAPHS |= {
    "none": lambda config, context: Graph(),
    "similarity": SimilarityGraph,
    "attention": AttentionGraph,
}
