import math
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from polyad.model.build import (
    build_model,
    count_parameters,
    initial_value,
    initial_values,
    materialize,
    num_parameters,
)
from polyad.model.decoder_config import GPT2Config
from polyad.model.initialization import ZEROS, Initializer, normal


def test_unknown_kind_is_refused_with_the_known_ones():
    config = GPT2Config.model_construct(kind="gtp2")
    with pytest.raises(ValueError, match=r"model\.kind: 'gtp2' is unknown; known: gpt2"):
        build_model(config)


def test_built_model_holds_no_memory():
    # 1.5 billion parameters: 6 GB, if they had any.
    config = GPT2Config(num_layers=48, hidden_size=1600, num_heads=25, vocab_size=50257)
    model = build_model(config)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    assert count_parameters(model) == num_parameters(config)


def test_initial_values_do_not_depend_on_order_subset_or_global_state(small_config):
    model = build_model(small_config())
    torch.manual_seed(1)
    values = dict(initial_values(model, seed=3))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    for name in reversed(values):
        assert torch.equal(initial_value(model, name, seed=3), values[name])
    assert torch.equal(torch.get_rng_state(), state)
    # A deeper model shares the shallow one's weights, but for those scaled by depth.
    deeper = build_model(small_config(num_layers=5))
    name = "blocks.1.attention.qkv.weight"
    assert torch.equal(initial_value(deeper, name, seed=3), values[name])


def test_initial_values_depend_on_seed_and_name(small_config):
    model = build_model(small_config())
    name, other = "blocks.0.attention.qkv.weight", "blocks.1.attention.qkv.weight"
    value = initial_value(model, name, seed=0)
    assert not torch.equal(value, initial_value(model, name, seed=1))
    assert not torch.equal(value, initial_value(model, other, seed=0))


@pytest.mark.slow
def test_initial_values_are_the_same_in_another_process(small_config):
    # Python salts the hashes of strings in every process; sha256 it does not.
    code = (
        "from polyad.model.initialization import normal; import torch;"
        "print(normal(0.02).draw(torch.Size([3, 4]), 5, 'a.weight').tolist())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    value = normal(0.02).draw(torch.Size([3, 4]), 5, "a.weight")
    assert result.stdout.strip() == str(value.tolist())


def test_unknown_parameter_is_refused(small_config):
    with pytest.raises(ValueError, match=r"no parameter 'head\.weight'"):
        initial_value(build_model(small_config()), "head.weight", seed=0)


def test_parameter_that_no_module_speaks_for_is_an_error():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(AssertionError, match=r"0\.weight"):
        initial_value(model, "0.weight", seed=0)


def test_initial_statistics_are_those_of_gpt2():
    config = GPT2Config(num_layers=8, hidden_size=256, num_heads=4, vocab_size=2000)
    residual_std = 0.02 / math.sqrt(2 * 8)
    for name, value in initial_values(build_model(config), seed=0):
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            last = "projection" in name or "down" in name
            std = residual_std if last else 0.02
            # Standard errors of the mean and of the standard deviation; five of them never happen.
            error = std / math.sqrt(value.numel())
            assert abs(value.mean()) < 5 * error, name
            assert abs(value.std() - std) < 5 * error / math.sqrt(2), name


def test_materialized_model_equals_initial_values_in_any_precision(small_config):
    config = small_config()
    expected = dict(initial_values(build_model(config), seed=4))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = build_model(config)
        materialize(model, seed=4, dtype=dtype)
        assert list(expected) == [name for name, _ in model.named_parameters()]
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name].to(dtype)), name


class Shared(nn.Module):
    """Two names for one parameter, a frozen one, experts, and buffers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.empty(3), requires_grad=False)
        self.expert_weight = nn.Parameter(torch.empty(4, 2, 3))
        self.expert_weight.allreduce = False
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    def initializers(self):
        return {
            "first.weight": normal(1.0),
            "frozen": normal(1.0),
            "expert_weight": Initializer(normal(1.0).fill, per_expert=True),
            "steps": ZEROS,
        }


@pytest.fixture
def shared():
    with torch.device("meta"):
        return Shared()


def test_materialize_keeps_sharing_freezing_and_attributes(shared):
    materialize(shared, seed=0, dtype=torch.bfloat16)
    assert shared.second.weight is shared.first.weight
    assert not shared.frozen.requires_grad
    assert shared.expert_weight.allreduce is False
    assert torch.equal(shared.steps, torch.zeros(2, dtype=torch.int64))
    assert [n for n, _ in shared.named_parameters()] == ["frozen", "expert_weight", "first.weight"]


def test_experts_are_drawn_one_by_one_by_their_index(shared):
    whole = initial_value(shared, "expert_weight", seed=0)
    some = initial_value(shared, "expert_weight", seed=0, experts=[3, 1])
    assert torch.equal(some, whole[[3, 1]])
    assert not torch.equal(whole[0], whole[1])
    with pytest.raises(ValueError, match="frozen has no experts"):
        initial_value(shared, "frozen", seed=0, experts=[0])


def test_materialize_holds_one_fp32_value_at_a_time(small_config, monkeypatch):
    alive = weakref.WeakSet()
    most = 0
    draw = Initializer.draw

    def tracked(self, *arguments):
        nonlocal most
        most = max(most, len(alive))
        value = draw(self, *arguments)
        alive.add(value)
        return value

    monkeypatch.setattr(Initializer, "draw", tracked)
    materialize(build_model(small_config()), seed=0, dtype=torch.bfloat16)
    assert most == 0  # none of the values before was left when the next was drawn
    assert len(alive) == 0
