"""What a router gave whole samples, for losses that compare pairs of them.

It is a sum over tokens that nothing else needs, so a layer computes it only where the loop has
switched it on.

Shapes: B samples, T tokens of a sample, N tokens that are real (B T without padding), S experts of
all levels side by side, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyad.model.output import RoutingStats
from polyad.model.padding import RealTokens, pack


class SampleStatistics(nn.Module):
    """The base of modules that can return statistics of single samples while they train."""

    gives_samples: bool = False
    """Whether they do; see `give_samples`."""

    def with_samples(
        self,
        stats: RoutingStats,
        levels: Sequence[Tensor],
        u_BTD: Tensor,
        real: RealTokens | None = None,
    ) -> RoutingStats:
        """Adds of each sample the mean scores and the mean input, where something asked for them.

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
        u_BTD: Whose first axes are samples and tokens.
        real: Which tokens are real; None: all.
    """
    samples, tokens = u_BTD.shape[:2]
    if real is None:
        return x_NS.view(samples, tokens, -1).mean(1)
    sums_BS = x_NS.new_zeros(samples, x_NS.shape[1])
    sums_BS = sums_BS.index_add(0, real.rows_N // tokens, x_NS)
    return sums_BS / real.lengths_B.clamp_min(1).unsqueeze(-1).to(x_NS.dtype)


def give_samples(model: nn.Module, wanted: bool) -> None:
    """Switches statistics of single samples on or off, in all layers that route.

    Args:
        model: The whole one.
        wanted: Whether they are returned while it trains.
    """
    for module in model.modules():
        if isinstance(module, SampleStatistics):
            module.gives_samples = wanted
