"""How alike experts are: outputs of single experts, cosines and centred kernel alignment."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

from polyad.train.experts.probing import Decision, RoutedLayer, deciding, routed_layers
from polyad.train.experts.similarity import ExpertSimilarity, _cka, _cosine
from tests.helpers.random_model import random_model

SECTIONS = {
    "smoe": {"kind": "smoe", "num_experts": 3, "top_k": 2, "expert_hidden_size": 12},
    "emoe": {"kind": "emoe", "num_experts": 4, "top_k": 2},
    "mxd": {"kind": "mxd", "num_experts": 9, "top_k": 4, "hidden_size": 12},
    "transcoder": {"kind": "transcoder", "num_experts": 9, "top_k": 4},
    "mumoe": {"kind": "mumoe", "num_experts": [3], "rank": 8},
    "levels": {"kind": "mumoe", "num_experts": [3, 2], "rank": 8, "level_std": 0.5},
    "gated": {"kind": "mumoe", "num_experts": [3], "rank": 8, "activation": "swiglu"},
}


def decided(kind):
    """The layer, the arguments and the output of its forward pass, and what it decided."""
    model = random_model(SECTIONS[kind], num_layers=1, num_heads=2)
    (layer,) = routed_layers(model)
    feed_forward, calls = model.get_submodule(layer.name), []
    handle = feed_forward.register_forward_hook(lambda _, given, out: calls.append((given, out)))
    with deciding(model, [layer]) as decisions:
        model(torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0)))
    handle.remove()
    given, (output_BTD, *_) = calls[0]
    return feed_forward, given, output_BTD.flatten(0, 1), decisions[layer.name]


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["smoe", "emoe", "mxd", "transcoder"])
def test_outputs_of_single_experts_add_up_to_that_of_the_layer(kind):
    layer, _, output_MD, decision = decided(kind)
    weights_MS = decision.coefficients().double()
    assert ((weights_MS > 0).sum(1) <= layer.config.top_k).all()
    every_M = torch.arange(len(output_MD))
    total_MD = sum(
        weights_MS[:, expert, None] * decision.output(0, expert, every_M)
        for expert in range(weights_MS.shape[1])
    )
    if kind != "smoe":  # whose experts have biases of their own
        total_MD = total_MD + layer.output_bias
    torch.testing.assert_close(total_MD, output_MD, rtol=1e-6, atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["mumoe", "levels", "gated"])
def test_an_expert_of_a_mumoe_has_the_whole_coefficient_of_its_level(kind):
    layer, given, _, decision = decided(kind)
    rows = torch.arange(len(decision.levels[0]))

    def alone(level, expert):
        def change(_, arguments, output):
            coefficients = list(output.coefficients)
            coefficients[level] = torch.zeros_like(coefficients[level])
            coefficients[level][:, expert] = 1
            return output._replace(coefficients=coefficients)

        handle = layer.gate.register_forward_hook(change)
        output, _ = layer(*given)
        handle.remove()
        return output.flatten(0, 1)

    for level, size in enumerate(layer.config.num_experts):
        for expert in range(size):
            torch.testing.assert_close(decision.output(level, expert, rows), alone(level, expert))


def hsic(first, second):
    """The mean over all four different tokens, which Song et al. 2012 define the estimator by."""
    k, m = first @ first.T, second @ second.T
    terms = [
        k[i, j] * m[i, j] + k[i, j] * m[q, r] - 2 * k[i, j] * m[i, q]
        for i, j, q, r in itertools.permutations(range(len(first)), 4)
    ]
    return float(sum(terms) / len(terms))


def compared(outputs_BEND, batch_size=2):
    """Batches of outputs, as two samples each."""
    batches, experts, tokens, _ = outputs_BEND.shape
    layer = RoutedLayer(name="blocks.0.feed_forward", levels=(experts,))
    similarity = ExpertSimilarity(layer, batches * batch_size, batch_size)
    for number, outputs_END in enumerate(outputs_BEND):
        decision = Decision(
            levels=[torch.zeros(tokens, experts)],
            selected=None,
            outputs=lambda _, expert, rows, of=outputs_END: of[expert][rows],
        )
        sample_N = number * batch_size + torch.arange(tokens) * batch_size // tokens
        similarity.add(decision, sample_N)
    return similarity


def cosines(similarity):
    """Of each pair of experts."""
    (sums_GEE,) = similarity.sums()
    return _cosine(sums_GEE.sum(0))


def alignments(similarity):
    (sums_GEE,) = similarity.sums()
    return _cka(sums_GEE.sum(0))


def test_cosine_and_alignment_are_those_of_the_definitions():
    outputs = torch.randn(3, 4, 6, 5, generator=torch.Generator().manual_seed(3)).double()
    outputs[:, 1] += outputs[:, 0]
    level = compared(outputs)
    (columns,) = level.result()
    assert columns["compared_tokens"] == 18
    for first, second in itertools.combinations(range(4), 2):
        cosine = cosine_similarity(outputs[:, first], outputs[:, second], dim=-1).mean()
        assert cosines(level)[first, second] == pytest.approx(float(cosine))
        across, own, other = (
            sum(hsic(batch[a], batch[b]) for batch in outputs)
            for a, b in ((first, second), (first, first), (second, second))
        )
        assert alignments(level)[first, second] == pytest.approx(across / (own * other) ** 0.5)
    above = np.triu_indices(4, 1)
    assert columns["cosine"] == pytest.approx(cosines(level)[above].mean())
    assert columns["cka"] == pytest.approx(alignments(level)[above].mean())
    assert columns["cka_low"] < columns["cka"] < columns["cka_high"]
    assert cosines(level)[0, 1] > 0.5 > cosines(level)[0, 2]


def test_alignment_sees_through_a_rotation_and_finds_nothing_in_noise():
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 8, 64, 96, generator=generator).double()
    turned, _ = torch.linalg.qr(torch.randn(96, 96, generator=generator).double())
    level = compared(torch.stack([one, 3 * one @ turned, other], dim=1))
    assert alignments(level)[0, 1] == pytest.approx(1)
    assert abs(cosines(level)[0, 1]) < 0.1
    # Of 64 tokens 96 numbers wide: the biased form says 0.6.
    assert abs(alignments(level)[0, 2]) < 0.1


def test_an_expert_that_says_the_same_of_all_tokens_has_no_alignment():
    outputs = torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(1)).double()
    outputs[:, 2] = 1.0
    level = compared(outputs)
    assert np.isnan(alignments(level)[0, 2])
    assert level.result()[0]["cka"] == pytest.approx(
        alignments(level)[0, 1]
    )  # the pair that has one
    assert np.isnan(compared(outputs[:, :1]).result()[0]["cka"])


@pytest.mark.parametrize("last", [20, 3])
def test_a_smaller_last_batch_leaves_the_interval_narrow(last):
    """Nearly equal experts: a draw is divided by its own tokens, and too few are left out."""
    torch.manual_seed(0)
    layer = RoutedLayer(name="blocks.0.feed_forward", levels=(2,))
    similarity = ExpertSimilarity(layer, samples=16 * 8, batch_size=8)
    for batch in range(16):
        tokens = 128 if batch < 15 else last
        outputs = torch.randn(tokens, 6)
        both = torch.stack([outputs, outputs + 0.1 * torch.randn(tokens, 6)])
        decision = SimpleNamespace(output=lambda _, expert, rows, both=both: both[expert][rows])
        similarity.add(decision, torch.full((tokens,), batch * 8))
    (columns,) = similarity.result()
    assert columns["compared_tokens"] == 15 * 128 + (last if last > 3 else 0)
    for name in ("cosine", "cka"):
        value, low, high = (columns[f"{name}{end}"] for end in ("", "_low", "_high"))
        assert 0.95 < low <= value <= high <= 1.0
        assert high - low < 0.01
