"""The output of a model: logits, and the routing statistics of every routed feed-forward.

Both types are NamedTuples, because those pass through the DeepSpeed engine, activation
recomputation and `torch.compile` unchanged. Statistics are returned and never stored on a module: a
stored one counts twice when a block is recomputed. Training says to the modules that return them
which losses get a gradient, and whether single samples are of interest.

Shapes: B batch or samples, T tokens in a sequence or a sample, V vocabulary, E experts (of a muMoE:
of all levels, side by side), A heads, S experts of all levels, L levels, D width, N channels of all
BatchNorms of a mixture, or tokens that are real (B T without padding).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.padding import RealTokens, pack


class RoutingStats(NamedTuple):
    """The statistics of one routed feed-forward over one forward pass."""

    name: str
    """The name of the module in the model, as in parameter names. A feed-forward leaves it empty,
    and the model fills it in: see `run_blocks`."""
    load_E: Tensor
    """Share of the assignments that each expert received; sums to 1. In a muMoE the mean over
    tokens of each coefficient; every level sums to 1. In a transcoder or a mixture of decoders the
    share of the top_k assignments per token, and it sums to the part of them whose weight is above
    0."""
    entropy: Tensor | None = None
    """Mean over tokens of the entropy of the scores that experts are chosen by, in nats. In a
    muMoE that of the leaves' coefficients, products over levels, whose entropy is the levels' sum.
    No dimensions, as all that follow unless a suffix says them. None in training where no record
    is due, as all that records alone have."""
    usage_E: Tensor | None = None
    """Mean over tokens of the scores that experts are chosen by; None: `load_E`. With a gradient
    where a loss over all layers asks for it."""
    balance_loss: Tensor | None = None
    """E sum_e f_e P_e: 1 at even load. Losses have a gradient where training asks for it, and those
    of sparse routing are None in evaluation."""
    z_loss: Tensor | None = None
    """Mean of the squared logsumexp of the router's logits."""
    importance_loss: Tensor | None = None
    """Squared coefficient of variation of the scores' sum over tokens, of each token's own scores
    without noise and before a graph: 0 if it is even."""
    load_loss: Tensor | None = None
    """Squared coefficient of variation of the load to be expected under the router's noise; None
    without noise."""
    variance_loss: Tensor | None = None
    """Minus the variance over tokens of each expert's weight after top-K, summed over experts."""
    orthogonality_loss: Tensor | None = None
    """Mean over tokens of the squared projections of their experts' outputs on one another; of 256
    tokens if it is for a record alone. None with one expert a token, and where outputs are never
    apart (emoe's `experts: masked`)."""
    coupling_EE: Tensor | None = None
    """The norm of what the first layer of expert j makes of the linear score's row of expert i, in
    training: the loop makes `erc_loss` of it. With its gradient where that loss has a coefficient;
    the rows are then moved at random. For a record alone None with more than 64 experts."""
    erc_loss: Tensor | None = None
    """The coupling of rows with other experts, which the loop puts in the place of
    `coupling_EE`."""
    sequence_loss: Tensor | None = None
    """Mean over sequences of sum_e f_e P_e within each: 1 at even load; None unless training asks
    for it."""
    dropped: Tensor | None = None
    """Share of the assignments that were dropped."""
    expected_active: Tensor | None = None
    """Sparsity score: the mean over tokens and their experts of the share of inner units that it
    expects to be above 0; None of other scores."""
    effective_neighbours: Tensor | None = None
    """Mean of exp(entropy) of a token's weights in a graph; None without one, or while it is
    off."""
    head_entropy_A: Tensor | None = None
    """Mean entropy of each head's attention, in nats; None unless a graph asks for it."""
    attention_head: Tensor | None = None
    """The number of the head that a graph of attention is made of; None as
    `effective_neighbours`."""
    effective_experts: Tensor | None = None
    """muMoE: the mean over tokens of exp(entropy of its leaves' coefficients), 1 to all leaves."""
    active: Tensor | None = None
    """Transcoder and mixture of decoders: the mean over tokens of the number of experts whose
    weight is above 0, 0 to top_k."""
    dominated: Tensor | None = None
    """muMoE: the share of the tokens that give one leaf a coefficient of at least 0.5."""
    dominant_E: Tensor | None = None
    """muMoE: load at a >= 0.5, the share of the tokens that give this expert at least 0.5."""
    level_entropy_L: Tensor | None = None
    """muMoE with several levels: the part of each in `entropy`."""
    levels: tuple[int, ...] = ()
    """muMoE: how many experts of each level stand side by side; empty for other kinds."""
    score_mean_S: Tensor | None = None
    """Mean over tokens of each expert's score, all levels of a muMoE side by side; None unless its
    gate has a BatchNorm."""
    score_square_S: Tensor | None = None
    """Mean over tokens of each expert's squared score; None as `score_mean_S`."""
    norm_mean_N: Tensor | None = None
    """Mixture of networks with BatchNorm, in training: the mean of each channel that one of them
    reads, the networks side by side; for the update of the running statistics alone."""
    norm_square_N: Tensor | None = None
    """Mean of the squares; None as `norm_mean_N`."""
    expert_input_ED: Tensor | None = None
    """A score that follows what experts compute, in training: the mean over all assignments of the
    token, 0 for those to another expert; for the update of its buffer alone."""
    sample_scores_BS: Tensor | None = None
    """The mean over each sample's tokens of each expert's score, without noise and before a
    graph, with its gradient; None unless a loss over pairs of samples asks for it."""
    sample_inputs_BD: Tensor | None = None
    """The mean over each sample's tokens of what the router reads; None as
    `sample_scores_BS`."""
    similarity_loss: Tensor | None = None
    """The loss of sample similarity, which the loop puts in the place of both, with its
    gradient."""
    distill_loss: Tensor | None = None
    """The loss of a feed-forward that learns from the one that it replaces, with its gradient;
    see `polyad.train.tasks.block_teacher`."""
    distill_error: Tensor | None = None
    """Mean over tokens of the squared norm of what its output and the original's differ by."""
    distill_square: Tensor | None = None
    """Mean over tokens of the squared norm of the original's output."""
    tokens: Tensor | None = None
    """How many tokens all this is of, without padding; None: as many in every micro-batch."""

    def but(self, **changes: Any) -> "RoutingStats":
        """The same with some fields changed.

        As `_replace`, whose result compilers before PyTorch 2.13 cannot give back from a graph.

        Args:
            changes: Fields by their names.
        """
        return RoutingStats(**(self._asdict() | changes))


