"""Which weights decay, and what a step does, by hand."""

import pytest
import torch
from torch import nn

from model.build import build_model
from model.gpt2 import GPT2Config
from train.loop.optimizer import OptimizerConfig, build_optimizer


def test_matrices_decay_and_vectors_do_not():
    config = GPT2Config(num_layers=1, hidden_size=8, num_heads=2, sequence_length=4, vocab_size=5)
    model = build_model(config)
    named = [(name, p, p.dim()) for name, p in model.named_parameters()]
    decays, rest = build_optimizer(OptimizerConfig(weight_decay=0.3), named).param_groups
    assert (decays["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(names[id(p)].endswith("weight") and p.dim() == 2 for p in decays["params"])
    assert {names[id(p)].rpartition(".")[2] for p in rest["params"]} == {"weight", "bias"}
    assert len(decays["params"]) + len(rest["params"]) == len(names)


@pytest.mark.parametrize("decay", ["matrices", "kernels", "all"])
def test_what_decays_is_a_matter_of_choice(decay):
    names = {
        "token_embedding.weight": 2, "position_embedding": 3, "class_token": 3,
        "blocks.0.attention.qkv.weight": 2, "blocks.0.attention.qkv.bias": 1,
        "blocks.0.norm.weight": 1, "blocks.0.feed_forward.experts.up": 2, "patches.weight": 4,
        "head.weight": 2, "head.bias": 1,
    }  # fmt: skip
    kernels = {
        "blocks.0.attention.qkv.weight", "blocks.0.feed_forward.experts.up", "patches.weight",
        "head.weight",
    }  # fmt: skip
    embeddings = {"token_embedding.weight", "position_embedding", "class_token"}
    expected = {"matrices": kernels | embeddings, "kernels": kernels, "all": set(names)}[decay]
    named = [(name, nn.Parameter(torch.ones(2)), n) for name, n in names.items()]
    groups = build_optimizer(OptimizerConfig(decay=decay, weight_decay=0.1), named).param_groups
    of_each = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {name for name, p, _ in named if of_each[id(p)] == 0.1} == expected
    assert {of_each[id(p)] for name, p, _ in named if name not in expected} <= {0.0}
    assert len(groups) == (1 if decay == "all" else 2)


def test_decay_of_all_moves_a_bias_too():
    bias = nn.Parameter(torch.full((1,), 2.0))
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, decay="all")
    optimizer = build_optimizer(config, [("b", bias, 1)])
    bias.grad = torch.full((1,), 3.0)
    optimizer.step()
    torch.testing.assert_close(bias.detach(), torch.full((1,), 2 * (1 - 0.1 * 0.5) - 0.1))


def test_dimensions_are_those_of_the_model_not_of_a_shard():
    flat = nn.Parameter(torch.ones(6))
    (group,) = build_optimizer(OptimizerConfig(), [("w", flat, 2)]).param_groups
    assert group["weight_decay"] == 0.1


def test_first_adamw_step_moves_by_the_learning_rate_after_decay():
    weight = nn.Parameter(torch.full((1, 1), 2.0))
    optimizer = build_optimizer(
        OptimizerConfig(learning_rate=0.1, weight_decay=0.5), [("w", weight, 2)]
    )
    weight.grad = torch.full((1, 1), 3.0)
    optimizer.step()
    # 2 (1 - 0.1 * 0.5) - 0.1 * sign(3): the first bias-corrected moment ratio is 1.
    torch.testing.assert_close(weight.detach(), torch.full((1, 1), 1.8))


def test_sgd_step_is_the_gradient_times_the_rate():
    weight = nn.Parameter(torch.full((2,), 2.0))
    config = OptimizerConfig(kind="sgd", learning_rate=0.1)
    optimizer = build_optimizer(config, [("b", weight, 1)])
    weight.grad = torch.full((2,), 3.0)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2,), 1.7))
