"""The output of a model: logits, and the routing statistics of every routed feed-forward.

Both types are NamedTuples, because those pass unchanged through the DeepSpeed engine, activation
recomputation and `torch.compile`. Statistics are returned, never stored on a module: a stored one
would count twice when a block is recomputed. Training tells the modules which losses need a
gradient and whether per-sample statistics are needed.

Shapes: B batch or samples, T tokens in a sequence or a sample, V vocabulary, E experts (in a muMoE
those of all levels, side by side), A heads, S experts of all levels, L levels, D width, N channels
of all BatchNorms of a mixture, or real tokens (B T without padding).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.layers import RealTokens, pack

NO_TENSORS: dict[str, Tensor] = {}
"""The default of dictionaries in tuples, which nothing changes."""


class RoutingStats(NamedTuple):
    """The statistics of one routed feed-forward over one forward pass."""

    name: str
    """The name of the module in the model, as in parameter names. A feed-forward leaves it empty;
    the model fills it in, see `run_blocks`."""
    load_E: Tensor
    """Share of the assignments that each expert received; sums to 1. In a muMoE the mean over
    tokens of each coefficient; every level sums to 1. In a transcoder or a mixture of decoders the
    share of the top_k assignments per token; it sums to the fraction of these with a weight above
    0."""
    usage_E: Tensor | None = None
    """Mean over tokens of the routing scores; None: equal to `load_E`. With a gradient if a loss
    over all layers needs it."""
    levels: tuple[int, ...] = ()
    """muMoE: number of experts of each level, which are side by side; empty for other kinds."""
    tokens: Tensor | None = None
    """Number of tokens without padding in these statistics; None: equal in all micro-batches."""
    sample_scores_BS: Tensor | None = None
    """Mean over each sample's tokens of each expert's score, without noise and before a graph, with
    its gradient; None unless a loss over pairs of samples needs it."""
    sample_inputs_BD: Tensor | None = None
    """Mean over each sample's tokens of the router's input; None if `sample_scores_BS` is."""
    losses: dict[str, Tensor] = NO_TENSORS
    """Losses by their names in records, scalars. They have a gradient only if training requests it;
    those of sparse routing are missing in evaluation."""
    measures: dict[str, Tensor] = NO_TENSORS
    """Further values by their names in records, with the suffix of their shape; those that only
    records need are missing in training unless a record is due."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors by name."""
        fields = self._asdict()
        own = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        return own | self.losses | self.measures

    def with_tensors(self, values: Mapping[str, Tensor]) -> "RoutingStats":
        """Returns the same statistics with other values of all tensors.

        Args:
            values: Tensors by the names of `tensors`.
        """
        own: dict[str, Any] = {name: values[name] for name in self._fields if name in values}
        losses = {name: values[name] for name in self.losses}
        measures = {name: values[name] for name in self.measures}
        return self._replace(losses=losses, measures=measures, **own)


class ModelOutput(NamedTuple):
    """The result of `forward` of every model."""

    logits: Tensor
    """[B, T, V] in a language model; with targets their mean loss instead, or without gradients the
    loss of each [B, T]. A decoder with `distilled_blocks` returns 0 in training."""
    routing: tuple[RoutingStats, ...]
    """One entry per routed feed-forward, in the order of the blocks; empty in a dense model."""


AUXILIARY_LOSSES = frozenset({"balance_loss", "z_loss", "importance_loss", "load_loss"})
"""Losses that every router computes in training: `loss.*` may add them. Training
can also request `usage_E` with a gradient, and `sequence_loss`."""


class StatisticsModule(nn.Module):
    """The base class of modules that return routing statistics."""

    learns_from: frozenset[str] = AUXILIARY_LOSSES
    """Losses that get a gradient; others only have a value. See `ask_for_statistics`."""
    gives_samples: bool = False
    """Whether per-sample statistics are returned in training; see `ask_for_statistics`."""
    record_is_due: bool = True
    """Whether values needed only by records are computed in training; see `ask_for_statistics`."""

    @property
    def measures(self) -> bool:
        """Whether values needed only by records are computed: always in evaluation."""
        return self.record_is_due or not self.training

    def needs(self, name: str) -> bool:
        """Returns whether a loss is computed, for its gradient or for a record.

        Args:
            name: Its name in `RoutingStats`, or `usage_E`.
        """
        return self.measures or name in self.learns_from

    def for_loss(self, name: str, x: Tensor) -> Tensor:
        """Returns the input of a loss, detached unless the loss gets a gradient.

        Args:
            name: Its name, as in `needs`.
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
        """Adds the mean scores and the mean input of each sample, if requested.

        Only a loss over pairs of samples needs these sums over tokens.

        Args:
            stats: The layer's statistics.
            levels: The scores of real tokens, of each level [N, E]; each row sums to 1.
            u_BTD: The input that they are computed from.
            real: The tokens that are not padding; None for all.
        """
        if not (self.gives_samples and self.training):
            return stats
        scores_NS = levels[0] if len(levels) == 1 else torch.cat(list(levels), dim=-1)
        u_ND = pack(u_BTD.detach().flatten(0, 1), real)
        u_ND = u_ND.to(torch.promote_types(u_ND.dtype, torch.float32))
        return stats._replace(
            sample_scores_BS=mean_of_samples(scores_NS, u_BTD, real),
            sample_inputs_BD=mean_of_samples(u_ND, u_BTD, real),
        )


def mean_of_samples(x_NS: Tensor, u_BTD: Tensor, real: RealTokens | None) -> Tensor:
    """Averages over the real tokens of each sample, [B, S].

    Args:
        x_NS: Values of each real token.
        u_BTD: A tensor whose first axes are samples and tokens.
        real: The real tokens; None for all.
    """
    samples, tokens = u_BTD.shape[:2]
    if real is None:
        return x_NS.view(samples, tokens, -1).mean(1)
    sums_BS = x_NS.new_zeros(samples, x_NS.shape[1])
    sums_BS = sums_BS.index_add(0, real.rows_N // tokens, x_NS)
    return sums_BS / real.mask_BT.sum(1).clamp_min(1).unsqueeze(-1).to(x_NS.dtype)


def ask_for_statistics(
    model: nn.Module,
    *,
    losses: frozenset[str],
    samples: bool,
    record_is_due: bool = True,
) -> None:
    """Tells all routing layers which statistics training needs.

    Args:
        model: The whole model.
        losses: Losses of `RoutingStats`, or `usage_E`, that get a gradient: those with a
            coefficient.
        samples: Whether per-sample statistics are returned.
        record_is_due: Whether to compute values that only the step's record needs. In a layer with
            a graph they account for a third of the GPU kernels.
    """
    for module in model.modules():
        if isinstance(module, StatisticsModule):
            module.gives_samples, module.record_is_due = samples, record_is_due
            if module.learns_from != losses:  # compiled programs depend on the identity of the set
                module.learns_from = losses


def entropy(shares: Tensor) -> Tensor:
    """Computes the entropy over the last dimension, in nats; not differentiable.

    Args:
        shares: Non-negative, each row summing to 1; 0 is allowed.

    Returns:
        One dimension less.
    """
    # 0 log 0 counts as 0. xlogy does the same, but takes nine times as long on a CPU.
    tiny = torch.finfo(shares.dtype).tiny
    return shares.clamp_min(tiny).log_().mul_(shares).sum(-1).neg_()
