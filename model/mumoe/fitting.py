"""Fits factors so that every expert of a layer equals a given matrix, as closely as possible.

The coefficients of a token sum to 1, so if all experts have the same matrix, the layer computes
that matrix whatever the gate does. With expert factors of ones (CP) or identity slices (ring) the
experts' common matrix is a product, and no other slices allow a higher rank:

    CP     W_(i, o) = sum_r U2_(i, r) U3_(r, o)                rank R
    ring   W_(i, o) = sum_(p, r) U2_(i, p, r) U3_(p, r, o)     rank P R, of P = R1 = R2 and R = R3

The nearest product of K components is the singular value decomposition, truncated to the K largest
values (Eckart and Young 1936), with the square root of each value in either factor. The matrix is
the dense layer's with its bias as an extra row, as in the input factor. Components are assigned to
the paths p in turn, so that all paths carry similar shares of the matrix.

Equal experts get equal gradients, and a gate with nothing to choose from gets none: they would stay
equal forever. The noise that makes experts differ has mean zero over the experts of a level, so at
the uniform coefficients of a new gate it has no effect.

Shapes: C rows of the input factor (I inputs, and one for the bias), O outputs, K components, P
paths, R rank, N experts of a level.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from polyad.model.initialization import around_one, diagonal_around_one
from polyad.model.mumoe.base import Sizes

FITTED = ("cp", "tr")
"""The factorizations that can be initialized from a dense matrix."""


class Fit(NamedTuple):
    """The fitted factors of a layer, besides those of its experts."""

    input_factor: Tensor
    """[C, R] for CP, [C, P, R] for a ring, fp32."""
    output_factor: Tensor
    """[R, O] for CP, [P, R, O] for a ring, fp32."""
    error: float
    """Relative error: the Frobenius norm of the residual divided by that of the matrix."""


def components(factorization: str, sizes: Sizes) -> int:
    """Returns the highest possible rank K of the experts' common matrix.

    Args:
        factorization: One of `FITTED`.
        sizes: The sizes of the layer.
    """
    return _paths(factorization, sizes) * sizes.rank


def fit(factorization: str, sizes: Sizes, dense_CO: Tensor, first_input_factor: Tensor) -> Fit:
    """Fits the factors to a matrix.

    Args:
        factorization: One of `FITTED`.
        sizes: The sizes of the layer.
        dense_CO: The matrix for every expert, its bias as the last row; finite.
        first_input_factor: The input factor of a new run. Components that the matrix does not need
            start from it, with zero in the output factor: they add nothing, and can learn.

    Returns:
        The factors and their relative error.
    """
    paths, rank = _paths(factorization, sizes), sizes.rank
    rows, outputs = dense_CO.shape
    u_CS, value_S, v_SO = torch.linalg.svd(dense_CO.double(), full_matrices=False)
    kept = min(paths * rank, int((value_S > 1e-12 * value_S[0]).sum()))
    root_K = value_S[:kept].sqrt()
    # Component k is component k // P of path k % P.
    left_CRP = first_input_factor.double().view(rows, paths, rank).transpose(1, 2).contiguous()
    right_RPO = torch.zeros(rank, paths, outputs, dtype=torch.float64)
    left_CRP.view(rows, -1)[:, :kept] = u_CS[:, :kept] * root_K
    right_RPO.view(-1, outputs)[:kept] = root_K.unsqueeze(1) * v_SO[:kept]
    left_CPR, right_PRO = left_CRP.transpose(1, 2), right_RPO.transpose(0, 1)
    whole = float(value_S.norm())
    return Fit(
        left_CPR.reshape(first_input_factor.shape).float(),
        right_PRO.reshape(*first_input_factor.shape[1:], outputs).float(),
        float(value_S[kept:].norm()) / whole if whole else 0.0,
    )


def equal_experts(
    factorization: str, shape: tuple[int, ...], noise: float, generator: Generator
) -> Tensor:
    """Draws the expert factor of a level for experts that are equal except for noise.

    Args:
        factorization: One of `FITTED`.
        shape: The shape of the factor: [N, R] for CP, [N, P, P] for a ring.
        noise: Standard deviation of the noise before its mean over experts is subtracted; in a ring
            it is added to the diagonal.
        generator: The random generator.
    """
    is_cp = factorization == "cp"
    equal = torch.ones(shape) if is_cp else torch.eye(*shape[1:]).expand(shape).clone()
    if noise:
        start = around_one(noise) if is_cp else diagonal_around_one(noise)
        drawn = torch.empty(shape)
        start.fill(drawn, generator)
        equal += drawn - drawn.mean(0)
    return equal


def _paths(factorization: str, sizes: Sizes) -> int:
    return 1 if factorization == "cp" else sizes.expert_rank
