"""Mixtures of whole networks against the equations, computed naively in float64 from PyTorch's own
layers; and the paper's numbers of parameters."""

import math

import pytest
import torch
from torch import nn

from polyad.model.build import num_parameters, read_model_config
from tests.helpers.random_model import built

CONVOLUTIONS = {"convolutions": [2, 3], "kernel_size": 2, "padding": 1, "hidden_sizes": [5, 6]}
SECTION = {
    "kind": "mixture", "image_size": 6, "num_classes": 4, "num_experts": 3,
    "expert": CONVOLUTIONS, "gate_network": {"hidden_sizes": [7, 8]},
}  # fmt: skip


def made(**changes):
    model = built(SECTION | changes, seed=3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.mixture.gate.parameters():
            parameter.mul_(
                4 if parameter.dim() > 1 else 0.1
            )  # or it would choose the same experts for every image
    return model


def images(count=5):
    return torch.randn(
        count, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


class Naive:
    """The same network of PyTorch's layers, one image after the other."""

    def __init__(self, network):
        self.convolutions = []
        for ours in network.convolutions:
            made, read, side, _ = ours.weight.shape
            layer = nn.Conv2d(read, made, side, padding=ours.padding, dtype=torch.float64)
            layer.weight, layer.bias = ours.weight, ours.bias
            self.convolutions.append(nn.Sequential(layer, nn.ReLU(), nn.MaxPool2d(2, 2)))
        self.hidden, self.output = list(network.hidden), network.output

    def last_hidden(self, image):
        for convolution in self.convolutions:
            image = convolution(image.unsqueeze(0)).squeeze(0)
        first, second = self.hidden
        inner = (first.weight @ image.flatten() + first.bias).clamp(min=0)
        return second.weight @ inner + second.bias

    def logits(self, image):
        return self.output.weight @ self.last_hidden(image).clamp(min=0) + self.output.bias


def naive_shares(model, image):
    """The experts' shares of one image, by loops."""
    config, mixture = model.config, model.mixture
    experts = [Naive(expert) for expert in mixture.experts]
    gate = Naive(mixture.gate.network).last_hidden(image)
    scores = []
    for number, expert in enumerate(experts):
        if config.gate == "attentive":
            query = mixture.gate.scores.query.weight @ gate
            key = mixture.gate.scores.key.weight @ expert.last_hidden(image)
            scores.append(sum(q * k for q, k in zip(query, key, strict=True)) / math.sqrt(len(key)))
        else:
            layer = mixture.gate.scores
            scores.append(layer.weight[number] @ gate.clamp(min=0) + layer.bias[number])
    exponentials = [score.exp() for score in scores]
    if config.top_k is not None:
        least = sorted(float(e.detach()) for e in exponentials)[-config.top_k]
        exponentials = [e if float(e.detach()) >= least else 0 * e for e in exponentials]
    return [e / sum(exponentials) for e in exponentials], [e.logits(image) for e in experts]


def naive_loss(model, image, label):
    shares, logits = naive_shares(model, image)
    probabilities = sum(p * o.exp() / o.exp().sum() for p, o in zip(shares, logits, strict=True))
    return -probabilities[label].log()


@pytest.mark.parametrize("gate", ["softmax", "attentive"])
@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_loss_and_gradients_are_those_of_the_equations(gate, top_k, recompute):
    model = made(gate=gate, top_k=top_k, recompute=recompute)
    x, labels = images(), torch.tensor([0, 3, 1, 1, 2])
    named = dict(model.named_parameters())
    naive = torch.stack([naive_loss(model, *each) for each in zip(x, labels, strict=True)]).mean()
    expected = torch.autograd.grad(naive, list(named.values()))
    loss = nn.functional.cross_entropy(model(x).logits, labels)
    torch.testing.assert_close(loss, naive, rtol=1e-12, atol=0)
    found = torch.autograd.grad(loss, list(named.values()))
    for name, ours, theirs in zip(named, found, expected, strict=True):
        assert theirs.any(), name
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13, msg=name)


def test_mixed_probabilities_are_returned_as_their_logarithms():
    logits = made()(images()).logits
    torch.testing.assert_close(logits.logsumexp(-1), torch.zeros(5, dtype=torch.float64))
    # It is a logarithm of a sum, and stays finite where the sum of fp32 probabilities would be 0.
    model = made().float()
    with torch.no_grad():
        for expert in model.mixture.experts:
            expert.output.bias.copy_(torch.tensor([500.0, 0, 0, 0]))
    assert model(images().float()).logits[:, 1].isfinite().all()


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("gate", ["softmax", "attentive"])
def test_statistics_are_of_the_shares(gate, top_k):
    model = made(gate=gate, top_k=top_k)
    output = model(images())
    (stats,) = output.routing
    rows = [[float(p.detach()) for p in naive_shares(model, image)[0]] for image in images()]
    load = [sum(row[e] for row in rows) / 5 for e in range(3)]
    assert stats.name == "mixture"
    assert stats.load_E.tolist() == pytest.approx(load)
    entropies = [-sum(p * math.log(p) for p in row if p) for row in rows]
    assert float(stats.measures["entropy"]) == pytest.approx(sum(entropies) / 5)
    if top_k is None:
        variance = sum((share - 1 / 3) ** 2 for share in load) / 3
        assert float(stats.losses["importance_loss"].detach()) == pytest.approx(variance * 9)
    assert stats.losses["importance_loss"].requires_grad
    first = [sum(max(row) == row[e] for row in rows) / 5 for e in range(3)]
    if top_k is None:
        balance = 3 * sum(f * p for f, p in zip(first, load, strict=True))
        assert float(stats.losses["balance_loss"].detach()) == pytest.approx(balance)


def test_a_batch_norm_is_pytorchs_in_training_and_in_evaluation():
    network = {**CONVOLUTIONS, "batch_norm": [1]}
    model = made(expert=network, gate_network=network)
    convolution = model.mixture.experts[1].convolutions[1]
    with torch.no_grad():
        convolution.scale.uniform_(0.5, 2)
        convolution.shift.uniform_(-1, 1)
    theirs = nn.BatchNorm2d(3, momentum=0.1, dtype=torch.float64)
    theirs.weight, theirs.bias = convolution.scale, convolution.shift
    x = torch.randn(5, 2, 6, 6, dtype=torch.float64)

    def expected():
        y = nn.functional.conv2d(x, convolution.weight, convolution.bias, padding=1)
        return nn.functional.max_pool2d(theirs(y).relu(), 2)

    torch.testing.assert_close(convolution(x)[0], expected())
    # A step moves every running statistic towards those of the images that it read.
    reads = []
    convolution.norm.register_forward_hook(lambda _, inputs, __: reads.append(inputs[0].detach()))
    (stats,) = model(images()).routing
    model.mixture.update(stats, 0.5)
    theirs.running_mean = 0.1 * reads[0].mean(0)
    theirs.running_var = 0.9 + 0.1 * reads[0].var(0, correction=0)
    model.eval()
    theirs.eval()
    torch.testing.assert_close(convolution(x)[0], expected(), rtol=1e-5, atol=1e-5)
    assert model(images()).routing[0].measures.get("norm_mean_N") is None


def test_a_frozen_network_stays_in_evaluation():
    network = {**CONVOLUTIONS, "batch_norm": [0, 1]}
    model = made(expert=network, gate_network=network)
    model.mixture.experts.requires_grad_(False)
    model.train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    (stats,) = model(images()).routing
    model.mixture.update(stats, 0.5)
    moved = {name for name, value in model.named_buffers() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.startswith("mixture.gate.")}


# Of the paper's appendix B, by hand: convolutions, hidden layers, output; then the gate.
MNIST_EXPERT = 10 + (169 * 5 + 5) + (5 * 32 + 32) + (32 * 10 + 10)
MNIST_GATE = 10 + (169 * 128 + 128) + (128 * 32 + 32)
FMNIST_EXPERT = 10 + (169 * 64 + 64) + (64 * 32 + 32) + (32 * 10 + 10)
FMNIST_GATE = 80 + (8 * 169 * 512 + 512) + (512 * 32 + 32)
CIFAR_EXPERT = (
    (3 * 16 * 9 + 16) + (16 * 32 * 9 + 32 + 64) + (32 * 64 * 9 + 64) + (64 * 128 * 9 + 128 + 256)
    + (512 * 1024 + 1024) + (1024 * 256 + 256) + (256 * 100 + 100)
)  # fmt: skip
CIFAR_GATE = (
    (3 * 64 * 9 + 64) + (64 * 128 * 9 + 128 + 256) + (128 * 256 * 9 + 256)
    + (256 * 512 * 9 + 512 + 1024) + (2048 * 1024 + 1024) + (1024 * 256 + 256)
)  # fmt: skip
ONE = {"convolutions": [1]}
DEEP = {"kernel_size": 3, "padding": 1, "batch_norm": [1, 3], "hidden_sizes": [1024, 256]}
PAPER = {
    "mnist": (
        {"grey": True, "num_classes": 10}, 5 * MNIST_EXPERT + MNIST_GATE, 32 * 5 + 5, 2 * 32 * 32,
    ),
    "fashion-mnist": (
        {
            "grey": True, "num_classes": 10, "expert": ONE | {"hidden_sizes": [64, 32]},
            "gate_network": {"convolutions": [8], "hidden_sizes": [512, 32]},
        },
        5 * FMNIST_EXPERT + FMNIST_GATE, 32 * 5 + 5, 2 * 32 * 32,
    ),
    "cifar100": (
        {
            "image_size": 32, "num_classes": 100, "num_experts": 20,
            "expert": DEEP | {"convolutions": [16, 32, 64, 128]},
            "gate_network": DEEP | {"convolutions": [64, 128, 256, 512]},
        },
        20 * CIFAR_EXPERT + CIFAR_GATE, 256 * 20 + 20, 2 * 256 * 256,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAPER)
def test_models_have_the_papers_number_of_parameters(name):
    section, networks, plain, attentive = PAPER[name]
    for gate, more in (("softmax", plain), ("attentive", attentive)):
        config = read_model_config({"kind": "mixture", "gate": gate} | section)
        assert num_parameters(config) == networks + more
