"""Losses of experts against numbers worked out by hand, and in a layer against loops.

Shapes: B batch, T tokens in a sequence, N tokens, D width, E experts, K experts of a token.
"""

import pytest
import torch

from polyad.model.emoe.config import EmergentMoEConfig
from polyad.model.emoe.layer import EmergentMoE
from polyad.model.lora import LoRAConfig, LoRAExperts
from polyad.model.output import ask_for_statistics
from polyad.model.smoe.layer import SparseMoE
from polyad.model.smoe.losses import (
    coupling_loss,
    moved_rows,
    orthogonality_loss,
    variance_loss,
)
from polyad.model.smoe.scores import SCORES
from tests.helpers.routed_models import assert_same_step, routed
from tests.helpers.routing import make, make_config, make_context

EVERY = frozenset({"coupling_EE", "orthogonality_loss", "variance_loss"})


def float64(values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def layer_of(asked=EVERY, context=None, moves_rows=False, **overrides):
    layer = make(SparseMoE, make_config(**overrides), context)
    ask_for_statistics(layer, losses=frozenset(asked), samples=False, moves_rows=moves_rows)
    return layer


@pytest.mark.parametrize(("alpha", "expected"), [(1.0, 0.0), (0.25, 0.375), (0.5, 0.0)])
def test_coupling_equals_numbers_worked_out_by_hand(alpha, expected):
    # M = [[2, 1], [1, 3]], alpha 0.25: 1 - 0.5 twice, 1 - 0.75 twice, over 4.
    loss = coupling_loss(float64([[2.0, 1.0], [1.0, 3.0]]), alpha)
    torch.testing.assert_close(loss.item(), expected)


def test_coupling_has_the_gradient_of_differences_and_its_two_directions():
    # alpha 1: M12 - M11 = 2, M21 - M11 = 0, and none of M22 = 9: 2 / 4.
    norms_EE = float64([[1.0, 3.0], [1.0, 9.0]])
    assert coupling_loss(norms_EE, 1.0).item() == 0.5
    assert coupling_loss(norms_EE.T, 1.0).item() == 0.5
    random_EE = torch.rand(5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: coupling_loss(m, 0.8), random_EE)


def test_norms_of_rows_equal_numbers_worked_out_by_hand():
    # R = I, W1 = diag(2, 1), W2 = diag(1, 3): row 1 has 2 in expert 1 and 1 in 2, row 2 1 and 3.
    layer = layer_of(
        context=make_context(hidden_size=2), num_experts=2, expert_hidden_size=2, top_k=2
    )
    with torch.no_grad():
        layer.router.score.weight.copy_(torch.eye(2))
        layer.experts.up.copy_(
            torch.stack([torch.diag(torch.tensor(x)) for x in ([2.0, 1], [1.0, 3])])
        )
    u_BTD = torch.randn(1, 3, 2, dtype=torch.float64)
    norms_EE = layer(u_BTD, u_BTD)[1].coupling_EE
    assert norms_EE.tolist() == [[2.0, 1.0], [1.0, 3.0]]


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_norms_and_gradients_equal_a_loop(activation):
    layer = layer_of(activation=activation)
    u_BTD = torch.randn(2, 5, 12, dtype=torch.float64)
    found_EE = layer(u_BTD, u_BTD)[1].coupling_EE
    rows_ED, experts = layer.router.score.weight, layer.experts
    weight_EDF = experts.up if experts.gate is None else experts.gate
    expected_EE = torch.stack(
        [torch.stack([(rows_ED[i] @ weight_EDF[j]).norm() for j in range(6)]) for i in range(6)]
    )
    torch.testing.assert_close(found_EE, expected_EE)
    weights_EE = torch.randn(6, 6, dtype=torch.float64)
    inputs = [rows_ED, weight_EDF]
    ours, theirs = (
        torch.autograd.grad((m * weights_EE).sum(), inputs) for m in (found_EE, expected_EE)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(mine, other)


def test_rows_move_less_than_half_way_to_the_nearest_and_keep_their_gradient():
    # Rows (3, 4) and (3, 1): 3 apart; eps 3 / 10 and 3 / (2 sqrt(10)) = 0.4743.
    rows_ED = float64([[3.0, 4.0], [3.0, 1.0]])
    torch.manual_seed(0)
    moved = torch.stack([moved_rows(rows_ED) for _ in range(2000)])
    factors = (moved / rows_ED).detach()
    for row, eps in enumerate((0.3, 0.474342)):
        assert factors[:, row].min() > 1 - eps - 1e-9
        assert factors[:, row].max() < 1 + eps + 1e-9
        assert factors[:, row].min() < 1 - 0.99 * eps
        assert factors[:, row].max() > 1 + 0.99 * eps
    torch.testing.assert_close(factors.mean((0, 1, 2)).item(), 1.0, atol=0.01, rtol=0)
    one = moved_rows(rows_ED)
    (gradient_ED,) = torch.autograd.grad(one.sum(), rows_ED)
    torch.testing.assert_close(gradient_ED, (one / rows_ED).detach())
    assert moved_rows(torch.zeros(2, 3)).abs().max() == 0
    equal = torch.ones(3, 4)
    assert torch.equal(moved_rows(equal), equal)


def test_rows_are_moved_only_where_they_are_learned_from():
    u_BTD = torch.randn(2, 5, 12, dtype=torch.float64)
    plain = layer_of()
    expected_EE = plain(u_BTD, u_BTD)[1].coupling_EE
    state = torch.get_rng_state()
    measured = layer_of(asked=(), moves_rows=True)(u_BTD, u_BTD)[1].coupling_EE
    assert torch.equal(torch.get_rng_state(), state)  # a record changes no random number
    torch.testing.assert_close(measured, expected_EE.detach())
    assert not measured.requires_grad
    moved = layer_of(moves_rows=True)(u_BTD, u_BTD)[1].coupling_EE
    assert not torch.equal(torch.get_rng_state(), state)
    assert (moved - expected_EE).abs().max() > 1e-3


def test_adapters_beside_rows_and_experts_count():
    layer = layer_of()
    adapted = LoRAExperts(layer.experts, LoRAConfig(rank=2, experts=True)).double()
    for adapter in (adapted.up_lora, adapted.down_lora):
        torch.nn.init.normal_(adapter.A)
        torch.nn.init.normal_(adapter.B)
    layer.experts = adapted
    u_BTD = torch.randn(1, 3, 12, dtype=torch.float64)
    found_EE = layer(u_BTD, u_BTD)[1].coupling_EE
    low = adapted.up_lora
    with torch.no_grad():
        adapted.up += low.delta(low.A, low.B)
        low.B.zero_()
    torch.testing.assert_close(layer(u_BTD, u_BTD)[1].coupling_EE, found_EE)


def test_orthogonality_equals_numbers_worked_out_by_hand():
    # (1, 0) on (1, 1): 1/2 (1, 1), squared length 0.5; (1, 1) on (1, 0): (1, 0), 1.
    outputs_NKD = float64([[[1.0, 0.0], [1.0, 1.0]]])
    torch.testing.assert_close(orthogonality_loss(outputs_NKD).item(), 1.5)
    # A mean over tokens: one whose outputs are at right angles, one without an output.
    more_NKD = float64([[[1.0, 0.0], [1.0, 1.0]], [[1.0, 0.0], [0.0, 7.0]], [[0.0, 0], [2.0, 2.0]]])
    loss = orthogonality_loss(more_NKD)
    torch.testing.assert_close(loss.item(), 0.5)
    (gradient_NKD,) = torch.autograd.grad(loss, more_NKD)
    assert gradient_NKD.isfinite().all()


def test_orthogonality_equals_a_loop_and_has_the_gradient_of_differences():
    outputs_NKD = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    total = 0
    for x_KD in outputs_NKD.detach():
        for j, x in enumerate(x_KD):
            for k, y in enumerate(x_KD):
                total += 0 if j == k else ((x @ y) / (y @ y) * y).square().sum().item()
    torch.testing.assert_close(orthogonality_loss(outputs_NKD).item(), total / 3)
    assert torch.autograd.gradcheck(orthogonality_loss, outputs_NKD)


def test_variance_equals_numbers_worked_out_by_hand():
    # Means 0.6 and 0.4; deviations of 0.2, twice each: 0.04 + 0.04.
    weights_NE = float64([[0.8, 0.2], [0.4, 0.6]])
    loss = variance_loss(weights_NE)
    torch.testing.assert_close(loss.item(), -0.08)
    (gradient_NE,) = torch.autograd.grad(loss, weights_NE)
    torch.testing.assert_close(gradient_NE, float64([[-0.2, 0.2], [0.2, -0.2]]).detach())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("capacity", [None, 0.5])
def test_a_layer_reports_the_losses_of_its_own_experts(bias, capacity):
    options = {"top_k": 3, "experts": "loop"}
    if capacity is not None:
        options |= {"capacity_factor": capacity, "allow_leak": True}
    layer = layer_of(context=make_context(bias=bias), **options)
    u_BTD = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    _, stats = layer(u_BTD, u_BTD)
    u_ND = u_BTD.flatten(0, 1)
    selected, _ = layer.router(u_BTD)
    taken = torch.zeros(6, dtype=torch.int64)
    most = 10 if capacity is None else 3  # 0.5 x 10 x 3 / 6, rounded up
    outputs_NKD = torch.zeros(10, 3, 12, dtype=torch.float64)
    for n in range(10):
        for k, e in enumerate(selected.expert_ids_NK[n].tolist()):
            taken[e] += 1
            if taken[e] <= most:
                inner_F = u_ND[n] @ layer.experts.up[e]
                if bias:
                    inner_F = inner_F + layer.experts.up_bias[e]
                output_D = torch.nn.functional.gelu(inner_F, approximate="tanh")
                output_D = output_D @ layer.experts.down[e]
                outputs_NKD[n, k] = output_D + (layer.output_bias[e] if bias else 0)
    expected = orthogonality_loss(outputs_NKD)
    torch.testing.assert_close(stats.orthogonality_loss, expected)
    weights_NE = torch.zeros(10, 6, dtype=torch.float64)
    weights_NE = weights_NE.scatter(1, selected.expert_ids_NK, selected.weights_NK)
    torch.testing.assert_close(stats.variance_loss, variance_loss(weights_NE))
    inputs = [u_BTD, *layer.experts.parameters()] + ([layer.output_bias] if bias else [])
    ours, theirs = (
        torch.autograd.grad(loss, inputs) for loss in (stats.orthogonality_loss, expected)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 1e-6
        torch.testing.assert_close(mine, other)
    (gradient,) = torch.autograd.grad(stats.variance_loss, layer.router.score.weight)
    assert gradient.abs().max() > 1e-6


@pytest.mark.parametrize("asked", [set(), {"coupling_EE"}, {"orthogonality_loss"}])
def test_what_is_not_asked_for_has_a_value_for_a_record_and_no_gradient(asked):
    u_BTD = torch.randn(2, 5, 12, dtype=torch.float64)
    layer = layer_of(asked)
    stats = layer(u_BTD, u_BTD)[1]
    every = layer_of()(u_BTD, u_BTD)[1]
    for name in EVERY:
        torch.testing.assert_close(getattr(stats, name), getattr(every, name).detach())
        assert getattr(stats, name).requires_grad == (name in asked), name
    ask_for_statistics(layer, losses=frozenset(asked), samples=False, record_is_due=False)
    stats = layer(u_BTD, u_BTD)[1]
    assert {name for name in EVERY if getattr(stats, name) is not None} == asked
    stats = layer.eval()(u_BTD, u_BTD)[1]
    assert all(getattr(stats, name) is None for name in EVERY)


@pytest.mark.parametrize("bias", [True, False])
def test_a_record_has_the_orthogonality_of_a_sample(bias):
    # 600 tokens, of which 256 are taken: token 600 n // 256.
    options = {"capacity_factor": 0.7, "allow_leak": True}
    layers = [layer_of(asked, make_context(bias=bias), **options) for asked in ((), EVERY)]
    outputs = []
    for layer in layers:
        layer.dispatcher.register_forward_hook(lambda module, given, done: outputs.append(done))
    u_BTD = torch.randn(2, 300, 12, dtype=torch.float64)
    sampled, whole = (layer(u_BTD, u_BTD)[1].orthogonality_loss for layer in layers)
    token_N = [600 * n // 256 for n in range(256)]
    assert outputs[0].sample_N.tolist() == token_N
    assert torch.equal(outputs[0].outputs_NKD, outputs[1].outputs_NKD[token_N])
    assert not sampled.requires_grad
    assert sampled != whole
    torch.testing.assert_close(sampled, whole, rtol=0.2, atol=0)
    outputs_NKD = outputs[1].outputs_NKD.detach()
    if bias:
        selected, _ = layers[1].router(u_BTD)
        kept_NK1 = (outputs_NKD != 0).any(-1, keepdim=True)
        outputs_NKD = outputs_NKD + kept_NK1 * layers[1].output_bias[selected.expert_ids_NK]
    torch.testing.assert_close(sampled, orthogonality_loss(outputs_NKD[token_N]).detach())


def test_the_coupling_of_many_experts_is_computed_only_to_learn_from():
    u_BTD = torch.randn(2, 5, 12, dtype=torch.float64)
    for number, asked, found in ((64, (), True), (65, (), False), (65, EVERY, True)):
        stats = layer_of(asked, num_experts=number)(u_BTD, u_BTD)[1]
        assert (stats.coupling_EE is not None) == found


@pytest.mark.parametrize("score", SCORES)
def test_only_a_linear_score_has_rows_and_one_expert_no_pairs(score):
    layer, u_BTD = layer_of(score=score, top_k=1), torch.randn(2, 5, 12, dtype=torch.float64)
    stats = layer(u_BTD, u_BTD)[1]
    assert (stats.coupling_EE is not None) == (score == "linear")
    assert stats.orthogonality_loss is None


def a_step(model, ids):
    """All losses with weights in one step: values and gradients."""
    ask_for_statistics(model, losses=EVERY, samples=False)
    torch.manual_seed(4)
    loss, routing = model(ids, target_ids_BT=ids.roll(-1, 1))
    for stats in routing:
        loss = loss + stats.orthogonality_loss + coupling_loss(stats.coupling_EE, 0.5)
        loss = loss + stats.variance_loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def test_recomputation_draws_the_same_rows(small_model, random_ids):
    ids = random_ids(2, 16)
    plain = a_step(routed(small_model, {}), ids)
    recomputed = a_step(routed(small_model, {}, recompute="block"), ids)
    assert_same_step(recomputed, plain, tolerance=0)


def test_bf16_is_finite_and_close_to_fp32(small_model, random_ids):
    ids = random_ids(2, 16)
    exact = a_step(routed(small_model, {"top_k": 6}), ids)
    rough = a_step(routed(small_model, {"top_k": 6}, dtype=torch.bfloat16), ids)
    for name, value in rough.items():
        assert value.isfinite().all(), name
    torch.testing.assert_close(rough["loss"].float(), exact["loss"], rtol=0.02, atol=0)


def test_the_keys_of_a_group_are_what_its_row_couples_with():
    config = EmergentMoEConfig(num_experts=4, top_k=2, score="linear")
    layer, u_BTD = make(EmergentMoE, config), torch.randn(2, 5, 12, dtype=torch.float64)
    norms = (layer.router.score.weight[0] @ layer.experts.keys[3].T).norm()
    torch.testing.assert_close(layer(u_BTD, u_BTD)[1].coupling_EE[0, 3], norms)
