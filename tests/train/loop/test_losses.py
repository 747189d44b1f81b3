"""The loss of sample similarity: equal to its formula, term by term, in value and gradient."""

import pytest
import torch

from polyad.model.build import read_model_config
from polyad.model.layers import RealTokens
from polyad.model.output import AUXILIARY_LOSSES, RoutingStats, StatisticsModule, ask_for_statistics
from polyad.train.loop.losses import (
    InputRecorder,
    LossConfig,
    SampleSimilarityConfig,
    routing_loss,
    sample_similarity_loss,
    weigh_by_distance,
    with_sample_similarity,
)
from polyad.train.tasks.distillation import cross_entropy
from polyad.train.tasks.task import OneDevice
from tests.helpers.everyday import everyday
from tests.helpers.random_model import built, draw_anew
from tests.helpers.training import Case, image_batch, train

DISTANCES = ("squared", "batch_maximum")


def config(**changes):
    return SampleSimilarityConfig(**({"same": 0.7, "different": 1.9} | changes))


def by_the_formula(scores, inputs, settings):
    """Four loops, over x, x', e and e'."""
    samples, experts = scores.shape
    distances = [
        [((a - b) ** 2).sum() if settings.distance == "squared" else (a - b).norm() for b in inputs]
        for a in inputs
    ]
    largest = max(float(d) for row in distances for d in row)
    scale = 1.0 if settings.distance == "squared" else largest
    total = torch.zeros((), dtype=torch.float64)
    for x in range(samples):
        for other in range(samples):
            d = distances[x][other].item() / scale
            for e in range(experts):
                for f in range(experts):
                    both = scores[x, e] * scores[other, f] * d
                    if e == f:
                        total = total + settings.same * both / experts
                    else:
                        total = total - settings.different * both / (experts**2 - experts)
    return total / (samples**2 - samples)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("rows", [1, 3, 256])
def test_it_is_the_formula_in_value_and_gradient(distance, rows):
    torch.manual_seed(0)
    inputs = torch.randn(7, 2, 3, dtype=torch.float64)
    inputs[4] = inputs[2]  # a distance of 0, where a root has no gradient
    logits = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    settings, scores = config(distance=distance), logits.softmax(-1)
    weights = weigh_by_distance(inputs, scores, settings, rows)
    ours = sample_similarity_loss(scores, weights, settings)
    (our_gradient,) = torch.autograd.grad(ours, logits)
    theirs = by_the_formula(logits.softmax(-1), inputs.flatten(1), settings)
    (their_gradient,) = torch.autograd.grad(theirs, logits)
    # A distance is the root of a difference of squares, which rounding leaves near 1e-16, not at 0.
    rtol, atol = (1e-12, 1e-14) if distance == "squared" else (1e-7, 1e-9)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=rtol, atol=atol)
    assert their_gradient.abs().max() > 1e-3


def test_it_is_a_number_worked_out_by_hand():
    # Two samples at a squared distance of 4, two experts. Apart, with <p, p'> = 0: the ordered
    # pairs give 2 * -(1.9 / 2) * 4 over N^2 - N = 2. Together: 2 * (0.7 / 2) * 4 over 2.
    inputs = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    for scores, expected in (([[1, 0], [0, 1]], -3.8), ([[0, 1], [0, 1]], 1.4)):
        scores = torch.tensor(scores, dtype=torch.float64)
        loss = sample_similarity_loss(scores, weigh_by_distance(inputs, scores, config()), config())
        assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("distance", DISTANCES)
def test_one_expert_and_equal_samples_are_finite(distance):
    settings = config(distance=distance)
    for samples in (torch.zeros(3, 2), torch.randn(3, 2)):
        ones = torch.ones(3, 1, requires_grad=True)
        weights = weigh_by_distance(samples, ones, settings)
        loss = sample_similarity_loss(ones, weights, settings)
        loss.backward()
        assert loss.isfinite()
        assert ones.grad.isfinite().all()


IMAGES = {"image_size": 8, "patch_size": 4, "num_classes": 4, "num_layers": 2, "hidden_size": 16}
CP = {"kind": "mumoe", "num_experts": [4, 2], "rank": 8, "hidden_size": 20, "level_std": 0.5}
MODELS = {
    "vit sparse": {
        "kind": "vit", "num_heads": 4, "feed_forward":
        {"kind": "smoe", "num_experts": 5, "expert_hidden_size": 12, "graph": "similarity"},
    },
    "mixer": {
        "kind": "mixer",
        "token_feed_forward": CP | {"gate_input": "normalized"},
        "channel_feed_forward": CP | {"gate_input": "normalized"},
    },
    "networks": {
        "kind": "mixture", "num_experts": 3,
        "expert": {"convolutions": [], "hidden_sizes": [6, 5]},
        "gate_network": {"convolutions": [], "hidden_sizes": [7, 5]}, "gate": "attentive",
    },
    "grey networks": {
        "kind": "mixture", "num_experts": 3, "grey": True,
        "expert": {"convolutions": [], "hidden_sizes": [6, 5]},
        "gate_network": {"convolutions": [], "hidden_sizes": [7, 5]},
    },
    "head": {
        "kind": "vit", "num_heads": 4, "head": {"kind": "mumoe", "num_experts": [3], "rank": 4}
    },
}  # fmt: skip


