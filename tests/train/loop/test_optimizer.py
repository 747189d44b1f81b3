"""Tests of the learning rate of each step, and of which weights decay and in which groups."""

import pytest
import torch
from torch import nn

from polyad.model.bert import BertConfig
from polyad.model.build import build_model
from polyad.model.decoder import GPT2Config
from polyad.model.vit import ViTConfig
from polyad.parallel.zero import RATE_FACTOR
from polyad.train.config.adaptation import trained_parameters
from polyad.train.loop.optimizer import (
    GroupConfig,
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    freeze,
    learning_rate,
    stacks_gates,
    warm_up,
)
from tests.helpers.training import moe_model


@pytest.mark.parametrize(
    ("schedule", "peak", "total", "expected"),
    [
        ({"warmup_steps": 4}, 1.0, 100, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0}),
        # Steps 10 .. 110: in the middle, at 60, the mean of 1 and 0.1.
        (
            {"warmup_steps": 10, "final_ratio": 0.1}, 6e-4, 110,
            {60: 6e-4 * 0.55, 110: 6e-5, 500: 6e-5},
        ),
        # The same for runs of any length.
        *(({"decay_steps": 50, "final_ratio": 0.0}, 1.0, total, {25: 0.5, 50: 0.0})
          for total in (60, 600)),
        ({"kind": "constant"}, 0.3, 10, {999: 0.3}),
        # MLP-Mixer's, steps 4 .. 12: an eighth less each.
        (
            {"kind": "linear", "warmup_steps": 4, "final_ratio": 0.0}, 1.0, 12,
            {3: 1.0, 4: 1.0, 6: 0.75, 8: 0.5, 11: 0.125, 12: 0.0, 20: 0.0},
        ),
        # V-MoE's, 3e-3 to 1e-5 over 56,000 steps, of which 10,000 warm up.
        (
            {"kind": "linear", "warmup_steps": 10_000, "final_ratio": 1e-5 / 3e-3}, 3e-3, 56_000,
            {4_999: 1.5e-3, 33_000: (3e-3 + 1e-5) / 2, 56_000: 1e-5},
        ),
    ],
)  # fmt: skip
def test_rates_by_hand(schedule, peak, total, expected):
    config = ScheduleConfig(**schedule)
    rates = {step: learning_rate(config, peak, step, total) for step in expected}
    assert rates == pytest.approx(expected)


def test_a_line_is_that_of_torch():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-3)
    theirs = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, 46)
    config = ScheduleConfig(kind="linear", warmup_steps=10, final_ratio=0.01)
    for step in range(10, 56):
        assert learning_rate(config, 3e-3, step, 56) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("decay", ["matrices", "kernels", "all"])
def test_what_decays_is_a_matter_of_choice(decay):
    kernels = {"blocks.0.attention.qkv.weight": 2, "blocks.0.feed_forward.experts.up": 2,
               "patches.weight": 4, "head.weight": 2}  # fmt: skip
    embeddings = {"token_embedding.weight": 2, "position_embedding": 3, "class_token": 3}
    vectors = {"blocks.0.attention.qkv.bias": 1, "blocks.0.norm.weight": 1, "head.bias": 1}
    names = kernels | embeddings | vectors
    expected = {"matrices": kernels | embeddings, "kernels": kernels, "all": names}[decay]
    # Dimensions are those of the model, not of a shard.
    named = [(name, nn.Parameter(torch.ones(2)), n) for name, n in names.items()]
    groups = build_optimizer(OptimizerConfig(decay=decay, weight_decay=0.1), named).param_groups
    of_each = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {n: of_each[id(p)] for n, p, _ in named} == {n: 0.1 * (n in expected) for n in names}
    assert len(groups) == (1 if decay == "all" else 2)


@pytest.mark.parametrize(
    ("config", "dimensions", "expected"),
    [
        # The first bias-corrected moment ratio is 1: 2 (1 - 0.1 * 0.5) - 0.1 * sign(3).
        ({"weight_decay": 0.5}, 2, 1.8),
        ({"weight_decay": 0.5}, 1, 1.9),
        ({"weight_decay": 0.5, "decay": "all"}, 1, 1.8),
        ({"kind": "sgd"}, 1, 1.7),
    ],
)
def test_a_first_step_by_hand(config, dimensions, expected):
    weight = nn.Parameter(torch.full((1,), 2.0))
    optimizer = build_optimizer(
        OptimizerConfig(learning_rate=0.1, **config), [("w", weight, dimensions)]
    )
    weight.grad = torch.full((1,), 3.0)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((1,), expected))


def settings_of(model, config):
    """Weight decay and factor of the learning rate, of every parameter that is trained."""
    named = [(name, p, p.dim()) for name, p in model.named_parameters()]
    names = {id(p): name for name, p in model.named_parameters()}
    groups = build_optimizer(config, named).param_groups
    assert all(group["lr"] == config.learning_rate * group[RATE_FACTOR] for group in groups)
    return {
        names[id(p)]: (group["weight_decay"], group[RATE_FACTOR])
        for group in groups for p in group["params"]
    }  # fmt: skip


