"""Top-K, its weights, the balancing bias and the schedule of K."""

import pytest
import torch

from polyad.model.build import materialize, place
from polyad.model.smoe.router import TopK
from tests.helpers.routing import make_config

SCORES = torch.tensor([[0.1, 0.5, 0.15, 0.25]], dtype=torch.float64)


def selection(**overrides):
    with torch.device("meta"):
        module = TopK(make_config(**{"num_experts": 4} | overrides))
    materialize(module, seed=0)
    return module


@pytest.mark.parametrize(
    ("top_k", "ids", "weights"),
    [
        (1, [1], [0.5]),  # the score itself
        (2, [1, 3], [2 / 3, 1 / 3]),  # 0.5 and 0.25, divided by 0.75
        (3, [1, 3, 2], [5 / 9, 5 / 18, 1 / 6]),  # divided by 0.9
        (4, [1, 3, 2, 0], [0.5, 0.25, 0.15, 0.1]),
    ],
)
def test_weights_equal_numbers_worked_out_by_hand(top_k, ids, weights):
    selected = selection(top_k=top_k)(SCORES)
    assert selected.expert_ids_NK.tolist() == [ids]
    assert selected.expert_ids_NK.dtype == torch.int64
    expected = torch.tensor([weights], dtype=torch.float64)
    torch.testing.assert_close(selected.weights_NK, expected)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_weights_of_vmoe_are_the_softmax_of_all_experts(top_k):
    selected = selection(top_k=top_k, combine="softmax")(SCORES)
    assert selected.expert_ids_NK.tolist() == [[1, 3, 2, 0][:top_k]]
    expected = torch.tensor([[0.5, 0.25, 0.15, 0.1][:top_k]], dtype=torch.float64)
    torch.testing.assert_close(selected.weights_NK, expected)


def test_experts_whose_scores_are_0_keep_that_weight():
    module = selection(top_k=2, combine="softmax", balancing_rate=0.1)
    module.balancing_bias.copy_(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    scores_NE = torch.tensor([[0.0, 0.6, 0.0, 0.4]], dtype=torch.float64)
    assert module(scores_NE).weights_NK.tolist() == [[0.0, 0.0]]


def test_renormalized_softmax_is_the_softmax_of_the_highest_logits():
    logits_NE = torch.randn(50, 4, dtype=torch.float64)
    selected = selection(top_k=3)(logits_NE.softmax(-1))
    expected = logits_NE.gather(1, selected.expert_ids_NK).softmax(-1)
    torch.testing.assert_close(selected.weights_NK, expected)
    torch.testing.assert_close(expected, logits_NE.topk(3).values.softmax(-1))


@pytest.mark.parametrize("top_k", [1, 2])
def test_scores_get_a_gradient_for_any_k(top_k):
    logits_NE = torch.randn(50, 4, dtype=torch.float64, requires_grad=True)
    weights_NK = selection(top_k=top_k)(logits_NE.softmax(-1)).weights_NK
    weights_NK[:, 0].sum().backward()
    assert (logits_NE.grad.abs().amax(-1) > 1e-4).all()


def test_balancing_bias_chooses_and_weighs_nothing():
    module = selection(top_k=2, balancing_rate=0.1)
    module.balancing_bias.copy_(torch.tensor([0.0, -0.4, 0.2, 0.0]))
    # 0.1, 0.1, 0.35, 0.25: the third and fourth, with 0.15 and 0.25 divided by 0.4.
    selected = module(SCORES)
    assert selected.expert_ids_NK.tolist() == [[2, 3]]
    expected = torch.tensor([[0.375, 0.625]], dtype=torch.float64)
    torch.testing.assert_close(selected.weights_NK, expected)


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
    module(SCORES)  # only reads
    assert module.balancing_bias.tolist() == [0, 0, 0, 0]
    # Even is 0.25: too much, even, a little too little, nothing.
    for times in (1, 2):
        module.update(torch.tensor([0.5, 0.25, 0.2, 0.05]), progress=0.5)
        expected = times * torch.tensor([-0.1, 0.0, 0.1, 0.1])
        torch.testing.assert_close(module.balancing_bias, expected)


def test_balancing_evens_out_a_constant_preference():
    generator = torch.Generator().manual_seed(0)
    scores_NE = torch.randn(400, 4, generator=generator).add(torch.tensor([1.0, 0, 0, -1]))
    scores_NE = scores_NE.softmax(-1)
    module = selection(top_k=1, balancing_rate=0.01)

    def load_E():
        return module(scores_NE).expert_ids_NK.flatten().bincount(minlength=4) / 400

    assert load_E().max() > 0.5
    for _ in range(100):
        module.update(load_E(), progress=0.0)
    assert load_E().max() < 0.3


def test_without_options_there_is_no_buffer():
    assert list(selection().named_buffers()) == []


@pytest.mark.parametrize(
    ("progress", "top_k"),
    # From 1 to 4: four values, a quarter of the run each.
    [(0.0, 1), (0.24, 1), (0.25, 2), (0.49, 2), (0.5, 3), (0.75, 4), (0.99, 4), (1.0, 4)],
)
def test_k_grows_linearly(progress, top_k):
    module = selection(top_k=1, final_top_k=4)
    module.update(torch.full((4,), 0.25), progress)
    assert module(SCORES).expert_ids_NK.shape == (1, top_k)
    assert module.num_selected.item() == top_k


def test_k_grows_at_the_step_that_it_should_in_spite_of_rounding():
    # 22 values in 22 steps: one each. In floating point 15 / 22 x 22 is less than 15.
    module = selection(num_experts=22, top_k=1, final_top_k=22)
    for step in range(1, 23):
        module.update(torch.full((22,), 1 / 22), step / 22)
        assert module.top_k == min(1 + step, 22)


def test_k_does_not_shrink_where_a_run_is_made_longer():
    module = selection(top_k=1, final_top_k=4)
    for progress in (1.0, 0.5):
        module.update(torch.full((4,), 0.25), progress)
        assert module.top_k == 4


def test_k_stays_without_a_final_one():
    module = selection(top_k=2)
    module.update(torch.full((4,), 0.25), 1.0)
    assert module.top_k == 2


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
