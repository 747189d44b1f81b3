"""What others compute for the weights of ours is what ours compute."""

import pytest
import torch
from torch import nn

from polyad.model.decoder import GPT2Config
from tests.benchmarks.comparison import TOLERANCES, check, output_and_gradient
from tests.benchmarks.layer import make_tokens, sparse_layers
from tests.benchmarks.step import PEERS, _ours


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "peers"), [("smoe", 1), ("swiglu", 2)])
def test_layers_of_others_give_what_the_definition_gives(kind, peers, precision):
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    router_ED = nn.init.orthogonal_(torch.empty(8, 32))
    tokens_ND = make_tokens(96, 32).to(dtype)
    shape = {"kind": kind, "top_k": 2, "hidden": 64}
    layers = sparse_layers(shape, tokens_ND, router_ED)
    reference = output_and_gradient(layers["loop"], tokens_ND)
    assert len(layers) == 3 + peers
    for name in layers.keys() - {"dense", "loop"}:
        difference = check(name, output_and_gradient(layers[name], tokens_ND), reference, precision)
        assert difference < TOLERANCES[precision]


@pytest.mark.parametrize("bias", [True, False])
def test_models_of_others_have_our_loss_and_our_gradient_of_the_embedding(bias):
    config = GPT2Config(
        num_layers=2, hidden_size=32, num_heads=2, sequence_length=16, vocab_size=128, bias=bias
    )
    ids_BT = torch.randint(128, (2, 17), generator=torch.Generator().manual_seed(0))
    peers = PEERS if bias else {"nanogpt": PEERS["nanogpt"]}  # transformers' has no other form
    results = []
    for make in (_ours, *peers.values()):
        module, call = make(config, "cpu", "fp32")
        loss, _ = call(ids_BT[:, :-1], ids_BT[:, 1:])
        loss.mean().backward()
        embedding = next(p for p in module.parameters() if p.shape == (128, 32))
        results.append((loss.mean().detach(), embedding.grad))
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(gradient, results[0][1], atol=1e-6, rtol=1e-4)
