"""Tensor ring and tensor train: W is a product of small matrices, one per mode.

    W_(n_1 ... n_E, i, o) = trace(U1_(:, n_1, :) ... U2_(:, i, :) U3_(:, o, :))

A token's coefficients select a matrix [P, Q] and its input a matrix [Q, R]; the output factor
contracts their product: two large matrix products with a small one per token in between. A train is
an open ring: P = 1.

Source: Oldfield et al. 2024, equation 5, and appendix E for more levels.

Shapes: M tokens, N experts of a level, P = R1 and Q = R2 ring ranks, R = R3 rank, I input width,
O output width.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polyad.model.initialization import Initializer, around_one, diagonal_around_one
from polyad.model.mumoe.base import Factorized, Sizes, contract, expert_factor


class TensorRing(Factorized):
    """Factors [N, P, Q] of the first level, [N, Q, Q] of others, [I + 1, Q, R] and [P, R, O]."""

    @classmethod
    def first_rank(cls, sizes: Sizes) -> int:
        """Returns P."""
        return sizes.expert_rank

    @classmethod
    def factor_shapes(cls, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """See `Factorized`."""
        first, ring = cls.first_rank(sizes), sizes.expert_rank
        experts: dict[str, tuple[int, ...]] = {
            expert_factor(level): (number, ring if level else first, ring)
            for level, number in enumerate(sizes.num_experts)
        }
        return experts | {
            "input_factor": (sizes.input_rows, ring, sizes.rank),
            "output_factor": (first, sizes.rank, sizes.outputs),
        }

    @classmethod
    def rank_axes(cls, sizes: Sizes, parts: int) -> dict[str, int]:
        """Q of the input and P of the output factor if these divide evenly, otherwise R."""
        return {
            "input_factor": 2 if sizes.expert_rank % parts else 1,
            "output_factor": 1 if cls.first_rank(sizes) % parts else 0,
        }

    @classmethod
    def output_fan(cls, sizes: Sizes) -> int:
        """R3 R1."""
        return sizes.rank * cls.first_rank(sizes)

    def expert_initializer(self, level: int) -> Initializer:
        """A diagonal slice of N(1, 1) per expert; in further levels closer to the identity."""
        return diagonal_around_one(self.sizes.level_std if level else self.sizes.expert_std)

    def mix(self, contracted: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
        """See `Factorized.mix`; [M, Q R] to [M, P R]."""
        input_MQR = contracted.view(-1, self.sizes.expert_rank, self.sizes.rank)
        chosen_MPQ = self.regions.experts(self.mix_experts(coefficients))
        return (chosen_MPQ @ input_MQR).flatten(1)

    def mix_experts(self, coefficients: Sequence[Tensor]) -> Tensor:
        """Computes the matrix that a token's coefficients select: a product over levels.

        Args:
            coefficients: The coefficients of each level, [M, N].

        Returns:
            [M, P, Q].
        """
        first_MPQ, *further = (
            contract(a_MN, factor_NPQ).view(-1, *factor_NPQ.shape[1:])
            for a_MN, factor_NPQ in zip(coefficients, self.expert_factors(), strict=True)
        )
        return functools.reduce(torch.matmul, further, first_MPQ)


class TensorTrain(TensorRing):
    """A ring with P = 1."""

    @classmethod
    def first_rank(cls, sizes: Sizes) -> int:
        """Returns P = 1."""
        return 1

    def expert_initializer(self, level: int) -> Initializer:
        """N(1, 1) / sqrt(Q) in every entry; further levels as in a ring. Not from the paper.

        A diagonal slice [1, Q] would be zero except for its first entry and disable Q - 1 of the
        paths. An output is the sum of Q paths, so the scale gives it the same variance as in CP and
        the ring.
        """
        if level:
            return super().expert_initializer(level)
        return around_one(self.sizes.expert_std, 1 / math.sqrt(self.sizes.expert_rank))
