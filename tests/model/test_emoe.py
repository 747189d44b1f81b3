"""Groups of units beside the dense feed-forward that they are parts of."""

import pytest
import torch

from polyad.model.emoe import EmergentMoE, EmergentMoEConfig, dense_names, merge, split
from polyad.model.feedforward import (
    ACTIVATIONS,
    DenseFeedForward,
    DenseFeedForwardConfig,
    FeedForwardContext,
)
from tests.helpers.random_model import built

WIDTH, UNITS, EXPERTS = 32, 128, 16


def dense_layer(*, activation="gelu_tanh", bias=True, dtype=torch.float32):
    context = FeedForwardContext(
        hidden_size=WIDTH, bias=bias, dropout=0.0, initializer_std=0.1, residual_std=0.1,
        activation=activation,
    )  # fmt: skip
    layer = DenseFeedForward(DenseFeedForwardConfig(hidden_size=UNITS), context)
    layer.context = context
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return layer.to(dtype)


def split_layer(dense, seed=0, **options):
    """The dense layer's units in groups by chance."""
    config = EmergentMoEConfig(num_experts=EXPERTS, hidden_size=UNITS, **options)
    layer = EmergentMoE(config, dense.context)
    for parameter in layer.router.parameters():
        parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
    group_U = torch.randperm(UNITS, generator=torch.Generator().manual_seed(seed)) % EXPERTS
    weights, unit_U = dict(dense.named_parameters()), group_U.argsort(stable=True)
    for name, parameter in layer.named_parameters():
        if name in dense_names(gated=False):
            source = dense_names(gated=False)[name]
            parameter.data = split(source, weights[source].data, unit_U, EXPERTS).clone()
    layer.unit.copy_(unit_U)
    return layer.to(weights["up.weight"].dtype)


def some_tokens(dtype=torch.float32, tokens=40):
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def materialized(dense, layer, x_BTD, chosen_BTE):
    """The dense layer with the units of other experts set to 0, unit by unit."""
    group_U = torch.empty(UNITS, dtype=torch.int64)
    group_U[layer.unit] = torch.arange(UNITS) // (UNITS // EXPERTS)
    inner_BTU = dense.activation(dense.up(x_BTD)) * chosen_BTE[..., group_U]
    return dense.down(inner_BTU)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_all_experts_are_the_dense_layer(activation, bias):
    dense = dense_layer(activation=activation, bias=bias)
    layer, x_BTD = split_layer(dense, top_k=EXPERTS), some_tokens()
    ours, theirs = layer(x_BTD, x_BTD)[0], dense(x_BTD, x_BTD)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for name, parameter in dense.named_parameters():
        (of_ours,) = (
            theirs for theirs, source in dense_names(gated=False).items() if source == name
        )
        gradient = merge(name, layer.get_parameter(of_ours).grad, layer.unit)
        assert (gradient - parameter.grad).norm() < 1e-5 * parameter.grad.norm(), name


@pytest.mark.parametrize("select", ["top_k", "bottom_k", "not_top_k"])
def test_the_units_of_experts_that_are_not_selected_are_zero(select):
    dense = dense_layer(dtype=torch.float64)
    layer, x_BTD = (split_layer(dense, top_k=5, select=select), some_tokens(torch.float64))
    y_BTD, stats = layer(x_BTD, x_BTD)
    # Scores worked out from the dense keys: the mean over the units of a group.
    keys_EFD = dense.up.weight[layer.unit].view(EXPERTS, -1, WIDTH)
    order_BTE = (x_BTD @ keys_EFD.mean(1).T).argsort(-1, descending=True)
    places = {"top_k": slice(0, 5), "bottom_k": slice(-5, None), "not_top_k": slice(5, None)}
    chosen = order_BTE[..., places[select]]
    mask_BTE = torch.zeros(order_BTE.shape, dtype=torch.float64).scatter(-1, chosen, 1.0)
    expected = materialized(dense, layer, x_BTD, mask_BTE)
    torch.testing.assert_close(y_BTD, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(stats.load_E, mask_BTE.mean((0, 1)) / mask_BTE[0, 0].sum())


def test_the_gate_follows_the_keys_and_gives_them_no_gradient():
    dense = dense_layer(dtype=torch.float64)
    layer, x_BTD = split_layer(dense, top_k=3), some_tokens(torch.float64).requires_grad_()
    _, stats = layer(x_BTD, x_BTD)
    losses = stats.losses["balance_loss"] + stats.losses["importance_loss"]
    losses.backward()
    assert layer.experts.keys.grad is None
    assert x_BTD.grad.abs().max() > 0
    directions = layer.mean_keys()
    with torch.no_grad():
        layer.experts.keys[2] *= -1
    assert torch.equal(layer.mean_keys()[2], -directions[2])
    assert torch.equal(layer.gate_columns()[0], layer.mean_keys())


@pytest.mark.parametrize("score", ["linear", "cosine"])
def test_a_learned_score_weighs_experts_and_learns(score):
    dense = dense_layer(dtype=torch.float64)
    layer, x_BTD = split_layer(dense, top_k=4, score=score), some_tokens(torch.float64)
    y_BTD, _ = layer(x_BTD, x_BTD)
    logits_NE = layer.router.score(x_BTD.flatten(0, 1))
    highest, ids = logits_NE.topk(4, -1)
    weights_NE = torch.zeros_like(logits_NE).scatter(1, ids, 4 * highest.softmax(-1))
    expected = materialized(dense, layer, x_BTD, weights_NE.view(2, 40, -1))
    torch.testing.assert_close(y_BTD, expected, atol=1e-12, rtol=0)
    y_BTD.square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in layer.router.parameters())


def test_scores_far_apart_still_have_an_order():
    # The softmax of these underflows to 0 for all but one expert.
    dense = dense_layer()
    layer, x_BTD = split_layer(dense, top_k=3, select="bottom_k"), 1000 * some_tokens()
    selected, _ = layer.router(x_BTD)
    logits_NE = x_BTD.flatten(0, 1) @ layer.mean_keys().T
    assert torch.equal(selected.expert_ids_NK, logits_NE.topk(3, -1, largest=False).indices)


def test_blocks_that_are_not_split_are_dense_and_names_say_which_are(small_config, random_ids):
    section = {"kind": "emoe", "blocks": [0, 2], "num_experts": 8, "top_k": 4, "hidden_size": 40}
    model = built(small_config(feed_forward=section))
    kinds = [type(block.feed_forward) for block in model.blocks]
    assert kinds == [EmergentMoE, DenseFeedForward, EmergentMoE]
    assert model.blocks[1].feed_forward.up.out_features == 40
    names = [stats.name for stats in model(random_ids(2, 16)).routing]
    assert names == ["blocks.0.feed_forward", "blocks.2.feed_forward"]
    assert model.blocks[0].feed_forward.unit.tolist() == list(range(40))
