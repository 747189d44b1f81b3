"""Statistics that training asks routers for: losses with their gradient, and numbers of samples.

Shapes: B samples, T tokens of a sample, N tokens that are real (B T without padding), S experts of
all levels side by side, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyad.model.output import RoutingStats
from polyad.model.padding import RealTokens, pack

AUXILIARY_LOSSES = frozenset({"balance_loss", "z_loss", "importance_loss", "load_loss"})
"""Fields of `RoutingStats` that a run's coefficients `loss.*` may add to its loss."""


class StatisticsModule(nn.Module):
    """The base of modules that return statistics of routing."""

    learns_from: frozenset[str] = AUXILIARY_LOSSES
    """Losses that get a gradient; of the others the value alone is known; see `ask_for`."""
    gives_samples: bool = False
    """Whether it returns numbers of single samples while it trains; see `ask_for`."""

    def for_loss(self, name: str, x: Tensor) -> Tensor:
        """What a loss is computed from: without gradient, unless the loss is asked for.

        Args:
            name: Of the loss, one of `AUXILIARY_LOSSES`.
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
            stats: Of the layer.
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
        x_NS: Of real tokens.
        u_BTD: A tensor whose first axes are samples and tokens.
        real: Which tokens are real; None: all.
    """
    samples, tokens = u_BTD.shape[:2]
    if real is None:
        return x_NS.view(samples, tokens, -1).mean(1)
    sums_BS = x_NS.new_zeros(samples, x_NS.shape[1])
    sums_BS = sums_BS.index_add(0, real.rows_N // tokens, x_NS)
    return sums_BS / real.lengths_B.clamp_min(1).unsqueeze(-1).to(x_NS.dtype)


def ask_for(model: nn.Module, *, losses: frozenset[str], samples: bool) -> None:
    """Says which statistics training needs, to all layers that route.

    Args:
        model: The whole one.
        losses: The auxiliary losses that get a gradient: those with a coefficient.
        samples: Whether numbers of single samples are returned.
    """
    for module in model.modules():
        if isinstance(module, StatisticsModule):
            module.gives_samples = samples
            if module.learns_from != losses:  # compiled programs are bound to the set itself
                module.learns_from = losses
