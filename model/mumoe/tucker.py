"""Tucker: W is a small core tensor with a factor on each mode.

    W_(n..., i, o) = sum_(q..., s, t) Z_(s, q..., t) U1_(n, q) ... U2_(i, s) U3_(t, o)

Here the input and output modes have the same rank R. One expert's matrix has rank at most R, for R
x R entries of the core: the paper's reason to prefer the other factorizations.

Source: Oldfield et al. 2024, appendix D.1.3; the earlier version, section 3.

Shapes: M tokens, N experts of a level, Q = R_N rank of an expert mode, S = R_I and T = R_O, the
ranks of input and output mode, I input width, O output width.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from polyad.model.initialization import Initializer, around_one, uniform
from polyad.model.mumoe.base import Factorized, Sizes, contract, expert_factor


class Tucker(Factorized):
    """Factors [N, Q] of every level, [I + 1, S] and [T, O]; a core [S, Q, ..., Q, T]."""

    core: Tensor

    @classmethod
    def factor_shapes(cls, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """See `Factorized`."""
        experts: dict[str, tuple[int, ...]] = {
            expert_factor(level): (number, sizes.expert_rank)
            for level, number in enumerate(sizes.num_experts)
        }
        ranks = (sizes.expert_rank,) * len(sizes.num_experts)
        return experts | {
            "input_factor": (sizes.input_rows, sizes.rank),
            "core": (sizes.rank, *ranks, sizes.rank),
            "output_factor": (sizes.rank, sizes.outputs),
        }

    @classmethod
    def rank_axes(cls, sizes: Sizes, parts: int) -> dict[str, int]:
        """S of the input and T of the output factor; each rank keeps a part of the core."""
        return {"input_factor": 1, "core": 0, "output_factor": 0}

    @classmethod
    def output_fan(cls, sizes: Sizes) -> int:
        """R_O."""
        return sizes.rank

    def expert_initializer(self, level: int) -> Initializer:
        """N(1, 1); further levels with less noise or none."""
        return around_one(self.sizes.level_std if level else self.sizes.expert_std)

    def initializers(self) -> dict[str, Initializer]:
        """Initializes the core like any factor: uniformly, by the number of summed terms."""
        fan = math.prod(self.core.shape[:-1])
        return super().initializers() | {"core": uniform(1 / math.sqrt(fan))}

    def mix(self, contracted: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
        """See `Factorized.mix`; [M, S] to [M, T]."""
        h = contract(contracted, self.regions.core(self.core))  # [M, Q ... Q T]
        for a_MN, factor_NQ in zip(coefficients, self.expert_factors(), strict=True):
            a_MQ = self.regions.experts(contract(a_MN, factor_NQ))
            h_MQX = h.view(*a_MQ.shape, -1)
            h = (a_MQ.unsqueeze(1) @ h_MQX).squeeze(1)  # one Q fewer
        return h


def _contracted(sizes: Sizes) -> list[int]:
    """Returns the number of values per token before the contraction with each level."""
    levels = range(len(sizes.num_experts), 0, -1)
    return [sizes.expert_rank**level * sizes.rank for level in levels]