SIZES = {"num_layers": 2, "hidden_size": 8, "num_heads": 2}
TEXT, IMAGES = {"sequence_length": 4, "vocab_size": 11}, {"image_size": 8, "patch_size": 4}
EMBEDDINGS = {"token_embedding", "position_embedding"}


def a_model():
    return build_model(GPT2Config(**SIZES, **TEXT))


@pytest.mark.parametrize(
    ("model", "first"),
    [
        (GPT2Config(**SIZES, **TEXT), EMBEDDINGS),
        (BertConfig(**SIZES, **TEXT), EMBEDDINGS | {"segment_embedding", "embedding_norm"}),
        (ViTConfig(**SIZES, **IMAGES, num_classes=3, pre_norm=True),  # as CLIP
         {"patch_embedding", "position_embedding", "class_token", "pre_norm"}),
    ],
)  # fmt: skip
def test_layers_further_from_the_end_learn_less(model, first):
    # BEiT's: decay^(L + 1 - id), embeddings 0, block i has i + 1, and what follows L + 1; L = 2.
    factors = settings_of(build_model(model), OptimizerConfig(layer_decay=0.5))
    for name, (_, factor) in factors.items():
        place, *others = name.split(".")
        of_block = {"0": 0.25, "1": 0.5}[others[0]] if place == "blocks" else 1.0
        assert factor == (0.125 if place in first else of_block), name
    assert first <= {name.partition(".")[0] for name in factors}


def test_the_first_group_that_matches_counts():
    groups = (
        GroupConfig(match="blocks.0.attention.*", learning_rate=0.1, weight_decay=0.0),
        GroupConfig(match="attention.*.weight", learning_rate=3.0, weight_decay=0.7),
        GroupConfig(match="feed_forward.up.*", freeze=True),
    )
    model, config = a_model(), OptimizerConfig(groups=groups, weight_decay=0.2)
    freeze(model, config)
    found = settings_of(model, config)
    assert found["blocks.0.attention.qkv.weight"] == (0.0, 0.1)
    assert found["blocks.0.attention.qkv.bias"] == (0.0, 0.1)
    assert found["blocks.1.attention.qkv.weight"] == (0.7, 3.0)
    assert found["blocks.1.attention.qkv.bias"] == (0.0, 1.0)  # a bias, which does not decay
    assert found["blocks.1.feed_forward.down.weight"] == (0.2, 1.0)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        f"blocks.{block}.feed_forward.up.{kind}" for block in (0, 1) for kind in ("weight", "bias")
    }
    assert not frozen & found.keys()


def test_a_gate_is_a_parameter_of_its_own_where_it_may_be_treated_differently():
    group = GroupConfig(match="experts.gate", learning_rate=0.5)
    assert stacks_gates(OptimizerConfig())
    assert not stacks_gates(OptimizerConfig(kind="muon"))
    assert not stacks_gates(OptimizerConfig(groups=(group,)))


def test_the_factor_of_a_group_with_a_warmup_rises_to_its_own():
    groups = (GroupConfig(match="attention.*", learning_rate=3.0, warmup_steps=4),)
    named = [(name, p, p.dim()) for name, p in a_model().named_parameters()]
    optimizer = build_optimizer(OptimizerConfig(groups=groups), named)
    attention = {id(p) for name, p, _ in named if ".attention." in name}
    for step, expected in enumerate((0.75, 1.5, 2.25, 3.0, 3.0)):
        warm_up(optimizer, step)
        for group in optimizer.param_groups:
            mine = {id(p) in attention for p in group["params"]}
            assert (mine, group[RATE_FACTOR]) in (({True}, expected), ({False}, 1.0))


def test_a_group_without_parameters_is_an_error():
    config = OptimizerConfig(groups=(GroupConfig(match="blocks.*.atention.*"),))
    message = r"groups\.0\.match: 'blocks.*atention.*' matches nothing; the nearest are attention"
    with pytest.raises(ValueError, match=message) as raised:
        freeze(a_model(), config)
    assert raised.value.exit_status == 2


def test_one_line_trains_routers_alone_or_all_but_experts():
    width, inner = 36, 24
    router, expert = 4 * width + 4, 2 * width * inner + inner  # up, its bias, down
    whole = trained_parameters(build_model(moe_model()))
    routers = (GroupConfig(match="router.score.*"), GroupConfig(match="*", freeze=True))
    others = (GroupConfig(match="experts.*", freeze=True),)
    for groups, expected in ((routers, 2 * router), (others, whole - 2 * 4 * expert)):
        model = build_model(moe_model())
        freeze(model, OptimizerConfig(groups=groups))
        assert trained_parameters(model) == expected
