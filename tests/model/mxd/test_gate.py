"""The sparse gate: the K best of all sums of scores, and what relu leaves of them."""

import pytest
import torch

from polyad.model.mxd import SparseGate, best_sums


@pytest.mark.parametrize(
    ("levels", "top_k"), [((7,), 3), ((5, 6), 4), ((5, 6), 30), ((3, 4, 5), 17), ((40, 40), 32)]
)
def test_best_sums_are_those_of_all_sums(levels, top_k):
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(50, number, generator=generator) for number in levels]
    sums_MN = scores[0]
    for level_MN in scores[1:]:
        sums_MN = (sums_MN.unsqueeze(2) + level_MN.unsqueeze(1)).flatten(1)
    values_MK, ids_MK = sums_MN.topk(top_k, dim=1)
    found_MK = best_sums(scores, top_k)
    torch.testing.assert_close(sums_MN.gather(1, found_MK), values_MK)
    assert torch.equal(found_MK, ids_MK)


def gate_of(levels, top_k, width=6):
    gate = SparseGate(levels, width, top_k)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    return gate.double()


@pytest.mark.parametrize("levels", [(12,), (3, 4)])
def test_weights_are_relu_of_the_sums_and_have_their_gradient(levels):
    gate = gate_of(levels, top_k=5)
    u_MD = torch.randn(30, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    selected = gate(u_MD)
    parts = (u_MD @ gate.weight.T + gate.bias).split(list(levels), dim=1)
    sums_MN = parts[0] if len(parts) == 1 else (parts[0][:, :, None] + parts[1][:, None]).flatten(1)
    weights_MK, ids_MK = sums_MN.topk(5, dim=1)
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
    gate = SparseGate((16,), 16, 8)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(16))
        gate.bias.zero_()
    u_MD = torch.randn(20_000, 16, generator=torch.Generator().manual_seed(0))
    active_M = (gate(u_MD).weights_NK > 0).sum(1)
    assert (active_M < 8).double().mean().item() == pytest.approx(0.402, abs=0.012)
