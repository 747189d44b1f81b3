"""What every feed-forward owes, over the registry: a new kind inherits these tests."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from polyad.model.block import FEED_FORWARDS, FeedForwardConfig
from polyad.model.build import build_model, initial_values
from polyad.model.feedforward import DenseFeedForward, DenseFeedForwardConfig, FeedForwardContext

every_kind = pytest.mark.parametrize("kind", FEED_FORWARDS)


@every_kind
def test_every_kind_is_a_member_of_the_config_union(kind):
    config = TypeAdapter(FeedForwardConfig).validate_python({"kind": kind})
    assert config.kind == kind
    assert all(field.description for field in type(config).model_fields.values())


def test_unknown_kind_is_refused():
    with pytest.raises(ValidationError, match="dense"):
        TypeAdapter(FeedForwardConfig).validate_python({"kind": "dence"})


@every_kind
def test_statistics_are_named_after_their_place(small_model, random_ids, kind):
    model = small_model(feed_forward={"kind": kind})
    for stats in model(random_ids(2, 16)).routing:
        model.get_submodule(stats.name)


def test_dense_equals_numbers_worked_out_by_hand():
    # Width 2, inner width 1: up = (1, 2) . x + 0.5, down = (3, -1) h + (0, 1).
    # x = (1, -0.5): h = gelu(0.5) = 0.25 (1 + tanh(0.7978846 (0.5 + 0.044715 x 0.125)))
    #   = 0.25 (1 + tanh(0.4034020)) = 0.25 (1 + 0.3828578) = 0.3457144; y = (1.0371433, 0.6542856).
    # The exact GELU would give h = 0.3457312.
    context = FeedForwardContext(
        hidden_size=2, bias=True, dropout=0.0, initializer_std=0.02, residual_std=0.02
    )
    layer = DenseFeedForward(DenseFeedForwardConfig(hidden_size=1), context)
    with torch.no_grad():
        layer.up.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.up.bias.fill_(0.5)
        layer.down.weight.copy_(torch.tensor([[3.0], [-1.0]]))
        layer.down.bias.copy_(torch.tensor([0.0, 1.0]))
    y_BTD, stats = layer(torch.tensor([[[1.0, -0.5]]]), torch.full((1, 1, 2), torch.nan))
    assert stats is None
    torch.testing.assert_close(y_BTD, torch.tensor([[[1.0371433, 0.6542856]]]), atol=2e-6, rtol=0)


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
