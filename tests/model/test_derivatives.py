"""Second derivatives and autocast: computed right, or refused; never silently wrong."""

import re

import pytest
import torch

from tests.helpers.factorized import FACTORIZATIONS

FEED_FORWARDS = {
    "dense": {"kind": "dense"},
    "mxd": {"kind": "mxd", "num_experts": 12, "top_k": 3},
    "transcoder": {"kind": "transcoder", "num_experts": 15, "top_k": 3},
    "emoe": {"kind": "emoe", "num_experts": 4, "top_k": 2},
    **{
        f"smoe-{graph}": {"kind": "smoe", "num_experts": 4, "top_k": 2, "graph": graph}
        for graph in ("none", "similarity", "attention")
    },
    **{
        f"mumoe-{name}": {"kind": "mumoe", "factorization": name, "num_experts": [6], "rank": 8}
        for name in FACTORIZATIONS
    },
}
REFUSALS = (
    "marked with @once_differentiable|no autograd formula was registered|"
    "derivative for aten::_embedding_bag_per_sample_weights_backward is not implemented"
)
NO_AUTOCAST = {
    "smoe-similarity",
    "smoe-attention",
    *(name for name in FEED_FORWARDS if name.startswith("mumoe")),
}


def squared_gradient_norm(model, ids_BT):
    """The squared norm of the loss's gradient; its own gradient has second derivatives."""
    parameters = list(model.parameters())
    loss = model(ids_BT).logits.square().mean()
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    return sum(gradient.square().sum() for gradient in gradients)


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_second_derivatives_are_right_or_refused(small_model, random_ids, name):
    ids_BT = random_ids(2, 6)
    model = small_model(torch.float64, num_layers=1, feed_forward=FEED_FORWARDS[name])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        squared = squared_gradient_norm(model, ids_BT)
        try:
            squared.backward()
        except RuntimeError as refusal:  # of a derivative that is written by hand
            if name == "dense" or not re.search(REFUSALS, str(refusal)):
                raise
            return
        # Along its own gradient, by central differences.
        direction = [parameter.grad.clone() for parameter in model.parameters()]
        slope = sum(each.square().sum() for each in direction).item()
        step, values = 1e-6 / slope**0.5, []
        for sign in (1, -1):
            moved = small_model(torch.float64, num_layers=1, feed_forward=FEED_FORWARDS[name])
            with torch.no_grad():
                for parameter, along in zip(moved.parameters(), direction, strict=True):
                    parameter += sign * step * along
            values.append(squared_gradient_norm(moved, ids_BT).item())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_autocast_is_computed_or_refused_in_a_line(small_model, random_ids, name):
    ids_BT = random_ids(2, 6)
    model = small_model(num_layers=1, feed_forward=FEED_FORWARDS[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if name in NO_AUTOCAST:
            with pytest.raises(
                RuntimeError, match=r"does not work under torch\.autocast"
            ) as caught:
                model(ids_BT)
            assert "\n" not in str(caught.value)
            return
        loss = model(ids_BT).logits.float().square().mean()
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
