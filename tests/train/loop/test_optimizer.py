"""Tests of the learning rate of each step, and of which weights decay and in which groups."""

import re

import pytest
import torch
from torch import nn

from polyad.model.bert import BertConfig
from polyad.model.build import build_model
from polyad.model.decoder_config import GPT2Config
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
        ({"decay_steps": 50, "final_ratio": 0.0}, 1.0, 60, {25: 0.5, 50: 0.0}),
        ({"decay_steps": 50, "final_ratio": 0.0}, 1.0, 600, {25: 0.5, 50: 0.0}),
        ({"kind": "constant"}, 0.3, 10, {999: 0.3}),
        # MLP-Mixer's, steps 4 .. 12: an eighth less each.
        (
            {"kind": "linear", "warmup_steps": 4, "final_ratio": 0.0}, 1.0, 12,
            {3: 1.0, 4: 1.0, 6: 0.75, 8: 0.5, 11: 0.125, 12: 0.0, 20: 0.0},
        ),
    ],
)  # fmt: skip
def test_rates_by_hand(schedule, peak, total, expected):
    config = ScheduleConfig(**schedule)
    rates = {step: learning_rate(config, peak, step, total) for step in expected}
    assert rates == pytest.approx(expected)


def test_v_moes_line_ends_at_its_last_rate():
    # 3e-3 to 1e-5 over 56,000 steps, of which 10,000 warm up.
    config = ScheduleConfig(kind="linear", warmup_steps=10_000, final_ratio=1e-5 / 3e-3)
    assert learning_rate(config, 3e-3, 4_999, 56_000) == pytest.approx(1.5e-3)
    assert learning_rate(config, 3e-3, 33_000, 56_000) == pytest.approx((3e-3 + 1e-5) / 2)
    assert learning_rate(config, 3e-3, 56_000, 56_000) == pytest.approx(1e-5)
    torch_rates = [group["lr"] for group in stepped(config, 3e-3, 56)]
    ours = [learning_rate(config.model_copy(update={"warmup_steps": 10}), 3e-3, s, 56)
            for s in range(10, 56)]  # fmt: skip
    assert ours == pytest.approx(torch_rates)


def stepped(config, peak, steps):
    """The groups of an optimizer that torch's LinearLR steps, after 10 steps of warm-up."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, config.final_ratio, steps - 10)
    for _ in range(steps - 10):
        yield dict(optimizer.param_groups[0])
        optimizer.step()
        schedule.step()


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


def test_dimensions_are_those_of_the_model_not_of_a_shard():
    flat = nn.Parameter(torch.ones(6))
    (group,) = build_optimizer(OptimizerConfig(), [("w", flat, 2)]).param_groups
    assert group["weight_decay"] == 0.1


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


def a_model():
    config = GPT2Config(num_layers=2, hidden_size=8, num_heads=2, sequence_length=4, vocab_size=5)
    return build_model(config)


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


def test_layers_further_from_the_end_learn_less():
    factors = settings_of(a_model(), OptimizerConfig(layer_decay=0.5))
    # BEiT's: decay^(L + 1 - id), embeddings 0, block i has i + 1, and what follows L + 1; L = 2.
    expected = {"token_embedding": 0.125, "position_embedding": 0.125, "final_norm": 1.0}
    for name, (_, factor) in factors.items():
        of_block = {"0": 0.25, "1": 0.5}.get(name.split(".")[1])
        assert factor == (of_block or expected[name.split(".")[0]]), name


def test_what_comes_before_the_blocks_of_bert_and_clip_learns_least():
    bert = BertConfig(num_layers=2, hidden_size=8, num_heads=2, vocab_size=11, sequence_length=4)
    sizes = {"image_size": 8, "patch_size": 4, "num_layers": 2, "hidden_size": 8, "num_heads": 2}
    clip = ViTConfig(**sizes, num_classes=3, pre_norm=True)
    expected = {
        bert: {"token_embedding", "position_embedding", "segment_embedding", "embedding_norm"},
        clip: {"patch_embedding", "position_embedding", "class_token", "pre_norm"},
    }
    for config, parts in expected.items():
        factors = settings_of(build_model(config), OptimizerConfig(layer_decay=0.5))
        early = {name.split(".")[0] for name, (_, factor) in factors.items() if factor == 0.125}
        assert early == parts


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


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["blocks.*.atention.*"], "groups.0.match: 'blocks.*.atention.*' matches nothing;"),
        (["blocks.*.atention.*"], "the nearest are attention"),
    ],
)  # fmt: skip
def test_a_group_without_parameters_is_an_error(groups, message):
    config = OptimizerConfig(groups=tuple(GroupConfig(match=pattern) for pattern in groups))
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        freeze(a_model(), config)
    assert raised.value.exit_status == 2
    assert "\n" not in str(raised.value)


def test_one_line_trains_routers_alone_or_all_but_experts():
    frozen = GroupConfig(match="*", freeze=True)
    width, inner = 36, 24
    router, expert = 4 * width + 4, 2 * width * inner + inner  # up, its bias, down
    whole = trained_parameters(build_model(moe_model()))
    for groups, expected in (
        ([GroupConfig(match="router.score.*"), frozen], 2 * router),
        ([GroupConfig(match="experts.*", freeze=True)], whole - 2 * 4 * expert),
    ):
        model = build_model(moe_model())
        freeze(model, OptimizerConfig(groups=tuple(groups)))
        assert trained_parameters(model) == expected
