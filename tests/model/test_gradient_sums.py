"""In bf16 the gradients of many tokens are added up in fp32: 256 + 1 is 256 there.

A batch of equal sequences has as many times the gradient of one, so a sum that ends at 256 shows.
"""

import pytest
import torch

from polyad.model.initialization import ZEROS
from polyad.model.kernels.grouped import by_products
from polyad.model.layers import Embedding, LayerNorm
from polyad.model.smoe import experts
from tests.helpers.factorized import FACTORIZATIONS

SEQUENCES = 2048

FEED_FORWARDS = {
    "dense": {"kind": "dense"},
    **{
        f"smoe-{graph}": {"kind": "smoe", "num_experts": 4, "top_k": 2, "graph": graph}
        for graph in ("none", "similarity", "attention")
    },
    "smoe-grouped": {"kind": "smoe", "num_experts": 4, "top_k": 2},
    "mxd": {"kind": "mxd", "num_experts": 12, "top_k": 3},
    "transcoder": {"kind": "transcoder", "num_experts": 15, "top_k": 3},
    "emoe": {"kind": "emoe", "num_experts": 4, "top_k": 2},
    **{
        f"mumoe-{name}": {"kind": "mumoe", "factorization": name, "num_experts": [6], "rank": 8}
        for name in FACTORIZATIONS
    },
}


def gradients(model, ids_BT):
    """Gradients of the sum of the logits' first three columns, which no softmax makes small."""
    model.zero_grad()
    model(ids_BT).logits[..., :3].sum().backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_a_batch_of_equal_sequences_has_their_summed_gradient(
    small_model, random_ids, monkeypatch, name
):
    if name == "smoe-grouped":  # as on a GPU
        monkeypatch.setattr(experts, "grouped", by_products)
    one_BT = random_ids(1, 8)
    model = small_model(torch.bfloat16, num_layers=1, feed_forward=FEED_FORWARDS[name])
    expected = gradients(model, one_BT)
    found = gradients(model, one_BT.expand(SEQUENCES, -1))
    assert expected.keys() == found.keys()
    for parameter, gradient in expected.items():
        error = (found[parameter] / SEQUENCES - gradient).norm()
        assert error <= 0.05 * gradient.norm() + 1e-12, parameter


def test_an_embedding_adds_the_rows_of_a_gradient_up_exactly():
    layer = Embedding(5, 4, ZEROS).bfloat16()
    layer(torch.full((1000,), 2)).backward(torch.ones(1000, 4, dtype=torch.bfloat16))
    expected = torch.zeros(5, 4)
    expected[2] = 1000
    assert torch.equal(layer.weight.grad.float(), expected)
    double = Embedding(5, 4, ZEROS).double()
    assert torch.autograd.gradcheck(
        lambda weight: torch.func.functional_call(
            double, {"weight": weight}, torch.tensor([[1, 2], [2, 4]])
        ),
        double.weight,
    )


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_norm_adds_its_gradients_up_exactly(bias):
    layer = LayerNorm(8, bias=bias, dtype=torch.bfloat16)
    x_ND = torch.arange(8.0).expand(1000, -1).to(torch.bfloat16)
    y_ND = layer(x_ND)
    assert y_ND.dtype == torch.bfloat16
    y_ND.backward(torch.ones_like(y_ND))
    scale_D = 1000 * torch.nn.functional.layer_norm(torch.arange(8.0), (8,))
    torch.testing.assert_close(layer.weight.grad.float(), scale_D, rtol=5e-3, atol=0)
    assert not bias or layer.bias.grad.tolist() == [1000.0] * 8


def test_layers_are_pytorchs_in_fp32():
    ids, x = torch.tensor([[0, 3], [3, 1]]), torch.randn(6, 8)
    for ours, theirs, given in (
        (Embedding(5, 4, ZEROS), torch.nn.Embedding(5, 4), ids),
        (LayerNorm(8), torch.nn.LayerNorm(8), x),
    ):
        theirs.load_state_dict(ours.state_dict())
        for layer in (ours, theirs):
            layer(given).square().sum().backward()
        assert torch.equal(ours(given), theirs(given))
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
