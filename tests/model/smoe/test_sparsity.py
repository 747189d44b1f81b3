"""The score of sparsity (MoE-X): against loops written out, and what it says of inner units.

Shapes: B batch, T tokens in a sequence, N tokens, D width, E experts, F inner width of an expert.
"""

import math

import pytest
import torch

from polyad.model.lora import LoRAConfig, LoRAExperts
from polyad.model.smoe.layer import SparseMoE
from polyad.model.smoe.scores import NoColumnsError
from tests.helpers.routing import (
    assert_same_with_gradients,
    make,
    make_config,
    make_context,
    scatter,
)

MOE_X = {"score": "sparsity", "activation": "relu", "combine": "normalized"}


def layer_of(context=None, dtype=torch.float64, **overrides):
    return make(SparseMoE, make_config(**MOE_X | overrides), context, dtype=dtype)


def scored(layer, u_ND):
    return layer.router.score(u_ND, layer.expert_features())


def opposite(**overrides):
    """Two experts of width 2 whose first layers are the identity and its negative."""
    sizes = {"num_experts": 2, "expert_hidden_size": 2}
    layer = layer_of(make_context(hidden_size=2), **sizes | overrides)
    with torch.no_grad():
        layer.experts.up.copy_(torch.stack([torch.eye(2), -torch.eye(2)]))
        layer.experts.up_bias.zero_()
        layer.output_bias.zero_()
    return layer


def test_the_sparsest_expert_wins_as_worked_out_by_hand():
    # x = (1, 1), W = I: mu = 1, s^2 = 2 x 1/4, -erf(1 / (sqrt(2) 0.7071)) = -erf(1).
    layer, u_BTD = opposite(top_k=1), torch.ones(1, 1, 2, dtype=torch.float64)
    logits_NE = scored(layer, u_BTD[0])
    expected_NE = torch.tensor([[-0.8427008, 0.8427008]], dtype=torch.float64)
    torch.testing.assert_close(logits_NE, expected_NE, atol=1e-7, rtol=0)
    selected, stats = layer.router(u_BTD, features=layer.expert_features())
    assert selected.expert_ids_NK.tolist() == [[1]]
    assert selected.weights_NK.tolist() == [[1.0]]
    torch.testing.assert_close(stats.expected_active.item(), (1 - 0.8427008) / 2, atol=1e-7, rtol=0)


def test_an_expert_whose_units_are_all_off_wins_and_gives_nothing():
    # The trap: no unit of the second expert is above 0, and every token of ones goes to it.
    layer, u_BTD = opposite(top_k=1), torch.ones(2, 5, 2, dtype=torch.float64)
    y_BTD, stats = layer(u_BTD, u_BTD)
    assert stats.load_E.tolist() == [0.0, 1.0]
    assert y_BTD.abs().max() == 0
    assert layer.experts.inner(u_BTD[0], 1).abs().max() == 0


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_the_score_and_its_gradients_equal_loops(bias, activation):
    layer = layer_of(make_context(bias=bias), activation=activation)
    u_ND = torch.randn(7, 12, dtype=torch.float64, requires_grad=True)
    experts = layer.experts
    weight_EDF = experts.up if activation == "relu" else experts.gate
    bias_EF = experts.up_bias if activation == "relu" else experts.gate_bias

    def logit(u_D, e):
        units = [weight_EDF[e, :, h] for h in range(10)]
        mean_D = sum(units) / 10
        variance_D = sum((unit_D - mean_D) ** 2 for unit_D in units) / 10
        mu = u_D @ mean_D + (0 if bias_EF is None else sum(bias_EF[e]) / 10)
        s = sum(u_D[i] ** 2 * variance_D[i] for i in range(12)).sqrt()
        return -torch.erf(mu / (math.sqrt(2) * s))

    expected_NE = torch.stack([torch.stack([logit(u_D, e) for e in range(6)]) for u_D in u_ND])
    inputs = [u_ND, weight_EDF] + ([] if bias_EF is None else [bias_EF])
    assert_same_with_gradients(scored(layer, u_ND), expected_NE, inputs)


