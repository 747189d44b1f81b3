"""Second derivatives and autocast: computed right, or refused; never silently wrong. In bf16 the
gradients of many tokens are added up in fp32: 256 + 1 is 256 there.
"""

import re
from contextlib import nullcontext

import pytest
import torch

from polyad.model.mumoe.config import FACTORIZATIONS
from tests.helpers.definitions import by_products
from tests.model.test_contract import ROUTED, ROUTERS, SECTIONS

MUMOE = SECTIONS["mumoe"] | {"kind": "mumoe"}

FEED_FORWARDS = {
    **{name: section | {"kind": name} for name, section in SECTIONS.items()},
    **{name: ROUTED | ROUTERS[name] for name in ("linear, similarity", "linear, attention")},
    **{f"mumoe {name}": MUMOE | {"factorization": name} for name in FACTORIZATIONS},
}
REFUSALS = (
    "marked with @once_differentiable|no autograd formula was registered|"
    "derivative for aten::_embedding_bag_per_sample_weights_backward is not implemented"
)
NO_AUTOCAST = {name for name in FEED_FORWARDS if name.startswith(("linear", "mumoe"))}


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


SEQUENCES = 2048
"""Equal ones have as many times the gradient of one: a sum that ends at 256 shows."""


def gradients(model, ids_BT):
    """Gradients of the sum of the logits' first three columns, which no softmax makes small."""
    model.zero_grad()
    model(ids_BT).logits[..., :3].sum().backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", [*FEED_FORWARDS, "grouped"])
def test_a_batch_of_equal_sequences_has_their_summed_gradient(small_model, random_ids, name):
    section = FEED_FORWARDS["smoe" if name == "grouped" else name]
    one_BT = random_ids(1, 8)
    model = small_model(torch.bfloat16, num_layers=1, feed_forward=section)
    with by_products() if name == "grouped" else nullcontext():
        expected = gradients(model, one_BT)
        found = gradients(model, one_BT.expand(SEQUENCES, -1))
    assert expected.keys() == found.keys()
    for parameter, gradient in expected.items():
        error = (found[parameter] / SEQUENCES - gradient).norm()
        assert error <= 0.05 * gradient.norm() + 1e-12, parameter
