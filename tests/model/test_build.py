import math
import weakref

import pytest
import torch
from torch import nn

from polyad.model.build import build_model, initial_value, initial_values, materialize
from polyad.model.decoder import GPT2Config
from polyad.model.initialization import ZEROS, Initializer, normal
from tests.helpers.random_model import built


def test_initial_values_do_not_depend_on_order_subset_or_global_state(small_config):
    model = build_model(small_config())
    torch.manual_seed(1)
    values = dict(initial_values(model, seed=3))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    for name in reversed(values):
        assert torch.equal(initial_value(model, name, seed=3), values[name])
    assert torch.equal(torch.get_rng_state(), state)
    # Whatever salt Python has for hashes of strings in this process.
    drawn = normal(0.02).draw(torch.Size([2]), 5, "a.weight")
    torch.testing.assert_close(drawn, torch.tensor([-0.0158363, -0.0072869]))
    # A deeper model shares the shallow one's weights, but for those scaled by depth.
    deeper = build_model(small_config(num_layers=5))
    name = "blocks.1.attention.qkv.weight"
    assert torch.equal(initial_value(deeper, name, seed=3), values[name])


EXPERTS = {"kind": "smoe", "num_experts": 16, "expert_hidden_size": 64}


@pytest.mark.parametrize(
    "section", [{"kind": "dense"}, EXPERTS, EXPERTS | {"scale_residual_init": False}], ids=str
)
def test_initial_statistics_are_those_of_gpt2(section):
    sizes = {"num_layers": 8, "hidden_size": 256, "num_heads": 4, "vocab_size": 2000}
    config = GPT2Config.model_validate(sizes | {"feed_forward": section})
    residual_std = 0.02 / math.sqrt(2 * 8)
    for name, value in initial_values(build_model(config), seed=0):
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            is_scaled = "experts" not in name or section.get("scale_residual_init", True)
            last = "projection" in name or ("down" in name and is_scaled)
            std = residual_std if last else 0.02
            # Standard errors of the mean and of the standard deviation; five of them never happen.
            error = std / math.sqrt(value.numel())
            assert abs(value.mean()) < 5 * error, name
            assert abs(value.std() - std) < 5 * error / math.sqrt(2), name


def test_materialized_model_equals_initial_values_in_any_precision(small_config):
    config = small_config()
    expected = dict(initial_values(build_model(config), seed=4))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = built(config, 4, dtype=dtype)
        assert list(expected) == [name for name, _ in model.named_parameters()]
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name].to(dtype)), name


def test_what_is_not_known_is_refused(small_config):
    with pytest.raises(ValueError, match="gtp2"):
        build_model(GPT2Config.model_construct(kind="gtp2"))
    with pytest.raises(ValueError, match=r"head\.weight"):
        initial_value(build_model(small_config()), "head.weight", seed=0)
    with pytest.raises(AssertionError, match=r"0\.weight"):  # of which no module says how it starts
        initial_value(nn.Sequential(nn.Linear(2, 2)), "0.weight", seed=0)


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


def test_the_scale_of_a_dense_start_is_that_of_its_two_weights_alone(small_config):
    plain, scaled = (
        dict(initial_values(build_model(small_config(feed_forward=each)), seed=3))
        for each in ({"kind": "dense"}, {"kind": "dense", "weight_scale": 4.0})
    )
    assert plain.keys() == scaled.keys()
    for name, value in plain.items():
        factor = 4.0 if name.endswith(("up.weight", "down.weight")) else 1.0
        assert torch.equal(scaled[name], factor * value), name
    assert scaled["blocks.0.feed_forward.up.weight"].std() > 0.07
