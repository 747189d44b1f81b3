"""Factors of which every expert is one matrix: against numpy's SVD and the materialized tensor."""

import numpy as np
import pytest
import torch

from polyad.model.initialization import seeded_generator
from polyad.model.mumoe.config import FACTORIZATIONS
from polyad.model.mumoe.fitting import FITTED, components, equal_experts, fit
from tests.helpers.factorized import coefficients, contract, full_tensor, make_sizes

every_fitted = pytest.mark.parametrize("name", FITTED)
SIZES = {"inputs": 20, "outputs": 14, "expert_rank": 2}


def fitted_layer(name, dense_CO, noise=0.0, **changes):
    """A layer with factors that were fitted, and what was left out."""
    sizes = make_sizes(**(SIZES | changes))
    layer = FACTORIZATIONS[name](sizes)
    first = torch.randn(layer.input_factor.shape)
    found = fit(name, sizes, dense_CO, first)
    with torch.no_grad():
        layer.input_factor.copy_(found.input_factor)
        layer.output_factor.copy_(found.output_factor)
        for level, factor in enumerate(layer.expert_factors()):
            generator = seeded_generator(1, str(level))
            factor.copy_(equal_experts(name, tuple(factor.shape), noise, generator))
    return layer.double(), found.error, first


def truncated(dense_CO, kept):
    """numpy's nearest matrix of a rank."""
    u, values, v = np.linalg.svd(dense_CO.numpy(), full_matrices=False)
    return torch.from_numpy(u[:, :kept] * values[:kept] @ v[:kept])


@every_fitted
@pytest.mark.parametrize("num_experts", [(5,), (4, 3)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_every_expert_is_the_nearest_matrix_of_the_rank(name, num_experts, bias, rank):
    dense_CO = torch.randn(20 + bias, 14, dtype=torch.float64)
    layer, error, _ = fitted_layer(name, dense_CO, num_experts=num_experts, bias=bias, rank=rank)
    kept = {"cp": rank, "tr": 2 * rank}[name]
    assert components(name, layer.sizes) == kept == layer.expert_matrix_rank(layer.sizes)
    expected_CO = truncated(dense_CO, kept)
    assert np.linalg.matrix_rank(expected_CO.numpy()) == kept
    for matrix_CO in full_tensor(name, layer).flatten(0, -3):
        torch.testing.assert_close(matrix_CO, expected_CO, rtol=1e-5, atol=1e-5)
    left_out = np.linalg.norm((dense_CO - expected_CO).numpy()) / np.linalg.norm(dense_CO.numpy())
    assert error == pytest.approx(left_out, rel=1e-9)


@every_fitted
def test_components_without_a_use_add_nothing_and_can_learn(name):
    dense_CO = torch.randn(21, 14, dtype=torch.float64)
    layer, error, first = fitted_layer(name, dense_CO, rank=18)
    assert error == pytest.approx(0, abs=1e-12)
    for matrix_CO in full_tensor(name, layer).flatten(0, -3):
        torch.testing.assert_close(matrix_CO, dense_CO, rtol=1e-5, atol=1e-5)
    unused = ~layer.output_factor.any(-1)  # [R], or [P, R] of a ring
    assert unused.sum() == {"cp": 18, "tr": 36}[name] - 14
    assert torch.equal(layer.input_factor[:, unused].float(), first[:, unused])
    z_MI, a_MN = torch.randn(9, 20, dtype=torch.float64), torch.full((9, 5), 0.2).double()
    layer(z_MI, [a_MN]).square().sum().backward()
    assert layer.output_factor.grad[unused].abs().min() > 1e-6


@every_fitted
def test_noise_sets_experts_apart_and_adds_up_to_nothing_at_a_gate_that_starts(name):
    dense_CO = torch.randn(21, 14, dtype=torch.float64)
    changes = {"num_experts": (5, 3), "rank": 3}
    plain, *_ = fitted_layer(name, dense_CO, **changes)
    noisy, *_ = fitted_layer(name, dense_CO, noise=1.0, **changes)
    z_MI = torch.randn(9, 20, dtype=torch.float64)
    for gate, equal in (("uniform", True), ("any", False)):
        levels = coefficients(plain.sizes, 9)
        if gate == "uniform":
            levels = [torch.ones_like(a_MN) for a_MN in levels]
        levels = [a_MN / a_MN.sum(1, keepdim=True) for a_MN in levels]
        expected = contract(full_tensor(name, noisy), z_MI, levels, bias=True)
        torch.testing.assert_close(noisy(z_MI, levels), expected)
        ours, exact = noisy(z_MI, levels), plain(z_MI, levels)
        assert torch.allclose(ours, exact, rtol=1e-5, atol=1e-5) == equal
    for factor in noisy.expert_factors():
        assert (factor[0] - factor[1]).abs().max() > 0.1
    if name == "tr":  # as in a new run, the diagonals alone
        assert not (noisy.expert_factor_0 * (1 - torch.eye(2))).any()
    again, *_ = fitted_layer(name, dense_CO, noise=1.0, **changes)
    assert torch.equal(again.expert_factor_0, noisy.expert_factor_0)


def test_identity_slices_give_a_ring_more_than_equal_entries_would():
    # U2 and U3 at their best: with slices of ones all paths are one, of rank R3 = 2.
    generator = np.random.default_rng(0)
    u2_CPR, u3_PRO = generator.normal(size=(20, 4, 2)), generator.normal(size=(4, 2, 14))
    for slice_PP, rank in ((np.eye(4), 8), (np.ones((4, 4)), 2), (np.diag([1, 0, 0, 0]), 2)):
        matrix_CO = np.einsum("pq,cqr,pro->co", slice_PP, u2_CPR, u3_PRO)
        assert np.linalg.matrix_rank(matrix_CO) == rank


@every_fitted
def test_a_matrix_of_zeros_leaves_nothing_out(name):
    layer, error, _ = fitted_layer(name, torch.zeros(21, 14, dtype=torch.float64), rank=3)
    assert error == 0.0
    assert not full_tensor(name, layer).any()


@every_fitted
def test_components_without_use_can_learn(name):
    """All components of a matrix of zeros: they begin as in a new run, and add nothing."""
    layer, error, first = fitted_layer(name, torch.zeros(21, 14), rank=6)
    assert error == 0
    assert torch.equal(layer.input_factor.float(), first)
    assert not layer.output_factor.any()
