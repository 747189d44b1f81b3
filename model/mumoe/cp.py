"""CP: W is a sum of R outer products.

    W_(n..., i, o) = sum_r U1_(n, r) ... U2_(i, r) U3_(r, o)        y = ((a U1) * ... * (z U2)) U3

Source: Oldfield et al. 2024, equation 3, and appendix E for more levels.

Shapes: M tokens, N experts of a level, R rank, I input width, O output width.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from polyad.model.initialization import Initializer, around_one
from polyad.model.mumoe.base import Factorized, Sizes, contract, expert_factor


class CP(Factorized):
    """Factors [N, R] of every level, [I + 1, R] and [R, O]."""

    mixes_parts: ClassVar[bool] = True

    @classmethod
    def factor_shapes(cls, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """See `Factorized`."""
        experts: dict[str, tuple[int, ...]] = {
            expert_factor(level): (number, sizes.rank)
            for level, number in enumerate(sizes.num_experts)
        }
        return experts | {
            "input_factor": (sizes.input_rows, sizes.rank),
            "output_factor": (sizes.rank, sizes.outputs),
        }

    @classmethod
    def rank_axes(cls, sizes: Sizes, parts: int) -> dict[str, int]:
        """R, also of expert factors: a term of the sum is a column of each factor."""
        experts = {expert_factor(level): 1 for level in range(len(sizes.num_experts))}
        return experts | {"input_factor": 1, "output_factor": 0}

    @classmethod
    def output_fan(cls, sizes: Sizes) -> int:
        """See `Factorized`."""
        return sizes.rank

    def expert_initializer(self, level: int) -> Initializer:
        """N(1, 1): experts start equal except for noise; further levels have less noise or none."""
        return around_one(self.sizes.level_std if level else self.sizes.expert_std)

    def mix(self, contracted: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
        """See `Factorized.mix`; [M, R] to [M, R]."""
        for a_MN, factor_NR in zip(coefficients, self.expert_factors(), strict=True):
            contracted = contracted * contract(a_MN, factor_NR)
        return contracted
