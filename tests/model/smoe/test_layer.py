"""The layer: against two loops written out, with dropout, and its place and size.

Shapes: B batch, T tokens in a sequence, N tokens, D width, E experts, K experts of a token.
"""

import pytest
import torch
from torch.nn.functional import dropout, gelu

from polyad.model.build import build_model, num_parameters
from polyad.model.decoder import GPT2Config
from polyad.model.smoe.layer import SparseMoE, make_plan
from tests.helpers.routing import assert_same_with_gradients, make, make_config, make_context

ACTIVATIONS = {
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def by_two_loops(layer, u_ND, ids_NK, weights_NK, kept_NK, masks=None):
    """y_n = sum_k weight_nk (act(u_n up_e + up_bias_e) down_e + output_bias_e), e = ids_nk.

    Masks [N, K, F] and [N, K, D] are those of dropout, inside of experts and behind them.
    """
    experts, rows = layer.experts, []
    for n, u_D in enumerate(u_ND):
        y_D = torch.zeros_like(u_D)
        for k, expert in enumerate(ids_NK[n]):
            inner_F = u_D @ experts.up[expert]
            if experts.up_bias is not None:
                inner_F = inner_F + experts.up_bias[expert]
            inner_F = ACTIVATIONS[layer.config.activation](inner_F)
            if masks is None:
                output_D = inner_F @ experts.down[expert]
            else:
                output_D = (inner_F * masks[0][n, k]) @ experts.down[expert] * masks[1][n, k]
            if layer.output_bias is not None:
                output_D = output_D + layer.output_bias[expert]
            y_D = y_D + kept_NK[n, k] * weights_NK[n, k] * output_D
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
        {"top_k": 2, "combine": "scores"},
        {"top_k": 2, "capacity_factor": 0.8, "combine": "scores"},
        {"top_k": 1, "combine": "scores"},
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
    if options["top_k"] == 1 or options.get("combine") == "scores":
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
    inputs = [u_BTD, *layer.parameters()]
    assert_same_with_gradients(y_BTD.flatten(0, 1), expected_ND, inputs, least=1e-3)


def test_experts_drop_inner_units_and_outputs_in_training_only():
    # Widths that grouped products take in fp32.
    config = make_config(expert_dropout=0.3, expert_hidden_size=20)
    layer = make(SparseMoE, config, make_context(), dtype=torch.float32)
    u_BTD = torch.randn(2, 9, 12)
    torch.manual_seed(6)
    y_ND = layer(u_BTD, u_BTD)[0].flatten(0, 1)
    (weights_NK, ids_NK, counts_E), _ = layer.router(u_BTD)
    plan = make_plan(ids_NK, counts_E)
    torch.manual_seed(6)
    masks = [dropout(torch.ones(18 * 2, n), 0.3)[plan.row_A].view(18, 2, n) for n in (20, 12)]
    assert 0.2 < (masks[0] == 0).float().mean() < 0.4
    kept_NK = torch.ones(18, 2)
    expected_ND = by_two_loops(layer, u_BTD.flatten(0, 1), ids_NK, weights_NK, kept_NK, masks)
    torch.testing.assert_close(y_ND, expected_ND, atol=1e-5, rtol=1e-5)
    inputs = list(layer.parameters())
    ours, theirs = (torch.autograd.grad(y.square().sum(), inputs) for y in (y_ND, expected_ND))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
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
