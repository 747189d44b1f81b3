"""Groups of units beside the dense feed-forward that they are parts of."""

import copy

import pytest
import torch

from polyad.model.build import build_model, materialize
from polyad.model.emoe.layer import EmergentMoE, EmergentMoEConfig
from polyad.model.emoe.splitting import (
    balanced_kmeans,
    dense_names,
    merge,
    random_groups,
    split,
)
from polyad.model.feedforward import (
    ACTIVATIONS,
    DenseFeedForward,
    DenseFeedForwardConfig,
    FeedForwardContext,
)
from tests.helpers.definitions import by_definition

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
    layer, x_BTD = (
        split_layer(dense, top_k=5, select=select),
        some_tokens(torch.float64),
    )
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


def test_it_equals_numbers_worked_out_by_hand():
    # Width 2, 4 units in 2 experts: keys (1, 0), (3, 0) and (0, 2), (0, 0); their means are (2, 0)
    # and (0, 1). x = (0.5, 0.9) scores 1 and 0.9: the first expert. Its units are 0.5 and
    # 1.5 - 1 = 0.5, gelu(0.5) = 0.3457144 by tanh each; values (1, 0) and (0, 2), output bias
    # (0.1, 0): y = (0.4457144, 0.6914288).
    context = FeedForwardContext(
        hidden_size=2, bias=True, dropout=0.0, initializer_std=0.02, residual_std=0.02
    )
    layer = EmergentMoE(EmergentMoEConfig(num_experts=2, top_k=1, hidden_size=4), context)
    with torch.no_grad():
        layer.experts.keys.copy_(torch.tensor([[[1.0, 0], [3, 0]], [[0, 2], [0, 0]]]))
        layer.experts.bias.copy_(torch.tensor([[0.0, -1], [5, 5]]))
        layer.experts.values.copy_(torch.tensor([[[1.0, 0], [0, 2]], [[7, 7], [7, 7]]]))
        layer.output_bias.copy_(torch.tensor([0.1, 0]))
    y_BTD, stats = layer(torch.tensor([[[0.5, 0.9]]]), torch.zeros(1, 1, 2))
    expected = torch.tensor([[[0.4457144, 0.6914288]]])
    torch.testing.assert_close(y_BTD, expected, atol=2e-6, rtol=0)
    assert stats.load_E.tolist() == [1, 0]


def test_the_gate_follows_the_keys_and_gives_them_no_gradient():
    dense = dense_layer(dtype=torch.float64)
    layer, x_BTD = split_layer(dense, top_k=3), some_tokens(torch.float64).requires_grad_()
    _, stats = layer(x_BTD, x_BTD)
    losses = stats.losses["balance_loss"] + stats.losses["importance_loss"]
    losses.backward()
    assert layer.experts.keys.grad is None
    assert x_BTD.grad.abs().max() > 0
    directions = layer.expert_features()
    with torch.no_grad():
        layer.experts.keys[2] *= -1
    assert torch.equal(layer.expert_features()[2], -directions[2])
    assert torch.equal(layer.gate_columns()[0], layer.expert_features())


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


def test_a_capacity_drops_assignments():
    dense = dense_layer(dtype=torch.float64)
    options, x_BTD = {"top_k": 4, "capacity_factor": 0.75}, some_tokens(torch.float64)
    y_BTD, stats = split_layer(dense, **options)(x_BTD, x_BTD)
    with by_definition():
        expected_BTD, _ = split_layer(dense, **options)(x_BTD, x_BTD)
    torch.testing.assert_close(y_BTD, expected_BTD, atol=1e-12, rtol=0)
    assert stats.measures["dropped"] > 0.25
    free = split_layer(dense, **options | {"evaluation_capacity_factor": 16.0}).eval()
    assert free(x_BTD, x_BTD)[1].measures["dropped"] == 0


def test_noise_moves_choices_in_training_alone():
    layer, x_BTD = split_layer(dense_layer(), top_k=4, router_noise=1000.0), some_tokens()
    torch.manual_seed(0)
    one, other = (layer(x_BTD, x_BTD) for _ in range(2))
    assert not torch.equal(one[1].load_E, other[1].load_E)
    assert one[1].losses.get("load_loss") is not None
    layer.eval()
    assert torch.equal(layer(x_BTD, x_BTD)[0], layer(x_BTD, x_BTD)[0])


