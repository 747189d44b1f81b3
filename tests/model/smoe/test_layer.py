"""The layer: against two loops written out, in other precisions, recomputed and cached.

Shapes: B batch, T tokens in a sequence, N tokens, D width, E experts, K experts of a token.
"""

import pytest
import torch
from torch.nn.functional import dropout, gelu

from polyad.model.attention import KeyValueCache
from polyad.model.build import build_model, num_parameters
from polyad.model.decoder_config import GPT2Config
from polyad.model.feedforward import BlockInput
from polyad.model.smoe.layer import SparseMoE, make_plan
from polyad.model.smoe.router import SCORES
from tests.helpers.definitions import by_definition
from tests.helpers.routed_models import (
    V_MOE,
    assert_same_step,
    every_graph,
    routed,
    step,
)
from tests.helpers.routing import make, make_config, make_context, make_trace

ACTIVATIONS = {
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def by_two_loops(layer, u_ND, ids_NK, weights_NK, kept_NK):
    """y_n = sum_k weight_nk (act(u_n up_e + up_bias_e) down_e + output_bias_e), e = ids_nk."""
    experts, rows = layer.experts, []
    for n, u_D in enumerate(u_ND):
        y_D = torch.zeros_like(u_D)
        for expert, weight, kept in zip(ids_NK[n], weights_NK[n], kept_NK[n], strict=True):
            inner_F = u_D @ experts.up[expert]
            if experts.up_bias is not None:
                inner_F = inner_F + experts.up_bias[expert]
            output_D = ACTIVATIONS[layer.config.activation](inner_F) @ experts.down[expert]
            if layer.output_bias is not None:
                output_D = output_D + layer.output_bias[expert]
            y_D = y_D + kept * weight * output_D
        rows.append(y_D)
    return torch.stack(rows)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 2},
        {"top_k": 6},
        {"top_k": 2, "capacity_factor": 0.8},
        {"top_k": 2, "router_bias": False},
        {"top_k": 2, "activation": "gelu"},
        {"top_k": 3, "activation": "quick_gelu"},
        {"top_k": 2, "combine": "softmax"},
        {"top_k": 2, "capacity_factor": 0.8, "combine": "softmax"},
        {"top_k": 1, "combine": "softmax"},
    ],
    ids=str,
)
def test_layer_equals_two_loops_in_value_and_gradients(bias, options):
    layer = make(SparseMoE, make_config(**options), make_context(bias=bias))
    u_BTD = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    y_BTD, stats = layer(u_BTD, torch.full_like(u_BTD, torch.nan))  # it reads no residual stream
    logits_NE = u_BTD.flatten(0, 1) @ layer.router.score.weight.T
    assert (layer.router.score.bias is not None) == (bias and options.get("router_bias", True))
    if layer.router.score.bias is not None:
        logits_NE = logits_NE + layer.router.score.bias
    highest = logits_NE.softmax(-1).topk(options["top_k"])
    total = highest.values.sum(-1, keepdim=True)
    if options["top_k"] == 1 or options.get("combine") == "softmax":
        total = torch.ones_like(total)  # the scores as they are
    kept_NK = torch.ones_like(highest.values)
    if "capacity_factor" in options:  # 0.8 x 18 x 2 / 6 = 4.8: the first five of each expert
        for expert in range(6):
            places = (highest.indices == expert).nonzero().tolist()
            for place in places[5:]:
                kept_NK[tuple(place)] = 0.0
        assert 0 < (kept_NK == 0).sum() < 18
    torch.testing.assert_close(stats.measures["dropped"], (kept_NK == 0).double().mean())
    expected_ND = by_two_loops(
        layer, u_BTD.flatten(0, 1), highest.indices, highest.values / total, kept_NK
    )
    torch.testing.assert_close(y_BTD.flatten(0, 1), expected_ND)
    inputs = [u_BTD, *layer.parameters()]
    weights_ND = torch.randn(18, 12, dtype=torch.float64)
    ours = torch.autograd.grad((y_BTD.flatten(0, 1) * weights_ND).sum(), inputs, retain_graph=True)
    theirs = torch.autograd.grad((expected_ND * weights_ND).sum(), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(mine, other, atol=1e-9, rtol=1e-7)


def test_dropout_acts_on_the_output_in_training_only():
    layer = make(SparseMoE, make_config(), make_context(dropout=0.5))
    u_BTD = torch.randn(2, 50, 12, dtype=torch.float64)
    y_BTD = layer(u_BTD, u_BTD)[0]
    assert 0.4 < (y_BTD == 0).double().mean() < 0.6
    whole_BTD = layer.eval()(u_BTD, u_BTD)[0]
    assert (whole_BTD != 0).all()
    torch.testing.assert_close(y_BTD[y_BTD != 0], 2 * whole_BTD[y_BTD != 0])


def test_experts_drop_inner_units_and_outputs_in_training_only():
    # Widths that grouped products take in fp32.
    config = make_config(expert_dropout=0.3, expert_hidden_size=20)
    layer = make(SparseMoE, config, make_context(), dtype=torch.float32)
    u_BTD = torch.randn(2, 9, 12)
    torch.manual_seed(6)
    y_ND = layer(u_BTD, u_BTD)[0].flatten(0, 1)
    selected = layer.router(u_BTD).selected
    plan = make_plan(selected.expert_ids_NK, selected.counts_E)
    torch.manual_seed(6)
    inner_MF = dropout(torch.ones(18 * 2, 20), 0.3)
    outer_MD = dropout(torch.ones(18 * 2, 12), 0.3)
    assert 0.2 < (inner_MF == 0).float().mean() < 0.4
    parts = layer.experts
    expected_ND = torch.zeros(18, 12)
    for row, assignment in enumerate(plan.assignment_M.tolist()):
        n, k = divmod(assignment, 2)
        expert = int(selected.expert_ids_NK[n, k])
        inner_F = u_BTD.flatten(0, 1)[n] @ parts.up[expert] + parts.up_bias[expert]
        inner_F = gelu(inner_F, approximate="tanh") * inner_MF[row]
        output_D = (inner_F @ parts.down[expert]) * outer_MD[row] + layer.output_bias[expert]
        expected_ND = expected_ND.index_add(
            0, torch.tensor([n]), (selected.weights_NK[n, k] * output_D)[None]
        )
    torch.testing.assert_close(y_ND, expected_ND, atol=1e-5, rtol=1e-5)
    inputs = list(layer.parameters())
    ours, theirs = (torch.autograd.grad(y.square().sum(), inputs) for y in (y_ND, expected_ND))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=2e-4)
    config = make_config(expert_hidden_size=20)
    plain = make(SparseMoE, config, make_context(), dtype=torch.float32)
    assert torch.equal(layer.eval()(u_BTD, u_BTD)[0], plain.eval()(u_BTD, u_BTD)[0])


