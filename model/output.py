"""The output of a model: logits, and the routing statistics of every routed feed-forward.

Both types are NamedTuples, because those pass through the DeepSpeed engine, activation
recomputation and `torch.compile` unchanged. Statistics are returned and never stored on a module: a
stored one counts twice when a block is recomputed.

Shapes: B batch, T tokens in a sequence, V vocabulary, E experts (of a muMoE: of all levels, side by
side), A heads, S experts of all levels, L levels, D width, N channels of all BatchNorms of a
mixture.
"""

from typing import Any, NamedTuple

from torch import Tensor


class RoutingStats(NamedTuple):
    """The statistics of one routed feed-forward over one forward pass."""

    name: str
    """The name of the module in the model, as in parameter names. A feed-forward leaves it empty,
    and the model fills it in: see `GPT2.forward`."""
    load_E: Tensor
    """Share of the assignments that each expert received; sums to 1. Of a muMoE: the mean over
    tokens of each coefficient; every level sums to 1."""
    entropy: Tensor
    """Mean over tokens of the entropy of the scores that experts are chosen by, in nats. Of a
    muMoE: of the leaves' coefficients, products over levels, whose entropy is the levels' sum. No
    dimensions, as all that follow unless a suffix says them."""
    usage_E: Tensor | None = None
    """Mean over tokens of the scores that experts are chosen by; None: `load_E`."""
    balance_loss: Tensor | None = None
    """E sum_e f_e P_e, with its gradient if training asks for it, as those of all losses: 1 at even
    load. Sparse routing has losses while it trains; None in evaluation."""
    z_loss: Tensor | None = None
    """Mean of the squared logsumexp of the router's logits."""
    importance_loss: Tensor | None = None
    """Squared coefficient of variation of the scores' sum over tokens, of each token's own scores
    without noise and before a graph: 0 if it is even."""
    load_loss: Tensor | None = None
    """The same of the load to be expected under the router's noise; None without noise."""
    dropped: Tensor | None = None
    """Share of the assignments that were dropped."""
    effective_neighbours: Tensor | None = None
    """Mean of exp(entropy) of a token's weights in a graph; None without one, or while it is
    off."""
    head_entropy_A: Tensor | None = None
    """Mean entropy of each head's attention, in nats; None unless a graph asks for it."""
    attention_head: Tensor | None = None
    """The number of the head that a graph of attention is made of; None as
    `effective_neighbours`."""
    effective_experts: Tensor | None = None
    """Of a muMoE: mean over tokens of exp(entropy of its leaves' coefficients), 1 to all leaves."""
    dominated: Tensor | None = None
    """Of a muMoE: share of the tokens of which one leaf has a coefficient of at least 0.5."""
    dominant_E: Tensor | None = None
    """Of a muMoE: load at a >= 0.5, the share of the tokens that give this expert at least 0.5."""
    level_entropy_L: Tensor | None = None
    """Of a muMoE with several levels: the part of each in `entropy`."""
    levels: tuple[int, ...] = ()
    """Of a muMoE: how many experts of each level stand side by side; of others nothing."""
    score_mean_S: Tensor | None = None
    """Mean over tokens of each expert's score, all levels of a muMoE side by side; None unless its
    gate has a BatchNorm."""
    score_square_S: Tensor | None = None
    """Mean over tokens of each expert's squared score; None as `score_mean_S`."""
    norm_mean_N: Tensor | None = None
    """Of a mixture of networks with BatchNorm, in training: mean of each channel that one of them
    reads, the networks side by side; for the update of the running statistics alone."""
    norm_square_N: Tensor | None = None
    """Mean of the squares; None as `norm_mean_N`."""
    expert_input_ED: Tensor | None = None
    """Of a score that follows what experts compute, in training: mean over all assignments of the
    token, 0 for those to another expert; for the update of its buffer alone."""
    sample_scores_BS: Tensor | None = None
    """Of each sample the mean over its tokens of each expert's score, without noise and before a
    graph, with its gradient; None unless a loss over pairs of samples asks for it."""
    sample_inputs_BD: Tensor | None = None
    """Of each sample the mean over its tokens of what the router reads; None as
    `sample_scores_BS`."""
    similarity_loss: Tensor | None = None
    """The loss of sample similarity, which the loop puts in the place of both, with its
    gradient."""
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
    without gradients the loss of each [B, T]."""
    routing: tuple[RoutingStats, ...]
    """One entry per routed feed-forward, in the order of the blocks; empty in a dense model."""
