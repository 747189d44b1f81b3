"""Statistics of a gate over the tokens of a forward pass, without gradients.

The leaves of a hierarchy are as many as the product of its levels, and none of this builds them: a
leaf's coefficient is a product over levels, so entropies add up, exp(entropy) is a product, and the
largest coefficient of a token is the product of its largest of each level.

Shapes: M tokens, N experts of a level, E and S experts of all levels side by side, L levels.
"""

import torch
from torch import Tensor

from polyad.model.mumoe.gating import GateOutput
from polyad.model.output import RoutingStats, entropy
from polyad.model.padding import RealTokens, counted

DOMINANT = 0.5
"""The coefficient from which an expert dominates a token."""


def gate_statistics(output: GateOutput, real: RealTokens | None = None) -> RoutingStats:
    """The statistics of a gate. All are means over tokens, so they can be averaged.

    Args:
        output: Of the gate, for real tokens.
        real: Which they are; None: all.

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
        load_E=torch.cat([a_MN.mean(0) for a_MN in levels]),
        entropy=entropy_M.mean(),
        effective_experts=entropy_M.exp().mean(),
        dominated=_dominance(largest_M).mean(),
        dominant_E=torch.cat([_dominance(a_MN).mean(0) for a_MN in levels]),
        level_entropy_L=(
            torch.stack([level_M.mean() for level_M in entropies]) if len(levels) > 1 else None
        ),
        levels=tuple(a_MN.shape[-1] for a_MN in levels),
        score_mean_S=output.mean_S,
        score_square_S=output.square_S,
        tokens=None if real is None else counted(real, entropy_M.dtype),
    )


def _dominance(a_MN: Tensor) -> Tensor:
    """1 where a coefficient has at least half of a token, else 0, in its dtype."""
    # By way of bytes: on a CPU faster than from bool. Triton compiles no view of a bool's bits.
    return (a_MN >= DOMINANT).to(torch.uint8).to(a_MN.dtype)
