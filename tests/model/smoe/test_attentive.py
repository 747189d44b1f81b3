"""The attentive score: against loops written out, and what its keys follow.

Shapes: B batch, T tokens in a sequence, N tokens, D width, E experts, S width of the score's space,
F inner width of an expert.
"""

import pytest
import torch

from polyad.model.build import build_model, materialize
from polyad.model.lora import LoRAConfig, LoRAExperts
from polyad.model.mixer import MixerConfig
from polyad.model.smoe.experts import Experts
from polyad.model.smoe.graph import GRAPHS
from polyad.model.smoe.layer import SparseMoE, make_router
from polyad.model.smoe.scores import AttentiveScore
from polyad.model.vit import ViTConfig
from tests.helpers.routing import make, make_config, make_context, scatter

FOLLOWING = {"score": "attentive", "expert_keys": "hidden_means"}
KEPT = 0.99
"""Of a mean input in a step."""


def fill(parameter, values):
    with torch.no_grad():
        parameter.copy_(torch.tensor(values, dtype=parameter.dtype))


def layer_of(**options):
    return make(SparseMoE, make_config(**FOLLOWING | {"experts": "loop"} | options))


def chosen(layer, u_BTD):
    """The experts of each token, as the selection gives them."""
    kept = []
    hook = layer.router.selection.register_forward_hook(
        lambda module, inputs, selected: kept.append(selected.expert_ids_NK)
    )
    output = layer(u_BTD, u_BTD)
    hook.remove()
    return kept[0], output[1]