def test_evaluation_has_a_capacity_of_its_own():
    options = {"capacity_factor": 0.5, "evaluation_capacity_factor": 6 / 2}
    layer = make(SparseMoE, make_config(**options))
    u_BTD = torch.randn(2, 9, 12, dtype=torch.float64)
    assert layer(u_BTD, u_BTD)[1].measures["dropped"] > 0.2
    y_BTD, stats = layer.eval()(u_BTD, u_BTD)
    assert stats.measures["dropped"] == 0
    whole_BTD = make(SparseMoE, make_config()).eval()(u_BTD, u_BTD)[0]
    torch.testing.assert_close(y_BTD, whole_BTD)


@every_graph
def test_recomputation_changes_no_gradient(small_model, random_ids, options):
    ids = random_ids(2, 16)
    plain = step(routed(small_model, options, dropout=0.2), ids)
    recomputed = step(routed(small_model, options, dropout=0.2, recompute="block"), ids)
    assert_same_step(recomputed, plain, tolerance=0)


def test_recomputation_finds_the_same_noise(small_model, random_ids):
    ids = random_ids(2, 16)
    plain = step(routed(small_model, V_MOE, dropout=0.2), ids)
    recomputed = step(routed(small_model, V_MOE, dropout=0.2, recompute="block"), ids)
    assert_same_step(recomputed, plain, tolerance=0)
    assert any(name.endswith("load_loss") for name in plain)


def test_noise_losses_and_dropout_of_experts_are_finite_in_bf16(small_model, random_ids):
    ids = random_ids(2, 16)
    for name, value in step(routed(small_model, V_MOE, dtype=torch.bfloat16), ids).items():
        assert value.isfinite().all(), name


@every_graph
@pytest.mark.parametrize("score", SCORES)
def test_bf16_is_finite_and_close_to_fp32(small_model, random_ids, options, score):
    ids, options = random_ids(2, 16), options | {"score": score, "top_k": 6}
    # With all experts no choice can tip over; the weights are still the router's.
    exact = step(routed(small_model, options), ids)
    rough = step(routed(small_model, options, dtype=torch.bfloat16), ids)
    assert rough["logits"].dtype == torch.bfloat16
    for name, value in rough.items():
        assert value.isfinite().all(), name
    # bf16 keeps 8 bits: 0.4% a rounding, a few dozen roundings.
    error = (rough["logits"].float() - exact["logits"]).std() / exact["logits"].std()
    assert error < 0.05


@every_graph
def test_grouped_experts_equal_the_loop_in_a_model(small_model, random_ids, options):
    ids = random_ids(2, 16)
    grouped = step(routed(small_model, options), ids)
    with by_definition():
        loop = step(routed(small_model, options), ids)
    assert_same_step(grouped, loop, tolerance=1e-5)


# Generation