def test_routing_teaches_the_experts_and_has_no_parameters():
    layer, u_BTD = layer_of(), torch.randn(2, 9, 12, dtype=torch.float64)
    assert dict(layer.router.named_parameters()) == {}
    _, stats = layer(u_BTD, u_BTD)
    stats.balance_loss.backward()
    assert layer.experts.up.grad.abs().max() > 1e-4
    assert layer.experts.up_bias.grad.abs().max() > 1e-4
    assert layer.experts.down.grad is None


@pytest.mark.parametrize("shift", [-0.4, -0.1, 0.0, 0.1, 0.4])
def test_the_expected_share_is_that_of_random_units(shift):
    # Units drawn independently, whose weights have means of their own.
    generator = torch.Generator().manual_seed(7)
    x_ND = torch.randn(3, 64, generator=generator, dtype=torch.float64)
    x_ND /= x_ND.norm(dim=1, keepdim=True)
    mean_D = shift * x_ND.mean(0) / x_ND.mean(0).norm()
    layer = layer_of(make_context(hidden_size=64), num_experts=2, expert_hidden_size=4096, top_k=1)
    with torch.no_grad():
        layer.experts.up.normal_(0, 0.1, generator=generator).add_(mean_D[None, :, None])
        layer.experts.up_bias.fill_(0.02)
    shares_NE = (1 - scored(layer, x_ND)) / 2
    true_NE = torch.stack(
        [(layer.experts.inner(x_ND, e) > 0).double().mean(1) for e in range(2)], 1
    )
    # 4,096 units of share p: a deviation of sqrt(p (1 - p) / 4096) at most 0.8%.
    torch.testing.assert_close(shares_NE, true_NE, atol=0.03, rtol=0)
    if abs(shift) == 0.4:
        assert (shares_NE - 0.5).abs().min() > 0.35  # far from a half, where any guess is right


def test_equal_experts_have_equal_scores():
    layer = layer_of()
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter).clone())
    logits_NE = scored(layer, torch.randn(5, 12, dtype=torch.float64))
    torch.testing.assert_close(logits_NE, logits_NE[:, :1].expand_as(logits_NE))


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_adapters_beside_experts_count(activation):
    layer = layer_of(activation=activation)
    u_ND = torch.randn(5, 12, dtype=torch.float64)
    before_NE = scored(layer, u_ND)
    adapted = LoRAExperts(layer.experts, LoRAConfig(rank=2, experts=True)).double()
    for name in ("up_lora", "down_lora", "gate_lora"):
        if (adapter := getattr(adapted, name)) is not None:
            torch.nn.init.zeros_(adapter.A)
            torch.nn.init.zeros_(adapter.B)
    layer.experts = adapted
    torch.testing.assert_close(scored(layer, u_ND), before_NE)
    low_rank = adapted.gate_lora or adapted.up_lora
    scatter(low_rank)
    found_NE = scored(layer, u_ND)
    weight = adapted.gate if activation == "swiglu" else adapted.up
    with torch.no_grad():
        weight += low_rank.delta(low_rank.A, low_rank.B)
        low_rank.B.zero_()
    assert (found_NE - before_NE).abs().max() > 1e-3
    torch.testing.assert_close(scored(layer, u_ND), found_NE)
    low_rank.B.requires_grad_()
    scored(layer, u_ND).sum().backward()
    assert low_rank.B.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_finite_where_nothing_varies(dtype):
    layer = layer_of(dtype=dtype)
    with torch.no_grad():
        layer.experts.up[0] = 0.5
        layer.experts.up[1] = 0
    u_ND = torch.randn(4, 12).to(dtype)
    u_ND[0] = 0
    logits_NE = scored(layer, u_ND)
    assert logits_NE.dtype == torch.float32
    logits_NE.square().sum().backward()
    assert logits_NE.abs().max() <= 1
    for parameter in (layer.experts.up, layer.experts.up_bias):
        assert parameter.grad.isfinite().all()


def test_moments_keep_no_copy_of_weights_in_fp32():
    layer, saved = layer_of(dtype=torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        layer.expert_features()
    whole = layer.experts.up.numel()
    assert [x.dtype for x in saved if x.numel() == whole] == [torch.bfloat16]


def test_there_are_no_columns():
    with pytest.raises(NoColumnsError, match="no direction"):
        layer_of().gate_columns()
