"""Steering: routing moves to the expert, and nothing moves at strength 0."""

from itertools import pairwise

import pytest
import torch

from polyad.model.mumoe.config import FACTORIZATIONS
from polyad.model.smoe.router import SCORES
from polyad.train.evaluation.generate import Sampling, generate_ids
from polyad.train.experts.interventions import Intervention, intervened
from polyad.train.experts.probing import routed_layers
from tests.helpers.everyday import everyday
from tests.helpers.generated import any_token, uncached
from tests.helpers.random_model import random_model

DRAWN = Sampling(temperature=2.0, seed=3)
LEVELS = [6, 3]
KINDS = {
    f"{name}, {gate_input}": {
        "kind": "mumoe", "factorization": name, "num_experts": LEVELS, "gate_input": gate_input,
    }
    for name in FACTORIZATIONS
    for gate_input in ("residual", "normalized")
} | {
    f"sparse, {score}": {"kind": "smoe", "num_experts": 6, "expert_hidden_size": 16, "score": score}
    for score in SCORES
}  # fmt: skip
every_kind = pytest.mark.parametrize("section", KINDS.values(), ids=KINDS)
SOME = ["cp, residual", "tr, normalized", "sparse, cosine"]
some_everyday = everyday("section", KINDS.values(), keep=SOME, ids=KINDS)
IDS = torch.arange(32).view(2, 16) % 61


def make_model(dtype=torch.float64, **section):
    """Its gates are further from their initial values than the rest."""
    sizes = {"num_layers": 3, "hidden_size": 32, "sequence_length": 16}
    model = random_model(section, noise=0.1, **sizes)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "gate." in name or ".score." in name:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)


def steering(layer, expert, strength):
    return Intervention(layer=layer, experts=(expert,), how="steer", value=float(strength))


def load_of(model, layer, expert, *steerings):
    """The load of an expert in a block, on tokens that are always the same."""
    with torch.no_grad(), intervened(model, steerings):
        return model(IDS).routing[layer].load_E[expert].item()


@every_kind
@pytest.mark.parametrize("last", [False, True])
def test_routing_moves_to_the_expert_the_more_the_stronger(section, last):
    """Also to the last, which is one of the last level."""
    model = make_model(**section)
    expert = routed_layers(model)[1].num_experts - 1 if last else 0
    loads = [
        load_of(model, 1, expert, steering(1, expert, strength))
        for strength in (0.0, 1.0, 2.0, 4.0, 8.0)
    ]
    # Where nearly every token has it, the last thousandth depends on the tokens.
    assert all(more > less - 1e-3 for less, more in pairwise(loads)), loads
    assert loads[-1] > loads[0]
    # A sparse mixture gives it at most one of each token's two choices.
    assert loads[-1] > (0.49 if section["kind"] == "smoe" else 0.9), loads
    away = load_of(model, 1, expert, steering(1, expert, -4.0))
    assert away < loads[0] or loads[0] == 0


def test_scores_rise_by_what_the_gate_says_by_hand():
    # The gate reads the residual stream: with attention and its output silenced, that is x + 3 g.
    model = make_model(kind="mumoe", num_experts=[6])
    block, scores = model.blocks[1], []
    torch.nn.init.zeros_(block.attention.projection.weight)
    torch.nn.init.zeros_(block.attention.projection.bias)
    block.feed_forward.gate.norm.register_forward_hook(
        lambda module, args, normalized: scores.append(args[0])
    )
    for strength in (0.0, 3.0):
        load_of(model, 1, 0, steering(1, 2, strength))
    weight_ND = block.feed_forward.gate.weight.detach()
    expected_N = 3 * weight_ND @ weight_ND[2]  # |g|^2 three times for expert 2 itself
    difference_MN = scores[1] - scores[0]
    torch.testing.assert_close(difference_MN, expected_N.expand_as(difference_MN))


@every_kind
def test_only_the_steered_block_and_those_after_it_change(section):
    model = make_model(**section)
    with torch.no_grad():
        before = model(IDS)
        with intervened(model, [steering(1, 2, 4.0)]):
            during = model(IDS)
        after = model(IDS)
    assert torch.equal(during.routing[0].load_E, before.routing[0].load_E)
    assert not torch.equal(during.routing[1].load_E, before.routing[1].load_E)
    assert not torch.equal(during.logits, before.logits)
    assert torch.equal(after.logits, before.logits)
    assert not any(block._forward_pre_hooks for block in model.blocks)


@some_everyday
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strength_0_changes_not_a_bit(section, dtype):
    model = make_model(dtype=dtype, **section)
    with torch.no_grad():
        expected = model(IDS).logits
        with intervened(model, [steering(layer, 3, 0.0) for layer in range(3)]):
            assert torch.equal(model(IDS).logits, expected)


@some_everyday
def test_a_cache_changes_no_token_of_steered_text(section):
    # 40 tokens of a window of 16: it slides, and the steered prompt is read again.
    model = make_model(dtype=torch.float32, **section)

    def text():
        drawn = {"max_tokens": 40, "sampling": DRAWN}
        return list(generate_ids(model, any_token(), [5, 6, 7], **drawn))

    free = text()
    with intervened(model, [steering(1, 4, 3.0)]):
        assert text() == uncached(model, [5, 6, 7], 40, DRAWN) != free


def test_steerings_of_one_block_are_summed_and_others_stand_beside():
    model = make_model(kind="mumoe", num_experts=[6])
    one, two = (steering(1, 2, strength) for strength in (1.5, 2.5))
    there = steering(0, 1, 5.0)
    both = load_of(model, 1, 2, one, there, two)
    assert both == pytest.approx(load_of(model, 1, 2, there, steering(1, 2, 4.0)), abs=1e-12)
    assert both != pytest.approx(load_of(model, 1, 2, one, two), abs=1e-6)
