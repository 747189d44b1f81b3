"""Losses and measures, against numbers worked out by hand."""

import math

import pytest
import torch

from polyad.model.output import AUXILIARY_LOSSES, ask_for_statistics, entropy
from polyad.model.smoe.losses import importance_loss, load_balance_loss, load_loss, router_z_loss
from polyad.model.smoe.router import Selected, make_router
from tests.helpers.routing import make, make_config

SCORES = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)


def load(ids_NK, num_experts, dtype=torch.float32):
    return Selected.of(torch.ones(ids_NK.shape), ids_NK, num_experts).load(dtype)


def test_load_counts_more_than_the_low_precisions_can():
    # 300 of one expert and 100 of another: bf16 counts to 256.
    ids = torch.cat([torch.zeros(300, 1), torch.ones(100, 1)]).long()
    assert load(ids, 2).tolist() == [0.75, 0.25]


def test_balance_loss_equals_numbers_worked_out_by_hand():
    # P = (0.55, 0.2, 0.15, 0.1).
    # All on expert 0: 4 x 0.55. On 0, 1, 0, 2: 4 (0.5 x 0.55 + 0.25 x 0.2 + 0.25 x 0.15).
    for load_E, expected in (([1.0, 0, 0, 0], 2.2), ([0.5, 0.25, 0.25, 0], 1.45)):
        loss = load_balance_loss(SCORES.mean(0), torch.tensor(load_E, dtype=torch.float64))
        torch.testing.assert_close(loss.item(), expected)


def test_the_balance_of_sequences_is_of_scores_without_bias_groups_noise_and_graph():
    options = {"score_function": "sigmoid", "num_experts": 6, "top_k": 2}
    plain = make(make_router, make_config(**options))
    other = make(
        make_router,
        make_config(
            **options, num_groups=3, top_groups=1, balancing_rate=0.1, router_noise=2.0,
            graph="similarity",
        ),
    )  # fmt: skip
    other.selection.balancing_bias += torch.randn(6, dtype=torch.float64)
    other.score.load_state_dict(plain.score.state_dict())
    u_BTD = torch.randn(3, 9, 12, dtype=torch.float64)
    asked = frozenset({"sequence_loss"})
    for router in (plain, other):
        assert router(u_BTD)[1].losses.get("sequence_loss") is None
        ask_for_statistics(router, losses=asked, samples=False)
    (ids, loss), (others, theirs) = (
        (selected.expert_ids_NK, stats.losses["sequence_loss"])
        for selected, stats in (router(u_BTD) for router in (plain, other))
    )
    assert not torch.equal(ids, others)
    s_BTE = plain.score(u_BTD.flatten(0, 1)).sigmoid().view(3, 9, 6)
    by_hand = 0
    for s_TE, e_TK in zip(s_BTE, ids.view(3, 9, 2), strict=True):
        p_E = (s_TE / s_TE.sum(-1, keepdim=True)).mean(0)
        by_hand += sum(6 / (2 * 9) * (e_TK == e).sum() * p_E[e] for e in range(6))
    torch.testing.assert_close(loss, by_hand / 3)
    torch.testing.assert_close(theirs, loss)
    router = plain.eval()
    assert router(u_BTD)[1].losses.get("sequence_loss") is None


def test_z_loss_equals_numbers_worked_out_by_hand():
    # logsumexp: ln 2 and ln(3 + 1); (0.4804530 + 1.9218121) / 2.
    logits_NE = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]], requires_grad=True)
    loss = router_z_loss(logits_NE)
    torch.testing.assert_close(loss.item(), 1.2011325, atol=1e-6, rtol=0)
    loss.backward()
    # (2 / N) logsumexp softmax: ln 2 x (1/2, 1/2) and ln 4 x (3/4, 1/4).
    expected = [[0.3465736, 0.3465736], [1.0397208, 0.3465736]]
    torch.testing.assert_close(logits_NE.grad, torch.tensor(expected))


def test_importance_loss_equals_numbers_worked_out_by_hand():
    # Sums 1.1, 0.4, 0.3, 0.2: mean 0.5, variance (0.36 + 0.01 + 0.04 + 0.09) / 4 = 0.125.
    scores_NE = SCORES.clone().requires_grad_()
    loss = importance_loss(scores_NE.mean(0))
    torch.testing.assert_close(loss.item(), 0.125 / 0.25)
    loss.backward()
    # Of sums s: (2 / 4) (s - 0.5) / 0.25; the mean over tokens does not change.
    expected = torch.tensor([1.2, -0.2, -0.4, -0.6], dtype=torch.float64)
    centred = scores_NE.grad[0] - scores_NE.grad[0].mean()
    torch.testing.assert_close(centred, expected)
    even = importance_loss(torch.full((3,), 1 / 3))
    assert even.item() < 1e-12