def test_learned_keys_equal_numbers_worked_out_by_hand():
    config = make_config(num_experts=3, score="attentive", score_width=4)
    score = make(AttentiveScore, config, make_context(hidden_size=2))
    fill(score.query, [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    fill(score.key, [[1.0, 0.0, 0.0, 5.0], [0.0, 2.0, 0.0, 0.0], [1.0, 1.0, -1.0, 0.0]])
    # u = (3, 4): q = (3, 4, 7, 0); over sqrt(4): 3 / 2, 8 / 2, (3 + 4 - 7) / 2.
    logits = score(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    expected = torch.tensor([[1.5, 4.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(logits, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("top_k", [1, 3])
def test_keys_are_moving_means_of_hidden_layers_over_the_tokens_of_an_expert(bias, top_k):
    config = make_config(**FOLLOWING, experts="loop", top_k=top_k, score_width=5)
    layer = make(SparseMoE, config, make_context(bias=bias))
    score, experts = layer.router.score, layer.experts
    generator = torch.Generator().manual_seed(3)

    def hidden(expert, u_D):  # before the activation
        value_F = sum(u_D[i] * experts.up[expert, i] for i in range(12))
        return value_F if experts.up_bias is None else value_F + experts.up_bias[expert]

    means = [hidden(e, score.mean_input[e].double()) for e in range(6)]
    score.mean_input = score.mean_input.double()
    for _ in range(2):
        u_BTD = torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
        u_ND = u_BTD.flatten(0, 1)
        keys = [score.key_projection @ mean_F for mean_F in means]
        expected_NE = torch.stack(
            [torch.stack([(score.query @ u_D) @ k / 5**0.5 for k in keys]) for u_D in u_ND]
        )
        logits_NE = score(u_ND, layer.expert_features())
        torch.testing.assert_close(logits_NE, expected_NE, atol=1e-12, rtol=1e-10)
        columns_ED = layer.gate_columns()[0]
        torch.testing.assert_close(u_ND @ columns_ED.T, logits_NE, atol=1e-12, rtol=1e-10)
        ids_NK, stats = chosen(layer, u_BTD)
        assert torch.equal(ids_NK, expected_NE.topk(top_k).indices)
        layer.update(stats, 0.0)
        for e in range(6):
            of_tokens = [hidden(e, u_ND[n]) for n in range(10) if e in ids_NK[n]]
            if of_tokens:
                mean_F = sum(of_tokens) / len(of_tokens)
                means[e] = KEPT * means[e] + (1 - KEPT) * mean_F
    torch.testing.assert_close(layer.expert_features(), torch.stack(means), atol=1e-12, rtol=1e-10)


def test_hidden_means_follow_the_weights_and_pass_no_gradient_to_them():
    layer, u_BTD = layer_of(), torch.randn(2, 9, 12, dtype=torch.float64)
    before_EF = layer.expert_features()
    assert not before_EF.requires_grad
    logits_NE = layer.router.score(u_BTD.flatten(0, 1), before_EF)
    logits_NE.logsumexp(-1).sum().backward()
    learned = dict(layer.router.named_parameters())
    assert set(learned) == {"score.query", "score.key_projection"}
    assert all(parameter.grad.abs().max() > 0 for parameter in learned.values())
    assert all(parameter.grad is None for parameter in layer.experts.parameters())
    with torch.no_grad():
        layer.experts.up.mul_(2)
        layer.experts.up_bias.mul_(2)
    torch.testing.assert_close(layer.expert_features(), 2 * before_EF)


def test_an_expert_without_tokens_keeps_its_mean_and_evaluation_moves_none():
    layer = layer_of(num_experts=6, top_k=1)
    u_D = torch.randn(12, dtype=torch.float64)
    u_BTD = u_D.expand(2, 4, 12)  # all tokens are one, and choose one expert
    before_ED = layer.router.score.mean_input.clone()
    ids_NK, stats = chosen(layer.eval(), u_BTD)
    assert stats.expert_input_ED is None
    layer.update(stats, 0.0)
    assert torch.equal(layer.router.score.mean_input, before_ED)
    _, stats = chosen(layer.train(), u_BTD)
    layer.update(stats, 0.0)
    expert = int(ids_NK[0, 0])
    others = [e for e in range(6) if e != expert]
    assert torch.equal(layer.router.score.mean_input[others], before_ED[others])
    moved_D = KEPT * before_ED[expert] + (1 - KEPT) * u_D
    torch.testing.assert_close(layer.router.score.mean_input[expert], moved_D.float())


@pytest.mark.parametrize("keys", ["learned", "hidden_means"])
def test_load_starts_about_as_even_as_that_of_a_linear_score(keys):
    def busiest(**options):
        with torch.device("meta"):
            config = make_config(num_experts=8, expert_hidden_size=128, top_k=2, **options)
            layer = SparseMoE(config, make_context(hidden_size=64, initializer_std=0.02))
        materialize(layer, seed=0)
        u_BTD = torch.randn(8, 128, 64, generator=torch.Generator().manual_seed(0))
        load_E = layer.router(u_BTD, features=layer.expert_features()).stats.load_E
        assert load_E.min() > 0.3 / 8
        return 8 * load_E.max().item()

    assert busiest(score="attentive", expert_keys=keys) < 1.7
    assert busiest(score="linear") < 1.7


def test_equal_keys_are_what_a_buffer_of_zeros_would_give():
    # Why it does not start so: every token would choose the same experts.
    layer = layer_of(top_k=2)
    layer.router.score.mean_input.zero_()
    with torch.no_grad():
        layer.experts.up_bias.zero_()
    load_E = layer.router(
        torch.randn(2, 9, 12, dtype=torch.float64), features=layer.expert_features()
    ).stats.load_E
    assert (load_E > 0).sum() == 2


@pytest.mark.parametrize("graph", ["none", "similarity"])
def test_noise_bias_capacity_and_graphs_go_with_it(graph):
    layer = layer_of(
        graph=graph, router_noise=1.0, balancing_rate=0.1, capacity_factor=1.0, allow_leak=True
    )
    u_BTD = torch.randn(2, 9, 12, dtype=torch.float64)
    output_BTD, stats = layer(u_BTD, u_BTD)
    assert output_BTD.isfinite().all()
    assert stats.load_loss is not None
    assert stats.dropped > 0
    torch.testing.assert_close(  # dropped assignments count, as in the load
        stats.expert_input_ED.sum(0), u_BTD.flatten(0, 1).mean(0)
    )


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_block_that_is_recomputed_trains_as_one_that_is_not(small_config, random_ids, graph):
    section = {"kind": "smoe", "num_experts": 4, "graph": graph} | FOLLOWING
    found = []
    for recompute in ("none", "block"):
        model = build_model(small_config(feed_forward=section, recompute=recompute))
        materialize(model, seed=0, dtype=torch.float64)
        output = model(random_ids(2, 16))
        output.logits.logsumexp(-1).sum().backward()
        found.append([output.routing[0].expert_input_ED, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_step_reads_no_number_from_the_device(small_config):
    # Tensors on the meta device have no numbers: whatever would wait for one fails.
    section = {"kind": "smoe", "num_experts": 4} | FOLLOWING
    model = build_model(small_config(feed_forward=section))
    output = model(torch.zeros(2, 16, dtype=torch.int64, device="meta"))
    output.logits.sum().backward()
    for stats in output.routing:
        model.get_submodule(stats.name).update(stats, 0.5)


@pytest.mark.parametrize("kind", ["vit", "mixer"])
def test_images_have_it_too(kind):
    section = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 16} | FOLLOWING
    sizes = {"num_layers": 2, "hidden_size": 24, "image_size": 8, "patch_size": 2, "num_classes": 3}
    config = (
        ViTConfig(**sizes, num_heads=4, feed_forward=section)
        if kind == "vit"
        else MixerConfig(
            **sizes, token_feed_forward={"hidden_size": 8}, channel_feed_forward=section
        )
    )
    model = build_model(config)
    materialize(model, seed=0)
    output = model(torch.randn(2, 3, 8, 8))
    for stats in output.routing:
        layer = model.get_submodule(stats.name)
        before_ED = layer.router.score.mean_input.clone()
        layer.update(stats, 0.0)
        moved_E = (layer.router.score.mean_input != before_ED).any(1)
        assert torch.equal(moved_E, stats.load_E > 0)


def test_adapters_of_experts_count_in_their_hidden_layers():
    plain = make(Experts)
    adapted = LoRAExperts(plain, LoRAConfig(rank=2))
    for adapter in (adapted.up_lora, adapted.down_lora):
        adapter.A = torch.nn.Parameter(torch.randn(adapter.A.shape, dtype=torch.float64))
        adapter.B = torch.nn.Parameter(torch.randn(adapter.B.shape, dtype=torch.float64))
    scatter(adapted)
    rows_ED = torch.randn(6, 12, dtype=torch.float64)
    found_EF = adapted.hidden(rows_ED)
    with torch.no_grad():
        plain.up += adapted.up_lora.delta(adapted.up_lora.A, adapted.up_lora.B)
    torch.testing.assert_close(found_EF, plain.hidden(rows_ED))


def test_a_bf16_layer_has_its_buffer_and_its_logits_in_fp32():
    layer = make(SparseMoE, make_config(**FOLLOWING), dtype=torch.bfloat16)
    u_BTD = torch.randn(2, 9, 12, dtype=torch.bfloat16)
    assert layer.router.score(u_BTD[0], layer.expert_features()).dtype == torch.float32
    stats = layer.router(u_BTD, features=layer.expert_features()).stats
    layer.update(stats, 0.0)
    assert {layer.router.score.mean_input.dtype, stats.expert_input_ED.dtype} == {torch.float32}


def test_a_score_that_follows_nothing_has_no_statistic_for_it():
    router = make(make_router, make_config(score="attentive"))
    u_BTD = torch.randn(2, 9, 12, dtype=torch.float64)
    assert router(u_BTD).stats.expert_input_ED is None
