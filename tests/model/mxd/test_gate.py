"""The sparse gate: the K highest scores, and what relu leaves of them."""

import pytest
import torch

from polyad.model.mxd import SparseGate


def gate_of(num_experts, top_k, width=6):
    gate = SparseGate(num_experts, width, top_k)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    return gate.double()


def test_weights_are_relu_of_the_scores_and_have_their_gradient():
    gate = gate_of(12, top_k=5)
    u_MD = torch.randn(30, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    selected = gate(u_MD)
    weights_MK, ids_MK = (u_MD @ gate.weight.T + gate.bias).topk(5, dim=1)
    assert torch.equal(selected.expert_ids_NK, ids_MK)
    torch.testing.assert_close(selected.weights_NK, weights_MK.relu())
    used_MK = weights_MK > 0
    assert not used_MK.all()  # fewer than K are active for some tokens
    assert torch.equal(selected.counts_E, ids_MK[used_MK].bincount(minlength=12))
    found = torch.autograd.grad(selected.weights_NK.square().sum(), list(gate.parameters()))
    expected = torch.autograd.grad(weights_MK.relu().square().sum(), list(gate.parameters()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_relu_before_top_k_leaves_fewer_than_k():
    # METHODS-2: scores N(0, 1), 16 experts, K 8: 42% of tokens have fewer than 8 active. In theory
    # the chance that fewer than 8 of 16 are positive, sum_(i < 8) C(16, i) / 2^16 = 0.4018.
    gate = SparseGate(16, 16, 8)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(16))
        gate.bias.zero_()
    u_MD = torch.randn(20_000, 16, generator=torch.Generator().manual_seed(0))
    active_M = (gate(u_MD).weights_NK > 0).sum(1)
    assert (active_M < 8).double().mean().item() == pytest.approx(0.402, abs=0.012)