def test_load_loss_equals_numbers_worked_out_by_hand():
    # K 1, noise of 0.5. Token 1: logits 1, 0, 0 and with noise 1.5, 0, 0: to be chosen an expert
    # needs (1.5 - 1) / 0.5 = 1 and (1.5 - 0) / 0.5 = 3 deviations, twice. Token 2: logits 0, 0, 1,
    # with noise 0, 0, 1: 2, 2 and 0 deviations. Tails of the normal distribution above 0, 1, 2, 3:
    # 0.5, 0.1586553, 0.0227501, 0.0013499. Means: 0.0907027, 0.0120500, 0.2506749, mean of these
    # 0.1178092; variance (0.00073477 + 0.01118503 + 0.01765317) / 3 = 0.00985766.
    logits_NE = torch.tensor([[1.0, 0, 0], [0, 0, 1]], dtype=torch.float64)
    noisy_NE = torch.tensor([[1.5, 0, 0], [0, 0, 1]], dtype=torch.float64)
    loss = load_loss(logits_NE, noisy_NE, 0.5, 1)
    torch.testing.assert_close(loss.item(), 0.7102645, atol=1e-5, rtol=0)
    # K 2: the second highest, 0 and 0, is 0 deviations from the logits 0, and -2 from 1.
    two = load_loss(logits_NE, noisy_NE, 0.5, 2)
    means = torch.tensor([0.9772499 + 0.5, 0.5 + 0.5, 0.5 + 0.9772499]) / 2
    torch.testing.assert_close(two.item(), (means.var(correction=0) / means.mean() ** 2).item())


def test_load_loss_has_the_gradient_of_differences():
    noise_NE = 0.3 * torch.randn(9, 5, dtype=torch.float64)
    logits_NE = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: load_loss(x, x + noise_NE, 0.3, 2), logits_NE)


@pytest.mark.parametrize("graph", ["none", "similarity"])
def test_a_noisy_router_reports_the_losses_of_its_own_noise(graph):
    router = make(make_router, make_config(router_noise=1.5, graph=graph))
    u_BTD = torch.randn(2, 9, 12, dtype=torch.float64)
    torch.manual_seed(5)
    selected, stats = router(u_BTD)
    expert_ids_NK = selected.expert_ids_NK
    torch.manual_seed(5)
    logits_NE = router.score(u_BTD.flatten(0, 1))
    noisy_NE = logits_NE + 1.5 / 6 * torch.randn(18, 6, dtype=torch.float64)
    p_BTE = router.graph(noisy_NE.softmax(-1).unflatten(0, (2, 9)), u_BTD).scores_BTE
    assert torch.equal(expert_ids_NK, p_BTE.flatten(0, 1).topk(2).indices)
    torch.testing.assert_close(stats.losses["load_loss"], load_loss(logits_NE, noisy_NE, 0.25, 2))
    mean_E = logits_NE.softmax(-1).mean(0)
    torch.testing.assert_close(stats.losses["importance_loss"], importance_loss(mean_E))
    torch.testing.assert_close(stats.losses["z_loss"], router_z_loss(logits_NE))
    router.eval()
    plain = make(make_router, make_config(graph=graph)).eval()
    stats = router(u_BTD)[1]
    assert not stats.losses
    assert torch.equal(router(u_BTD)[0].weights_NK, plain(u_BTD)[0].weights_NK)


@pytest.mark.parametrize("asked", [set(), {"z_loss"}, {"balance_loss", "load_loss"}])
def test_losses_that_are_not_asked_for_have_a_value_and_no_gradient(asked):
    router = make(make_router, make_config(router_noise=1.5, graph="similarity"))
    u_BTD = torch.randn(2, 9, 12, dtype=torch.float64)
    torch.manual_seed(5)
    every = router(u_BTD)[1].losses
    ask_for_statistics(router, losses=frozenset(asked), samples=False)
    torch.manual_seed(5)
    some = router(u_BTD)[1].losses
    for name in AUXILIARY_LOSSES:
        assert torch.equal(some[name], every[name]), name
        assert some[name].requires_grad == (name in asked), name
        assert every[name].requires_grad, name


def test_entropy_is_that_of_a_distribution_and_nan_stays():
    scores = 4 * torch.randn(3, 7, 50, dtype=torch.float64)
    expected = torch.distributions.Categorical(logits=scores).entropy()
    torch.testing.assert_close(entropy(scores.softmax(-1)), expected)
    assert entropy(torch.tensor([float("nan"), 0.5])).isnan()