def made(name):
    keys = ("image_size", "num_classes") if "networks" in name else IMAGES
    return draw_anew(built({key: IMAGES[key] for key in keys} | MODELS[name]), 0.5).double()


@pytest.mark.parametrize("of", ["input", "layer_input"])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_of_a_model_gets_it_from_its_own_router(name, of):
    torch.manual_seed(1)
    model, pixels = made(name), torch.randn(5, 3, 8, 8, dtype=torch.float64)
    if "grey" in name:  # three equal channels would make squared distances three times as large
        pixels = pixels[:, :1]
    images = pixels.expand(5, 3, 8, 8)
    assert all(stats.sample_scores_BS is None for stats in model(images).routing)
    ask_for_statistics(model, losses=AUXILIARY_LOSSES, samples=True)
    predictor = OneDevice(model, cross_entropy)
    recorder = InputRecorder(predictor, getattr(model, "as_read", None))
    routing = recorder(images).routing
    settings = config(of=of)
    found = with_sample_similarity(routing, recorder.inputs, settings)
    assert len(found) == len(routing) > 0
    for stats, result in zip(routing, found, strict=True):
        levels = stats.levels or (stats.sample_scores_BS.shape[1],)
        inputs = pixels.flatten(1) if of == "input" else stats.sample_inputs_BD
        expected = sum(
            by_the_formula(scores.detach(), inputs, settings)
            for scores in stats.sample_scores_BS.split(levels, dim=1)
        )
        torch.testing.assert_close(result.losses["similarity_loss"], expected, rtol=1e-9, atol=0)
        total = torch.full((5,), float(len(levels))).double()
        torch.testing.assert_close(stats.sample_scores_BS.sum(1), total)
        assert result.sample_scores_BS is result.sample_inputs_BD is None
    loss = routing_loss(found, LossConfig(sample_similarity=settings))
    torch.testing.assert_close(loss, sum(x.losses["similarity_loss"] for x in found))
    loss.backward()
    gates = [p for n, p in model.named_parameters() if "gate" in n or "router.score" in n]
    assert all(gate.grad.abs().max() > 0 for gate in gates)


def test_probabilities_of_a_padded_sample_are_of_its_real_tokens():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    layer = StatisticsModule()
    layer.gives_samples = True
    u, scores = torch.randn(3, 3, 4), torch.rand(6, 2)
    found = layer.with_samples(RoutingStats("", scores), [scores], u, RealTokens.of(mask))
    for sample, rows in enumerate(([0, 1], [2], [3, 4, 5])):
        inputs = u[sample][mask[sample]].mean(0)
        torch.testing.assert_close(found.sample_scores_BS[sample], scores[rows].mean(0))
        torch.testing.assert_close(found.sample_inputs_BD[sample], inputs)


def test_the_plain_importance_loss_is_the_root_and_finite_where_scores_are_even():
    plain = LossConfig(importance=2, importance_form="plain")
    for value, expected, slope in ((0.25, 2 * 0.5, 2 * 0.5 / 0.5), (0.0, 0.0, 0.0)):
        squared = torch.tensor(value, requires_grad=True)
        stats = RoutingStats(name="", load_E=torch.ones(1), losses={"importance_loss": squared})
        loss = routing_loss((stats,), plain)
        (gradient,) = torch.autograd.grad(loss, squared)
        assert (loss.item(), gradient.item()) == pytest.approx((expected, slope))


@pytest.mark.distributed
@everyday("recompute", ["none", "block"], keep=["none"])
def test_pixels_are_compared_in_training(workers, recompute):
    """The first step's loss is the model's own, computed beside the engine on the same images."""
    tree = IMAGES | MODELS["vit sparse"] | {"recompute": recompute}
    case = Case(
        model=read_model_config(tree), optimizer="sgd", learning_rate=0.1, last_step=1,
        losses=LossConfig(sample_similarity=config()),
    )  # fmt: skip
    one, two = (workers(size).run(train, case)[0]["routing"][0] for size in (1, 2))
    key = "routing/blocks.1.feed_forward/similarity_loss"
    assert two[key] == pytest.approx(one[key], rel=1e-4)
    model = built(case.model, seed=7)  # the seed of `train`
    ask_for_statistics(model, losses=AUXILIARY_LOSSES, samples=True)
    losses = []
    for images in image_batch(0, case.model).images_BCHW.split(case.micro_batch):
        scores = model(images).routing[1].sample_scores_BS.detach()
        losses.append(by_the_formula(scores, images.flatten(1), config()))
    assert one[key] == pytest.approx(float(sum(losses) / len(losses)), rel=1e-4)
