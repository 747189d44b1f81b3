"""Decoders: causality, positions, windows, sinks, and the routers of open mixtures by hand."""

import math

import pytest
import torch

from polyad.model.attention import attend_with_sinks
from polyad.model.build import build_model, materialize, read_model_config
from polyad.model.rotary import RotaryConfig, rotation
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.router import TopK

SMALL = {
    "kind": "decoder", "num_layers": 2, "hidden_size": 24, "num_heads": 4, "head_size": 6,
    "num_key_value_heads": 2, "sequence_length": 16, "vocab_size": 31,
}  # fmt: skip
EXPERTS = {"kind": "smoe", "num_experts": 6, "top_k": 2, "expert_hidden_size": 8,
           "activation": "swiglu"}  # fmt: skip
LATENT = {"key_value_rank": 8, "query_rank": 9, "plain_size": 4, "rotated_size": 4, "value_size": 5}


def model_of(**more):
    model = build_model(read_model_config(SMALL | more))
    materialize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return model.eval()


def test_products_of_rotated_units_depend_on_the_distance_alone():
    config, g = RotaryConfig(theta=50.0), torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 6, dtype=torch.float64, generator=g)
    turned = rotation(config, 6, torch.arange(9), torch.float64)
    products = turned.turn(q.expand(9, 6), config) @ turned.turn(k.expand(9, 6), config).mT
    for distance in range(-8, 9):
        of_distance = products.diagonal(distance)
        assert torch.allclose(of_distance, of_distance[:1].expand_as(of_distance))


def test_neighbours_turn_as_halves_do_in_another_order():
    halves, neighbours = RotaryConfig(), RotaryConfig(pairs="neighbours")
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rotation(halves, 6, torch.arange(5), torch.float64)
    ordered = torch.cat((x[:, ::2], x[:, 1::2]), -1)
    assert torch.equal(turned.turn(x, neighbours), turned.turn(ordered, halves))


def test_a_window_of_three_sees_three_tokens():
    model = model_of(num_layers=1, sliding_window=3).double()
    ids = torch.randint(31, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 4] = (ids[:, 4] + 1) % 31
    moved = (model(ids).logits - model(changed).logits).abs().amax(-1)[0] > 1e-9
    assert moved.tolist() == [t in (4, 5, 6) for t in range(12)]


def test_a_sink_takes_its_share():
    """Two tokens with logits ln 1 and ln 2 beside a sink of ln 5: weights 1/8 and 2/8."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, math.log(2)]).view(1, 1, 2, 1)
    v = torch.tensor([8.0, 16.0]).view(1, 1, 2, 1)
    seen, sinks = torch.ones(1, 2, dtype=torch.bool), torch.tensor([math.log(5)])
    assert attend_with_sinks(q, k, v, seen, sinks, 1.0).item() == pytest.approx(5.0)


def selected(scores, bias=None, **section):
    config = SparseMoEConfig(num_experts=len(scores), top_k=2, selection_bias=True, **section)
    selection = TopK(config)
    selection.balancing_bias = torch.zeros(len(scores)) if bias is None else torch.tensor(bias)
    chosen = selection(torch.tensor([scores]))
    pairs = zip(chosen.expert_ids_NK[0].tolist(), chosen.weights_NK[0].tolist(), strict=True)
    return dict(sorted(pairs))


def test_groups_of_deepseek_v3_by_hand():
    """Groups score 1.0, 1.4 (with the bias of 0.3) and 0.95: the third is left out, whose 0.85 is
    the second highest of all without groups."""
    scores, bias = [0.9, 0.1, 0.6, 0.5, 0.85, 0.1], [0.0, 0.0, 0.0, 0.3, 0.0, 0.0]
    options = {"score_function": "sigmoid", "combine": "normalized", "routed_scaling_factor": 2.5}
    groups = {"num_groups": 3, "top_groups": 2, "group_score": "best_two"}
    found = selected(scores, bias, **options, **groups)
    assert found == pytest.approx({0: 2.5 * 0.9 / 1.4, 3: 2.5 * 0.5 / 1.4})
    found = selected(scores, bias, **options)
    assert found == pytest.approx({0: 2.5 * 0.9 / 1.75, 4: 2.5 * 0.85 / 1.75})


def test_groups_of_deepseek_v2_score_by_their_best():
    scores = [0.05, 0.3, 0.2, 0.25, 0.15, 0.05]
    found = selected(
        scores, num_groups=3, top_groups=1, combine="softmax", routed_scaling_factor=4.0
    )
    assert found == pytest.approx({0: 0.2, 1: 1.2})


def test_one_normalized_expert_has_the_weight_one():
    config = SparseMoEConfig(num_experts=3, top_k=1, combine="normalized")
    assert TopK(config)(torch.tensor([[0.2, 0.5, 0.3]])).weights_NK.item() == 1.0


def test_a_padding_token_gets_no_gradient_and_starts_at_zero():
    model = model_of(pad_id=4)
    ids = torch.tensor([[4, 5, 4, 6]])
    assert model.token_embedding.weight[4].abs().max() == 0
    model(ids).logits.sum().backward()
    assert model.token_embedding.weight.grad[4].abs().max() == 0
    assert model.token_embedding.weight.grad[5].abs().max() > 0
