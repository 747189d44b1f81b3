"""Experts of mixtures of decoders and transcoders, as measures and interventions see them."""

import pytest
import torch

from polyad.train.errors import ConfigError
from polyad.train.experts.actions import Action, intervening
from polyad.train.experts.probing import deciding, routed_layers
from tests.train.experts.test_interventions import IDS_BT, by_use, logits, make_model

KINDS = {
    "mxd": {"kind": "mxd", "num_experts": 9, "top_k": 4, "hidden_size": 12},
    "transcoder": {"kind": "transcoder", "num_experts": 9, "top_k": 4},
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_outputs_of_single_experts_add_up_to_that_of_the_layer(kind):
    model = make_model(KINDS[kind])
    layer = routed_layers(model)[0]
    module, seen = model.get_submodule(layer.name), []
    handle = module.register_forward_hook(lambda *call: seen.append(call[2][0].flatten(0, 1)))
    with deciding(model, [layer]) as decisions:
        model(IDS_BT)
    handle.remove()
    decision = decisions[layer.name]
    weights_MS = decision.coefficients().double()
    assert weights_MS.shape == (IDS_BT.numel(), layer.num_experts)
    assert (weights_MS > 0).sum(1).max() <= 4
    every_M = torch.arange(IDS_BT.numel())
    total_MD = module.output_bias + sum(
        weights_MS[:, expert, None] * decision.output(0, expert, every_M)
        for expert in range(layer.num_experts)
    )
    torch.testing.assert_close(total_MD, seen[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_expert_without_its_output_is_a_row_of_zeros(kind):
    model = make_model(KINDS[kind])
    expert = by_use(model)[0]
    without = logits(model, Action(), expert)
    assert not torch.allclose(without, logits(model))
    doubled = logits(model, Action(how="scale", value=2.0), expert)
    model.blocks[0].feed_forward.table[expert] = 0
    torch.testing.assert_close(logits(model), without)
    assert not torch.allclose(doubled, without)


def test_what_only_selecting_layers_know_is_refused():
    model = make_model(KINDS["mxd"])
    with (
        pytest.raises(ConfigError, match="prune is not allowed"),
        intervening(model, routed_layers(model)[0], Action(how="prune")),
    ):
        pass
