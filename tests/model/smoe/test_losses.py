"""Losses and measures, against numbers worked out by hand."""

import math

import pytest
import torch

from model.smoe.losses import load, load_balance_loss, mean_entropy, router_z_loss
from model.smoe.router import Router
from tests.helpers.routing import make, make_config

SCORES = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)


def test_load_equals_numbers_worked_out_by_hand():
    # Four assignments: two of expert 0, one of 1, one of 2.
    load_E = load(torch.tensor([[0, 1], [0, 2]]), 4)
    assert load_E.tolist() == [0.5, 0.25, 0.25, 0.0]


def test_load_counts_more_than_the_low_precisions_can():
    # 300 of one expert and 100 of another: bf16 counts to 256.
    ids = torch.cat([torch.zeros(300, 1), torch.ones(100, 1)]).long()
    assert load(ids, 2).tolist() == [0.75, 0.25]


def test_balance_loss_equals_numbers_worked_out_by_hand():
    # P = (0.55, 0.2, 0.15, 0.1).
    # All on expert 0: 4 x 0.55. On 0, 1, 0, 2: 4 (0.5 x 0.55 + 0.25 x 0.2 + 0.25 x 0.15).
    for load_E, expected in (([1.0, 0, 0, 0], 2.2), ([0.5, 0.25, 0.25, 0], 1.45)):
        loss = load_balance_loss(SCORES, torch.tensor(load_E, dtype=torch.float64))
        torch.testing.assert_close(loss.item(), expected)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_balance_loss_is_one_at_uniform_load_for_any_k(top_k):
    # Token n uses the experts n, n + 1, ... modulo 6.
    ids_NK = (torch.arange(12)[:, None] + torch.arange(top_k)) % 6
    scores_NE = torch.randn(12, 6, dtype=torch.float64).softmax(-1)
    loss = load_balance_loss(scores_NE, load(ids_NK, 6, torch.float64))
    torch.testing.assert_close(loss.item(), 1.0)


def test_balance_loss_pushes_down_the_scores_of_busy_experts():
    scores_NE = SCORES.clone().requires_grad_()
    load_E = torch.tensor([0.75, 0.25, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    load_balance_loss(scores_NE, load_E).backward()
    # E f_e / N = 4 f_e / 2.
    assert scores_NE.grad.tolist() == [[1.5, 0.5, 0.0, 0.0]] * 2
    assert load_E.grad is None


def test_z_loss_equals_numbers_worked_out_by_hand():
    # logsumexp: ln 2 and ln(3 + 1); (0.4804530 + 1.9218121) / 2.
    logits_NE = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]], requires_grad=True)
    loss = router_z_loss(logits_NE)
    torch.testing.assert_close(loss.item(), 1.2011325, atol=1e-6, rtol=0)
    loss.backward()
    # (2 / N) logsumexp softmax: ln 2 x (1/2, 1/2) and ln 4 x (3/4, 1/4).
    expected = [[0.3465736, 0.3465736], [1.0397208, 0.3465736]]
    torch.testing.assert_close(logits_NE.grad, torch.tensor(expected))


def test_entropy_equals_numbers_worked_out_by_hand():
    # ln 2, 0 and ln 3 = (0.6931472 + 0 + 1.0986123) / 3; a score of zero counts nothing.
    third = 1 / 3
    scores_NE = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [third, third, third]])
    torch.testing.assert_close(mean_entropy(scores_NE).item(), 0.5972532, atol=1e-6, rtol=0)


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_router_reports_the_losses_of_its_own_choice(top_k):
    router = make(Router, make_config(top_k=top_k, graph="similarity"))
    u_BTD = torch.randn(2, 9, 12, dtype=torch.float64)
    (_, expert_ids_NK), stats = router(u_BTD)
    logits_NE = router.score(u_BTD.flatten(0, 1))
    r_BTE = logits_NE.softmax(-1).unflatten(0, (2, 9))
    p_NE = router.graph(r_BTE, u_BTD).scores_BTE.flatten(0, 1)  # the scores that top-K sees
    share_E = expert_ids_NK.flatten().bincount(minlength=6).double() / expert_ids_NK.numel()
    torch.testing.assert_close(stats.load_E, share_E)
    torch.testing.assert_close(stats.balance_loss, 6 * (share_E * p_NE.mean(0)).sum())
    torch.testing.assert_close(stats.z_loss, logits_NE.logsumexp(-1).square().mean())
    torch.testing.assert_close(stats.entropy, -(p_NE * p_NE.log()).sum(-1).mean())
    assert stats.dropped.item() == 0
    assert not stats.entropy.requires_grad
    (stats.balance_loss + stats.z_loss).backward()
    assert router.score.weight.grad.abs().max() > 1e-4
