"""Top-K, its weights, the balancing bias and the schedule of K."""

import pytest
import torch

from polyad.model.build import place
from polyad.model.kernels import switch
from polyad.model.smoe.router import MOST_ROUNDS, TopK, in_rounds
from tests.helpers.random_model import drawn
from tests.helpers.routing import make_config

SCORES = [0.1, 0.5, 0.15, 0.25]


def selection(**overrides):
    return drawn(lambda: TopK(make_config(**{"num_experts": 4} | overrides)))


def weights_of(scores, bias=None, **options):
    """The experts that are chosen by these scores, and their weights."""
    module = selection(num_experts=len(scores), **options)
    if bias is not None:
        module.balancing_bias.copy_(torch.tensor(bias))
    chosen = module(torch.tensor([scores], dtype=torch.float64))
    ids, weights = chosen.expert_ids_NK[0].tolist(), chosen.weights_NK[0].tolist()
    return dict(zip(ids, weights, strict=True))


@pytest.mark.parametrize(
    ("top_k", "combine", "weights"),
    [
        (1, "auto", [0.5]),  # the score itself
        (2, "auto", [2 / 3, 1 / 3]),  # 0.5 and 0.25, divided by 0.75
        (3, "auto", [5 / 9, 5 / 18, 1 / 6]),  # divided by 0.9
        (4, "auto", [0.5, 0.25, 0.15, 0.1]),
        (1, "scores", [0.5]),  # V-MoE's, of all experts
        (3, "scores", [0.5, 0.25, 0.15]),
        (1, "sum_to_one", [1.0]),
    ],
)
def test_weights_equal_numbers_worked_out_by_hand(top_k, combine, weights):
    found = weights_of(SCORES, top_k=top_k, combine=combine)
    assert list(found) == [1, 3, 2, 0][:top_k]
    assert list(found.values()) == pytest.approx(weights)


@pytest.mark.parametrize("combine", ["auto", "scores"])
@pytest.mark.parametrize("top_k", [1, 3, MOST_ROUNDS, 16])
def test_a_gpu_selects_in_rounds_what_sorting_selects(top_k, combine):
    module = selection(num_experts=16, top_k=top_k, combine=combine, balancing_rate=0.01)
    scores_NE = torch.randn(300, 16).softmax(-1).requires_grad_()
    results = []
    for compiled in (False, True):
        with switch.without_numbers(on_gpu=True, compiled=compiled):
            selected = module(scores_NE)
        (gradient_NE,) = torch.autograd.grad(selected.weights_NK.square().sum(), scores_NE)
        results.append((selected.expert_ids_NK, selected.weights_NK, gradient_NE))
    assert all(map(torch.equal, *results))


def test_of_equal_scores_rounds_take_the_lowest_number_and_none_twice():
    none = -torch.inf
    scores_NE = torch.tensor([[1.0, 3.0, 3.0, 1.0], [none, none, 2.0, none], [none] * 4])
    assert in_rounds(scores_NE, 3).tolist() == [[1, 2, 0], [2, 0, 1], [0, 1, 2]]


def test_balancing_bias_chooses_and_weighs_nothing():
    options = {"top_k": 2, "balancing_rate": 0.1}
    # 0.1, 0.1, 0.35, 0.25: the third and fourth, with 0.15 and 0.25 divided by 0.4.
    found = weights_of(SCORES, [0.0, -0.4, 0.2, 0.0], **options)
    assert found == pytest.approx({2: 0.375, 3: 0.625})
    # Experts whose scores are 0 keep that weight.
    found = weights_of([0.0, 0.6, 0.0, 0.4], [1.0, 0.0, 1.0, 0.0], combine="scores", **options)
    assert found == {0: 0.0, 2: 0.0}


def test_experts_whose_scores_are_zero_share_alike_when_the_bias_chooses_them():
    # exp(-300) is 0 in fp32, and 0 / 0 is NaN. A row whose scores are not stays as it is.
    module = selection(top_k=2, balancing_rate=0.1)
    module.balancing_bias.copy_(torch.tensor([-1.0, -1.0, 1.0, 1.0]))
    logits_NE = torch.tensor([[300.0, 0, 0, 0], [0, 0, 0, 1.0986123]], requires_grad=True)
    selected = module(logits_NE.softmax(-1))
    assert selected.expert_ids_NK.sort().values.tolist() == [[2, 3], [2, 3]]
    torch.testing.assert_close(
        selected.weights_NK.sort().values, torch.tensor([[0.5, 0.5], [0.25, 0.75]])
    )
    (selected.weights_NK * torch.tensor([1.0, 3.0])).sum().backward()
    assert logits_NE.grad.isfinite().all()
    assert logits_NE.grad[1].abs().max() > 0.1


