"""Base scores, against numbers worked out by hand."""

import pytest
import torch

from polyad.model.build import build_model, materialize
from polyad.model.smoe.layer import SparseMoE
from polyad.model.smoe.router import SCORES, CosineScore, LinearScore, RandomScore
from tests.helpers.routing import make, make_config, make_context

every_score = pytest.mark.parametrize("score", SCORES)


def fill(parameter, values):
    with torch.no_grad():
        parameter.copy_(torch.tensor(values, dtype=parameter.dtype))


def test_linear_equals_numbers_worked_out_by_hand():
    score = make(LinearScore, make_config(num_experts=3), make_context(hidden_size=2))
    fill(score.weight, [[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    fill(score.bias, [0.5, 0.0, -1.0])
    # u = (1, 2): 1 + 0.5, 2 x 2, 1 + 2 - 1.
    logits = score(torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    torch.testing.assert_close(logits, torch.tensor([[1.5, 4.0, 2.0]], dtype=torch.float64))


def test_cosine_equals_numbers_worked_out_by_hand():
    config = make_config(num_experts=3, score="cosine", score_width=2)
    score = make(CosineScore, config, make_context(hidden_size=2))
    fill(score.projection, [[2.0, 0.0], [0.0, 2.0]])
    fill(score.embedding, [[3.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    u_ND = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    # The direction of u is (0.6, 0.8), which neither the projection's 2 nor the length 5 changes;
    # the third expert's is (1, 1) / sqrt(2): 1.4 / 1.4142136 = 0.9899495.
    cosines = torch.tensor([[0.6, 0.8, 0.9899495]], dtype=torch.float64)
    for temperature, divisor in ((0.5, 0.5), (2.0, 2.0), (-1.0, 0.01)):  # kept from zero
        fill(score.temperature, temperature)
        torch.testing.assert_close(score(u_ND), cosines / divisor, atol=1e-5, rtol=0)
    torch.testing.assert_close(score(7 * u_ND), score(u_ND))


def test_cosine_starts_at_the_temperature_of_its_paper(small_model):
    model = small_model(feed_forward={"kind": "smoe", "score": "cosine"})
    temperature = model.blocks[0].feed_forward.router.score.temperature
    torch.testing.assert_close(temperature.item(), 0.07, atol=1e-6, rtol=0)


def test_cosine_space_is_half_as_wide_as_there_are_experts_and_at_least_eight():
    assert make_config(num_experts=64).score_size() == 32
    assert make_config(num_experts=6).score_size() == 8
    assert make_config(num_experts=64, score_width=5).score_size() == 5


def test_random_is_frozen_and_equals_its_weight_times_the_token():
    score = make(RandomScore, make_config(num_experts=3), make_context(hidden_size=4))
    assert list(score.parameters()) == []
    # Uniform as PyTorch starts a linear layer of 4 inputs: within 1 / sqrt(4).
    assert score.weight.abs().max() <= 0.5
    assert score.weight.abs().max() > 0.25
    u_ND = torch.tensor([[1.0, 0.0, 0.0, 2.0]], dtype=torch.float64)
    expected = score.weight[:, 0] + 2 * score.weight[:, 3]
    torch.testing.assert_close(score(u_ND)[0], expected.double())


def test_random_weight_depends_on_seed_and_place_and_is_fp32_in_any_model(small_config):
    def weights(seed, dtype):
        model = build_model(small_config(feed_forward={"kind": "smoe", "score": "random"}))
        materialize(model, seed=seed, dtype=dtype)
        return [block.feed_forward.router.score.weight for block in model.blocks]

    ours, again, other = weights(0, torch.float32), weights(0, torch.bfloat16), weights(1, None)
    assert torch.equal(ours[0], again[0])
    assert again[0].dtype == torch.float32
    assert not torch.equal(ours[0], ours[1])
    assert not torch.equal(ours[0], other[0])


@every_score
def test_scores_are_computed_in_fp32_at_least(score):
    config, u_ND = make_config(score=score), torch.randn(5, 12)
    exact = make(SCORES[score], config, dtype=torch.float64)(u_ND.bfloat16().double())
    assert exact.dtype == torch.float64
    layer = make(SparseMoE, config, dtype=torch.bfloat16)
    logits = layer.router.score(u_ND.bfloat16())
    assert logits.dtype == torch.float32
    # The bf16 layer's own weights, in float64: equal but for fp32 rounding, not for bf16's.
    layer = layer.double()
    exact = layer.router.score(u_ND.bfloat16().double())
    torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)


@every_score
def test_every_parameter_of_a_score_gets_a_gradient(score):
    layer = make(SCORES[score], make_config(score=score))
    u_ND = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    layer(u_ND).softmax(-1).square().sum().backward()
    assert u_ND.grad.abs().max() > 0
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().max() > 0, name