class ModelOutput(NamedTuple):
    """What `forward` of every model returns."""

    logits: Tensor
    """[B, T, V] in a language model; where it was given targets, their mean loss instead, or
    without gradients the loss of each [B, T]. A decoder that is `taught` gives 0 in training."""
    routing: tuple[RoutingStats, ...]
    """One entry per routed feed-forward, in the order of the blocks; empty in a dense model."""


AUXILIARY_LOSSES = frozenset(
    {"balance_loss", "z_loss", "importance_loss", "load_loss", "variance_loss"}
)
"""Losses of `RoutingStats` that every router computes in training: `loss.*` may add them. What else
training can ask for is `orthogonality_loss` and `coupling_EE`, which sparse layers compute,
`usage_E` with a gradient, and `sequence_loss`."""


class StatisticsModule(nn.Module):
    """The base of modules that return statistics of routing."""

    learns_from: frozenset[str] = AUXILIARY_LOSSES
    """Losses that get a gradient; others have a value alone. See `ask_for_statistics`."""
    gives_samples: bool = False
    """Whether it returns numbers of single samples while it trains; see `ask_for_statistics`."""
    record_is_due: bool = True
    """Whether it computes, while it trains, what records alone need; see `ask_for_statistics`."""
    moves_rows: bool = True
    """Whether `coupling_EE`, where it is learned from, is of rows that are moved at random."""

    @property
    def measures(self) -> bool:
        """Whether it computes what records alone need: in evaluation always."""
        return self.record_is_due or not self.training

    def needs(self, name: str) -> bool:
        """Whether a loss is computed, for its gradient or for a record.

        Args:
            name: The field of `RoutingStats`.
        """
        return self.measures or name in self.learns_from

    def for_loss(self, name: str, x: Tensor) -> Tensor:
        """What a loss is computed from: without gradient, unless the loss is asked for.

        Args:
            name: The field of `RoutingStats`, as in `AUXILIARY_LOSSES`.
            x: Scores, logits, or their means.
        """
        return x if name in self.learns_from else x.detach()

    def with_samples(
        self,
        stats: RoutingStats,
        levels: Sequence[Tensor],
        u_BTD: Tensor,
        real: RealTokens | None = None,
    ) -> RoutingStats:
        """Adds the mean scores and the mean input of each sample, where something asked for them.

        They are sums over tokens that nothing but a loss over pairs of samples needs.

        Args:
            stats: The layer's statistics.
            levels: The scores of real tokens, of each level [N, E]; each row sums to 1.
            u_BTD: What they follow from.
            real: The tokens that are not padding; None: all.
        """
        if not (self.gives_samples and self.training):
            return stats
        scores_NS = levels[0] if len(levels) == 1 else torch.cat(list(levels), dim=-1)
        u_ND = pack(u_BTD.detach().flatten(0, 1), real)
        u_ND = u_ND.to(torch.promote_types(u_ND.dtype, torch.float32))
        return stats.but(
            sample_scores_BS=mean_of_samples(scores_NS, u_BTD, real),
            sample_inputs_BD=mean_of_samples(u_ND, u_BTD, real),
        )