def test_balancing_bias_moves_by_the_rate_towards_even_load():
    module = selection(top_k=2, balancing_rate=0.1)
    assert module.balancing_bias.tolist() == [0, 0, 0, 0]
    module(torch.tensor([SCORES]))  # only reads
    assert module.balancing_bias.tolist() == [0, 0, 0, 0]
    # Even is 0.25: too much, even, a little too little, nothing.
    for times in (1, 2):
        module.update(torch.tensor([0.5, 0.25, 0.2, 0.05]), progress=0.5)
        expected = times * torch.tensor([-0.1, 0.0, 0.1, 0.1])
        torch.testing.assert_close(module.balancing_bias, expected)


@pytest.mark.parametrize(
    ("progress", "top_k"),
    # From 1 to 4: four values, a quarter of the run each.
    [(0.0, 1), (0.24, 1), (0.25, 2), (0.5, 3), (0.99, 4), (1.0, 4)],
)
def test_k_grows_linearly(progress, top_k):
    module = selection(top_k=1, final_top_k=4)
    module.update(torch.full((4,), 0.25), progress)
    assert module(torch.tensor([SCORES])).expert_ids_NK.shape == (1, top_k)
    assert module.num_selected.item() == top_k


def test_k_grows_in_spite_of_rounding_and_does_not_shrink_where_a_run_is_made_longer():
    # 22 values in 22 steps: one each. In floating point 15 / 22 x 22 is less than 15.
    module = selection(num_experts=22, top_k=1, final_top_k=22)
    for step in range(1, 23):
        module.update(torch.full((22,), 1 / 22), step / 22)
        assert module.top_k == min(1 + step, 22)
    module.update(torch.full((22,), 1 / 22), 0.5)
    assert module.top_k == 22


def test_k_is_read_from_the_buffer_when_it_was_loaded(small_model, random_ids):
    model = small_model(feed_forward={"kind": "smoe", "top_k": 2, "final_top_k": 8})
    stored = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert set(stored) == {
        f"blocks.{n}.feed_forward.router.selection.num_selected" for n in range(3)
    }
    assert [block.feed_forward.router.selection.top_k for block in model.blocks] == [2, 2, 2]
    with torch.no_grad():
        few = model(random_ids(2, 16)).logits
        place(model, ((name, torch.tensor(5.0)) for name in stored))
        assert [block.feed_forward.router.selection.top_k for block in model.blocks] == [5, 5, 5]
        loaded = model(random_ids(2, 16)).logits
        fixed = small_model(feed_forward={"kind": "smoe", "top_k": 5})(random_ids(2, 16)).logits
    assert torch.equal(loaded, fixed)
    assert not torch.equal(loaded, few)


def test_experts_that_are_forced_and_have_no_score_weigh_the_same():
    module = selection(top_k=2)
    module.forced = lambda ids_NK: torch.full_like(ids_NK, 2) + torch.tensor([0, 1])
    selected = module(torch.tensor([[0.75, 0.25, 0.0, 0.0], [0.5, 0.0, 0.125, 0.375]]))
    assert selected.expert_ids_NK.tolist() == [[2, 3], [2, 3]]
    assert selected.weights_NK.tolist() == [[0.5, 0.5], [0.25, 0.75]]


def test_groups_of_deepseek_by_hand():
    """V3: groups score 1.0, 1.4 (with the bias of 0.3) and 0.95: the third is left out, whose 0.85
    is the second highest of all without groups. In V2 the best of a group is its score."""
    scores, bias = [0.9, 0.1, 0.6, 0.5, 0.85, 0.1], [0.0, 0.0, 0.0, 0.3, 0.0, 0.0]
    options = {"score_function": "sigmoid", "combine": "sum_to_one", "routed_scaling_factor": 2.5}
    options |= {"selection_bias": True}
    groups = {"num_groups": 3, "top_groups": 2, "group_score": "best_two"}
    found = weights_of(scores, bias, **options, **groups)
    assert found == pytest.approx({0: 2.5 * 0.9 / 1.4, 3: 2.5 * 0.5 / 1.4})
    found = weights_of(scores, bias, **options)
    assert found == pytest.approx({0: 2.5 * 0.9 / 1.75, 4: 2.5 * 0.85 / 1.75})
    options = {"num_groups": 3, "top_groups": 1, "combine": "scores", "routed_scaling_factor": 4.0}
    found = weights_of([0.05, 0.3, 0.2, 0.25, 0.15, 0.05], **options)
    assert found == pytest.approx({0: 0.2, 1: 1.2})