def test_scores_far_apart_still_have_an_order():
    # The softmax of these underflows to 0 for all but one expert.
    dense = dense_layer()
    layer, x_BTD = split_layer(dense, top_k=3, select="bottom_k"), 1000 * some_tokens()
    selected, _ = layer.router(x_BTD, features=layer.expert_features())
    logits_NE = x_BTD.flatten(0, 1) @ layer.expert_features().T
    assert torch.equal(selected.expert_ids_NK, logits_NE.topk(3, -1, largest=False).indices)


def test_splitting_and_merging_are_bitwise_inverse():
    dense = dense_layer()
    layer = split_layer(dense)
    for name, source in dense_names(gated=False).items():
        merged = merge(source, layer.get_parameter(name).data, layer.unit)
        assert torch.equal(merged, dense.get_parameter(source).data), name
        assert merged.is_contiguous()


def test_blocks_that_are_not_split_are_dense_and_names_say_which_are(small_config, random_ids):
    section = {"kind": "emoe", "blocks": [0, 2], "num_experts": 8, "top_k": 4, "hidden_size": 40}
    model = build_model(small_config(feed_forward=section))
    materialize(model, seed=0)
    kinds = [type(block.feed_forward) for block in model.blocks]
    assert kinds == [EmergentMoE, DenseFeedForward, EmergentMoE]
    assert model.blocks[1].feed_forward.up.out_features == 40
    names = [stats.name for stats in model(random_ids(2, 16)).routing]
    assert names == ["blocks.0.feed_forward", "blocks.2.feed_forward"]
    assert model.blocks[0].feed_forward.unit.tolist() == list(range(40))


def trained_layer():
    """A dense layer that has learned what belongs to each of 16 bundles of tokens; such tokens."""
    generator = torch.Generator().manual_seed(0)
    middles = torch.randn(EXPERTS, WIDTH, generator=generator)
    targets = torch.randn(EXPERTS, WIDTH, generator=generator)

    def tokens(count):
        bundle = torch.randint(EXPERTS, (count,), generator=generator)
        x_ND = middles[bundle] + 0.5 * torch.randn(count, WIDTH, generator=generator)
        return x_ND, targets[bundle]

    layer = dense_layer()
    optimizer = torch.optim.Adam(layer.parameters(), 3e-3)
    for _ in range(300):
        x_ND, y_ND = tokens(128)
        loss = (layer(x_ND, x_ND)[0] - y_ND).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5  # of 1 that the targets vary by
    return layer, tokens(500)[0].unsqueeze(0)


def test_clustered_keys_of_a_trained_layer_keep_more_of_the_activation_than_random_ones():
    dense, x_BTD = trained_layer()
    active_NU = dense.activation(dense.up(x_BTD))[0].abs()

    def kept(group_U, top_k):
        layer = split_layer(dense, top_k=top_k)
        weight = dense.up.weight.data
        layer.experts.keys.data = split("up.weight", weight, group_U.argsort(stable=True), EXPERTS)
        chosen = layer.router(x_BTD, features=layer.expert_features()).selected.expert_ids_NK
        mask_NE = torch.zeros(500, EXPERTS).scatter(1, chosen, 1.0)
        return ((active_NU * mask_NE[:, group_U]).sum() / active_NU.sum()).item()

    keys = dense.up.weight.detach().double().numpy()
    for top_k in (4, 8):
        clustered, by_chance = (
            [kept(torch.from_numpy(make(seed)), top_k) for seed in range(3)]
            for make in (
                lambda seed: balanced_kmeans(keys, EXPERTS, seed),
                lambda seed: random_groups(UNITS, EXPERTS, seed),
            )
        )
        print(f"kept with {top_k} of {EXPERTS}: {clustered} clustered, {by_chance} by chance")
        assert min(clustered) > max(by_chance) > top_k / EXPERTS


def test_a_layer_can_be_copied():
    layer, x_BTD = split_layer(dense_layer(), top_k=4), some_tokens()
    other = copy.deepcopy(layer)
    assert torch.equal(layer(x_BTD, x_BTD)[0], other(x_BTD, x_BTD)[0])
