"""Pools of experts by document: numbers worked out by hand, and a naive loop over documents."""

import pytest
import torch

from polyad.model.feedforward import BlockInput
from polyad.model.layers import RealTokens
from polyad.model.output import ask_for_statistics
from polyad.model.smoe.layer import SparseMoE
from polyad.model.smoe.router import Pool, document_starts, make_router, within
from tests.helpers.random_model import built
from tests.helpers.routing import logits_and_experts, make, make_config, make_context, scatter

END = 7


def documents_of(ids_T):
    """First and last position of each document, by looking at one token after the other."""
    found, first = [], 0
    for position, token in enumerate(ids_T):
        if token == END or position == len(ids_T) - 1:
            found.append((first, position))
            first = position + 1
    return found


def naive_pools(p_BTE, ids_BT, d, causal):
    """A loop over documents and tokens."""
    pool_BTE = torch.zeros_like(p_BTE, dtype=torch.bool)
    for p_TE, ids_T, pool_TE in zip(p_BTE, ids_BT.tolist(), pool_BTE, strict=True):
        for first, last in documents_of(ids_T):
            for t in range(first, last + 1):
                read_TE = p_TE[first : (t if causal else last) + 1]
                mean = (sum(read_TE) / len(read_TE)).tolist()
                for expert in sorted(range(len(mean)), key=lambda e: -mean[e])[:d]:
                    pool_TE[t, expert] = True
    return pool_BTE


def routed(pool, p_BTE, starts_BT=None, mask_BT=None, **options):
    """What a router gives in training whose score gives the logarithms of p, and these."""
    config = make_config(num_experts=p_BTE.shape[-1], pool=pool, **options)
    router = make_router(config, make_context())
    for parameter in router.parameters():
        parameter.data.zero_()
    for name, buffer in router.named_buffers():
        assert name.endswith("balancing_bias")
        buffer.copy_(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0]))
    ask_for_statistics(router, losses=frozenset({"balance_loss", "usage_E"}), samples=False)
    real = RealTokens.of(mask_BT)
    rows = p_BTE.flatten(0, 1) if real is None else p_BTE.flatten(0, 1)[real.rows_N]
    logits_NE = rows.log().requires_grad_()
    router.score.forward = lambda u_ND, features=None: logits_NE
    given = BlockInput(real=real, document_start_BT=starts_BT)
    return router(p_BTE.new_zeros(*p_BTE.shape[:2], 12), given), logits_NE


