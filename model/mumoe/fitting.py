"""Factors with which every expert of a layer is one given matrix, or the nearest that they can be.

Coefficients of a token sum to 1: where all experts have the same matrix, the layer computes what
that matrix does, whatever the gate says. With expert factors of ones (CP) or slices that are the
identity (ring) the experts' one matrix is a product, and no other slices give a higher rank:

    CP     W_(i, o) = sum_r U2_(i, r) U3_(r, o)                rank R
    ring   W_(i, o) = sum_(p, r) U2_(i, p, r) U3_(p, r, o)     rank P R, of P = R1 = R2 and R = R3

The nearest product of K components is the singular value decomposition, cut off after the K largest
values (Eckart and Young 1936); a root of each value goes to either factor. The matrix is the dense
layer's with its bias as one more row, as the input factor has it. Components are dealt out to the
paths p in turn, so that each path carries a like share of the matrix.

Equal experts get equal gradients, and a gate with nothing to choose gets none: they would stay
equal for ever. What is added to the experts to set them apart has a mean of zero over the experts
of a level: at the uniform coefficients of a new gate it adds up to nothing.

Shapes: C rows of the input factor (I inputs, and one for the bias), O outputs, K components, P
paths, R rank, N experts of a level.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from polyad.model.initialization import around_one, diagonal_around_one
from polyad.model.mumoe.base import Sizes

FITTED = ("cp", "tr")
"""The factorizations that can begin as a dense matrix."""


class Fit(NamedTuple):
    """The factors of a layer that are not its experts'."""

    input_factor: Tensor
    """[C, R] of CP, [C, P, R] of a ring, fp32."""
    output_factor: Tensor
    """[R, O] of CP, [P, R, O] of a ring, fp32."""
    error: float
    """What they leave out, as a share of the matrix: the quotient of the Frobenius norms."""


def components(factorization: str, sizes: Sizes) -> int:
    """The highest rank K of the matrix of all experts.

    Args:
        factorization: One of `FITTED`.
        sizes: The sizes of the layer.
    """
    return _paths(factorization, sizes) * sizes.rank


def fit(factorization: str, sizes: Sizes, dense_CO: Tensor, first_input_factor: Tensor) -> Fit:
    """Finds the factors.

    Args:
        factorization: One of `FITTED`.
        sizes: The sizes of the layer.
        dense_CO: The matrix of every expert, its bias as the last row; finite.
        first_input_factor: As a new run has it. Components that the matrix has no use for begin
            with it, and zero in the output factor: they add nothing, and can learn.

    Returns:
        The factors, and what they leave out.
    """
    paths, rank = _paths(factorization, sizes), sizes.rank
    rows, outputs = dense_CO.shape
    u_CS, value_S, v_SO = torch.linalg.svd(dense_CO.double(), full_matrices=False)
    kept = min(paths * rank, int((value_S > 1e-12 * value_S[0]).sum()))
    root_K = value_S[:kept].sqrt()
    # Component k is the (k // P)-th of path k % P.
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
    """The expert factor of a level with which all experts are equal, but for noise.

    Args:
        factorization: One of `FITTED`.
        shape: The shape of the factor: [N, R] of CP, [N, P, P] of a ring.
        noise: Standard deviation of what is added, before its mean over the experts is taken off;
            of a ring to the diagonal.
        generator: Draws it.
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