def mean_of_samples(x_NS: Tensor, u_BTD: Tensor, real: RealTokens | None) -> Tensor:
    """The mean over the real tokens of each sample, [B, S].

    Args:
        x_NS: Numbers of each real token.
        u_BTD: A tensor whose first axes are samples and tokens.
        real: Which tokens are real; None: all.
    """
    samples, tokens = u_BTD.shape[:2]
    if real is None:
        return x_NS.view(samples, tokens, -1).mean(1)
    sums_BS = x_NS.new_zeros(samples, x_NS.shape[1])
    sums_BS = sums_BS.index_add(0, real.rows_N // tokens, x_NS)
    return sums_BS / real.lengths_B.clamp_min(1).unsqueeze(-1).to(x_NS.dtype)


def ask_for_statistics(
    model: nn.Module,
    *,
    losses: frozenset[str],
    samples: bool,
    record_is_due: bool = True,
    moves_rows: bool = True,
) -> None:
    """Says which statistics training needs, to all layers that route.

    Args:
        model: The whole one.
        losses: Fields of `RoutingStats` that get a gradient: those with a coefficient.
        samples: Whether numbers of single samples are returned.
        record_is_due: Whether the step's record has measures that nothing else needs. In a layer
            with a graph they are a third of what a GPU launches.
        moves_rows: Whether `coupling_EE`, where it is learned from, is of rows that are moved.
    """
    for module in model.modules():
        if isinstance(module, StatisticsModule):
            module.gives_samples, module.record_is_due = samples, record_is_due
            module.moves_rows = moves_rows
            if module.learns_from != losses:  # compiled programs are bound to the set itself
                module.learns_from = losses


def entropy(shares: Tensor) -> Tensor:
    """Entropy over the last dimension, in nats; not for gradients.

    Args:
        shares: Not negative, each row summing to 1; 0 is allowed.

    Returns:
        One dimension less.
    """
    # 0 log 0 counts as 0. xlogy does the same, but takes nine times as long on a CPU.
    tiny = torch.finfo(shares.dtype).tiny
    return shares.clamp_min(tiny).log_().mul_(shares).sum(-1).neg_()