@pytest.mark.parametrize("pool", ["document", "prefix"])
@pytest.mark.parametrize("options", [{}, {"selection_bias": True}], ids=["plain", "bias"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_router_selects_within_pools(pool, options, padded):
    """Weights, balance loss and gradient by their definitions on q; also where a bias would have
    chosen others, and next to padding."""
    generator = torch.Generator().manual_seed(3)
    d, batch, length = 3, 3, 14
    ids_BT = torch.randint(5, 10, (batch, length), generator=generator)
    p_BTE = (2 * torch.randn(batch, length, 6, generator=generator)).double().softmax(-1)
    starts_BT = mask_BT = None
    if padded:  # a sample is one document
        mask_BT = torch.arange(length) < torch.tensor([[14], [5], [9]])
        ids_BT = torch.zeros(batch, length, dtype=torch.int64)
        naive_BTE = torch.zeros_like(p_BTE, dtype=torch.bool)
        for row, count in enumerate(mask_BT.sum(1).tolist()):
            part = p_BTE[row : row + 1, :count], ids_BT[row : row + 1, :count]
            naive_BTE[row, :count] = naive_pools(*part, d, pool == "prefix")[0]
        pool_NE, p_NE = naive_BTE[mask_BT], p_BTE[mask_BT]
    else:
        if pool == "prefix":
            starts_BT = document_starts(ids_BT, END)
        else:
            ids_BT = torch.zeros_like(ids_BT)
        pool_NE = naive_pools(p_BTE, ids_BT, d, pool == "prefix").flatten(0, 1)
        p_NE = p_BTE.flatten(0, 1)
    bounds = {"pool_least": d, "pool_most": d}
    (selected, stats), logits_NE = routed(pool, p_BTE, starts_BT, mask_BT, **bounds, **options)
    free_NE = logits_NE.detach().clone().requires_grad_()
    p_NE = free_NE.softmax(-1)
    q_NE = p_NE * pool_NE / (p_NE * pool_NE).sum(-1, keepdim=True)
    ranked_NE = q_NE.detach().clone()
    if options:
        ranked_NE += torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    best_NK = ranked_NE.masked_fill(~pool_NE, -1).topk(2).indices
    assert torch.equal(selected.expert_ids_NK, best_NK)
    weights_NK = q_NE.gather(1, best_NK)
    weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    torch.testing.assert_close(selected.weights_NK, weights_NK)
    torch.testing.assert_close(stats.usage_E, q_NE.mean(0))
    counts_E = torch.bincount(best_NK.flatten(), minlength=6) / best_NK.numel()
    balance = 6 * (counts_E * q_NE.mean(0)).sum()
    torch.testing.assert_close(stats.losses["balance_loss"], balance)
    sample = torch.randn(weights_NK.shape, generator=generator).double()
    (balance + (sample * weights_NK).sum()).backward()
    (stats.losses["balance_loss"] + (sample * selected.weights_NK).sum()).backward()
    torch.testing.assert_close(logits_NE.grad, free_NE.grad)


@pytest.mark.parametrize("pool", ["document", "prefix"])
def test_a_token_whose_scores_in_the_pool_are_0_stays_within(pool):
    # Expert 0 has all of the first token, experts 1 and 2 all of the others, in fp32 exactly.
    logits_TE = torch.tensor([[200.0, 0, 0, 0]] + [[0, 200.0, 200.0, 0]] * 5)
    p_TE = logits_TE.softmax(-1)
    assert p_TE[0].tolist() == [1, 0, 0, 0]
    config = make_config(num_experts=4, top_k=2, pool="document", pool_most=2)
    pool_TE = Pool(config)(p_TE[None])[0]
    q_TE = within(p_TE, pool_TE)
    assert q_TE[0].tolist() == [0, 0.5, 0.5, 0]
    assert q_TE.isfinite().all()
    (selected, _), _ = routed(pool, p_TE[None].clamp_min(1e-38), None, pool_most=2)
    if pool == "document":
        assert sorted(selected.expert_ids_NK[0].tolist()) == [1, 2]
    assert selected.weights_NK.isfinite().all()


def test_evaluation_and_pools_of_all_experts_change_nothing():
    u_BTD = torch.randn(2, 9, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with_pool = make(SparseMoE, make_config(pool="document", pool_least=2, pool_most=2))
    without = make(SparseMoE, make_config())
    torch.manual_seed(0)
    trained, _ = with_pool(u_BTD, u_BTD)
    whole, _ = without(u_BTD, u_BTD)
    assert (trained - whole).abs().max() > 0.01
    evaluated, _ = with_pool.eval()(u_BTD, u_BTD)
    assert torch.equal(evaluated, whole)
    every = make(SparseMoE, make_config(pool="document", pool_least=6))
    torch.testing.assert_close(every(u_BTD, u_BTD)[0], whole)


def test_sizes_are_drawn_anew_for_each_document_and_layer():
    ids_BT = torch.arange(4000).remainder(10).view(4, 1000)
    starts_BT = document_starts(ids_BT, END)
    p_BTE = torch.rand(4, 1000, 6).softmax(-1)
    module = Pool(make_config(pool="prefix", pool_least=2, pool_most=5))
    torch.manual_seed(4)
    first, second = (module(p_BTE, starts_BT).sum(-1) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert torch.equal(module(p_BTE, starts_BT).sum(-1), first)
    for row_T, first_T in zip(first, starts_BT, strict=True):
        for start in first_T.unique():
            assert len(row_T[first_T == start].unique()) == 1
    drawn = first.gather(1, starts_BT)[ids_BT == END]
    counts = torch.bincount(drawn, minlength=7)
    assert counts[[0, 1, 6]].sum() == 0
    assert all(60 < each < 140 for each in counts[2:6])  # of 400; 4.6 standard deviations


def test_pools_of_drawn_sizes_see_no_later_token(small_config):
    # Sequences of equal length, and the same random numbers.
    section = {"kind": "smoe", "num_experts": 8, "expert_hidden_size": 16, "pool": "prefix"}
    model = built(small_config(feed_forward=section, end_of_text_id=END), dtype=torch.float64)
    scatter(model)
    ids_BT = torch.arange(32).view(2, 16) + 25
    ids_BT[:, [3, 8, 14]] = END
    changed_BT = ids_BT.clone()
    changed_BT[:, 13] = 1
    chosen = []
    for each_BT in (ids_BT, changed_BT):
        torch.manual_seed(3)
        chosen.append(logits_and_experts(model, each_BT)[1])
    for ours, theirs in zip(*chosen, strict=True):
        assert torch.equal(ours[:, :13], theirs[:, :13])
