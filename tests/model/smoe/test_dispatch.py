"""Dispatch: by numbers worked out by hand, and against plain indexing.

Shapes: N tokens, K experts of a token, M rows, E experts, D width.
"""

from contextlib import nullcontext

import pytest
import torch

from polyad.model.kernels import grouped
from polyad.model.smoe.experts import Experts
from polyad.model.smoe.layer import Dispatcher, make_plan
from polyad.model.smoe.router import Selected, count
from tests.helpers.definitions import by_definition
from tests.helpers.routing import make, make_config, make_context

IDS = torch.tensor([[2, 0], [0, 1], [2, 0]])


def random_ids(tokens, top_k, experts):
    return torch.rand(tokens, experts).argsort(-1)[:, :top_k]


# Experts of each token, their number, and the capacity factor.
CASES = {
    "mixed": (random_ids(9, 2, 4), 4, None),
    "one token": (torch.tensor([[3, 1]]), 4, None),
    "one expert of each": (random_ids(7, 1, 4), 4, None),
    "all to one expert": (torch.full((6, 1), 2), 4, None),
    "all experts": (random_ids(5, 4, 4), 4, None),
    "capacity": (IDS, 4, 1.0),
    "all to one expert with a capacity": (torch.full((6, 1), 2), 4, 1.0),
    "capacity that drops nothing": (random_ids(9, 2, 4), 4, 4.0),
}
every_case = pytest.mark.parametrize(("ids", "experts", "factor"), CASES.values(), ids=CASES)


def plan_of(ids, experts, *others, **named):
    return make_plan(ids, count(ids, experts), *others, **named)


def take_rows(tokens_ND, plan):
    top_k = max(1, len(plan.row_A) // max(1, len(tokens_ND)))
    return grouped.take(tokens_ND, plan.assignment_M, plan.row_A, top_k)


def combine(rows_MD, weights_NK, plan):
    return grouped.combine(rows_MD, weights_NK, plan.assignment_M, plan.row_A)


def taken(plan):
    """The assignments that experts take."""
    return plan.assignment_M[plan.kept_M()].tolist()


def test_plan_with_a_capacity_equals_numbers_worked_out_by_hand():
    # An even share is 6 / 4 = 1.5, rounded up to 2: expert 0 lets go of its last, assignment 5.
    plan = plan_of(IDS, 4, capacity_factor=1.0)
    assert plan.assignment_M.tolist() == [1, 2, 3, 0, 4, 5]
    assert plan.row_A.tolist() == [3, 0, 1, 2, 4, 5]
    assert plan.kept_M().tolist() == [True] * 5 + [False]
    assert plan.counts_E.tolist() == [2, 1, 2, 0]


@pytest.mark.parametrize(
    ("factor", "capacity"),
    # Of an even share of 10. In floating point 1.1 x 50 / 5 is 11.000000000000002.
    [(0.01, 1), (0.5, 5), (1.0, 10), (1.01, 11), (1.1, 11), (1.5, 15), (9.0, 50)],
)
def test_capacity_is_a_multiple_of_the_even_share_rounded_up(factor, capacity):
    plan = plan_of(torch.zeros(50, 1, dtype=torch.int64), 5, factor)
    assert plan.counts_E.tolist() == [capacity, 0, 0, 0, 0]
    assert taken(plan) == list(range(capacity))  # the first come


@every_case
def test_gradients_of_taking_and_combining_equal_differences(ids, experts, factor):
    plan = plan_of(ids, experts, factor)
    tokens_ND = torch.randn(len(ids), 3, dtype=torch.float64, requires_grad=True)
    weights_NK = torch.rand(ids.shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda t, w: combine(take_rows(t, plan).square(), w, plan), (tokens_ND, weights_NK)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_sums_over_experts_are_rounded_once(top_k, dtype):
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(50, 8, generator=generator).argsort(-1)[:, :top_k]
    plan = plan_of(ids, 8)
    rows_MD = torch.randn(50 * top_k, 6, generator=generator).to(dtype)
    weights_NK = torch.rand(50, top_k, generator=generator).to(dtype)
    tokens_ND = torch.zeros(50, 6, dtype=dtype, requires_grad=True)
    take_rows(tokens_ND, plan).backward(rows_MD)
    wide_NKD = rows_MD.double()[plan.row_A].view(50, top_k, 6)
    combined_ND = (wide_NKD * weights_NK.double().unsqueeze(-1)).sum(1)
    tolerance = {"rtol": torch.finfo(dtype).eps / 2 + 1e-6, "atol": 1e-6}
    for actual, expected in (
        (tokens_ND.grad, wide_NKD.sum(1)),
        (combine(rows_MD, weights_NK, plan), combined_ND),
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, **tolerance)


@every_case
@pytest.mark.parametrize("way", [nullcontext, by_definition])
def test_dispatch_equals_a_loop_over_tokens_and_experts(ids, experts, factor, way):
    config = make_config(num_experts=experts, top_k=ids.shape[1])
    module = make(Experts, config, make_context(hidden_size=3))
    tokens_ND = torch.randn(len(ids), 3, dtype=torch.float64)
    weights_NK = torch.rand(ids.shape, dtype=torch.float64)
    selected = Selected.of(weights_NK, ids, experts)
    with way():
        y_ND, plan, *_ = Dispatcher()(tokens_ND, selected, module, factor)
    expected_ND = torch.zeros_like(y_ND)
    room = [len(ids) * ids.shape[1]] * experts
    if factor is not None:
        room = [-(-int(factor * room[0]) // experts)] * experts
    for n, chosen in enumerate(ids.tolist()):
        for k, expert in enumerate(chosen):
            room[expert] -= 1
            if room[expert] >= 0:
                one = [int(other == expert) for other in range(experts)]
                output = module(tokens_ND[n : n + 1], torch.tensor(one))
                expected_ND[n] += weights_NK[n, k] * output[0]
    torch.testing.assert_close(y_ND, expected_ND)
    assert torch.equal(plan.counts_E, plan_of(ids, experts, factor).counts_E)