@every_graph
@pytest.mark.parametrize("pieces", [[16], [1] * 16, [5, 1, 1, 9], [8, 8]], ids=str)
@pytest.mark.parametrize("score", ["linear", "cosine"])
def test_cached_logits_in_pieces_equal_those_of_the_whole(
    small_model, random_ids, options, pieces, score
):
    options = options | {"score": score, "sigma": 2.0}
    model = routed(small_model, options, dtype=torch.float64).eval()
    ids, cache = random_ids(3, 16), KeyValueCache(3, 16)
    with torch.no_grad():
        expected = model(ids).logits
        parts = [model(part, cache).logits for part in ids.split(pieces, dim=1)]
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-10, rtol=0)


def test_a_cache_is_long_enough_to_cross_a_block_of_rows(small_model, random_ids):
    options = {"graph": "similarity", "tau": 4.0}
    model = routed(small_model, options, dtype=torch.float64, sequence_length=300).eval()
    ids, cache = random_ids(2, 300), KeyValueCache(3, 300)
    with torch.no_grad():
        expected = model(ids).logits
        parts = [model(part, cache).logits for part in ids.split([100, 199, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-10, rtol=0)


# Placement and counts


@pytest.mark.parametrize(
    ("placement", "routed_blocks"),
    [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2]), (4, [3]), ([0, 3], [0, 3]), ([2], [2])],
)
def test_placement_says_which_blocks_route(small_model, random_ids, placement, routed_blocks):
    options = {"kind": "smoe", "placement": placement, "dense_hidden_size": 20}
    model = small_model(num_layers=4, feed_forward=options)
    output = model(random_ids(2, 16))
    names = [f"blocks.{block}.feed_forward" for block in routed_blocks]
    assert [stats.name for stats in output.routing] == names
    for number, block in enumerate(model.blocks):
        if number not in routed_blocks:
            assert block.feed_forward.up.out_features == 20
    # The loss of each is its own: even load is 1 in each, whatever their number.
    for stats in output.routing:
        layer = model.get_submodule(stats.name)
        assert 0.5 < stats.losses["balance_loss"] < layer.config.num_experts
        torch.testing.assert_close(stats.load_E.sum().item(), 1.0)


def test_a_layer_without_spread_has_a_balance_loss_of_one(small_model, random_ids):
    # Scores start within 1% of even: P is, and so is E sum f P for any f.
    model = small_model(num_layers=4, feed_forward={"kind": "smoe", "placement": 2})
    losses = [stats.losses["balance_loss"].item() for stats in model(random_ids(2, 16)).routing]
    assert losses == pytest.approx([1.0, 1.0], abs=0.03)


def test_parameter_count_of_the_papers_medium_model():
    # A block: attention 4 x 352^2 + 4 x 352 = 497,024; two norms 4 x 352 = 1,408; score
    # 16 x 352 + 16 = 5,648; experts 16 (2 x 352^2 + 2 x 352) = 3,976,192. Sum 4,480,272, times 6.
    # Around them: 267,735 words x 352, once and not twice as in the paper, whose head is not tied;
    # 512 x 352 positions; the last norm 704. With another 94,242,720 for its head: 215.5M.
    config = GPT2Config(
        num_layers=6,
        hidden_size=352,
        num_heads=8,
        sequence_length=512,
        vocab_size=267_735,
        feed_forward={"kind": "smoe", "num_experts": 16, "top_k": 2, "expert_hidden_size": 352},
    )
    blocks = build_model(config).blocks
    assert sum(p.numel() for p in blocks.parameters()) == 26_881_632
    assert num_parameters(config) == 26_881_632 + 94_242_720 + 180_224 + 704
    assert round((num_parameters(config) + 94_242_720) / 1e6) == 216


def test_graphs_have_no_parameters_and_a_cosine_score_has_two_matrices():
    def count(**options):
        feed_forward = {"kind": "smoe", "num_experts": 16, "expert_hidden_size": 8, **options}
        return num_parameters(
            GPT2Config(
                num_layers=1, hidden_size=32, num_heads=4, vocab_size=61, feed_forward=feed_forward
            )
        )

    assert count(graph="similarity") == count(graph="attention") == count()
    # Linear: 16 x 32 + 16 = 528; cosine: 8 x 32 + 16 x 8 + 1 = 385; random: none.
    assert count(score="cosine") == count() - 528 + 385
    assert count(score="random") == count() - 528


def test_the_layer_asks_for_attention_only_if_its_graph_does():
    for graph, needed in (("none", False), ("similarity", False), ("attention", True)):
        layer = make(SparseMoE, make_config(graph=graph))
        assert (layer.attention_head() is not None) is needed
    u_BTD = torch.randn(2, 9, 12, dtype=torch.float64)
    trace = make_trace(2, 9, heads=3, size=4, width=12)
    assert layer(u_BTD, u_BTD, BlockInput(attention=trace))[0].shape == (2, 9, 12)
