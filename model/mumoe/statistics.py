"""Statistics of a gate over the tokens of a forward pass, without gradients.

The leaves of a hierarchy are as many as the product of its levels, and none of this builds them: a
leaf's coefficient is a product over levels, so entropies add up, exp(entropy) is a product, and the
largest coefficient of a token is the product of its largest of each level.

Shapes: M tokens, N experts of a level, E and S experts of all levels side by side, L levels.
"""

import torch
from torch import Tensor

from model.entropy import entropy
from model.mumoe.gating import GateOutput
from model.output import RoutingStats
from model.padding import token_mean

DOMINANT = 0.5
"""The coefficient from which an expert dominates a token."""


def gate_statistics(output: GateOutput, real_M: Tensor | None = None) -> RoutingStats:
    """The statistics of a gate. All are means over tokens, so they can be averaged.

    Args:
        output: Of the gate.
        real_M: False for padding, which does not count; None: there is none.

    Returns:
        The statistics with an empty name; None for those of sparse routing.
    """
    levels = [a_MN.detach() for a_MN in output.coefficients]
    entropies = [entropy(a_MN) for a_MN in levels]
    entropy_M, largest_M = entropies[0], levels[0].amax(-1)
    for level_M, a_MN in zip(entropies[1:], levels[1:], strict=True):
        entropy_M = entropy_M + level_M
        largest_M = largest_M * a_MN.amax(-1)
    return RoutingStats(
        name="",
        load_E=torch.cat([token_mean(a_MN, real_M) for a_MN in levels]),
        entropy=token_mean(entropy_M, real_M),
        effective_experts=token_mean(entropy_M.exp(), real_M),
        dominated=token_mean(_dominance(largest_M), real_M),
        dominant_E=torch.cat([token_mean(_dominance(a_MN), real_M) for a_MN in levels]),
        level_entropy_L=(
            torch.stack([token_mean(level_M, real_M) for level_M in entropies])
            if len(levels) > 1
            else None
        ),
        levels=tuple(a_MN.shape[-1] for a_MN in levels),
        score_mean_S=output.mean_S,
        score_square_S=output.square_S,
    )


def _dominance(a_MN: Tensor) -> Tensor:
    """1 where a coefficient has at least half of a token, else 0, in its dtype."""
    return (a_MN >= DOMINANT).view(torch.uint8).to(a_MN.dtype)  # five times as fast as from bool
