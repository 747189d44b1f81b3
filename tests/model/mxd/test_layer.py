"""Mixtures of decoders and transcoders against materialized experts and against our CP."""

import dataclasses

import pytest
import torch
from torch.nn.functional import gelu, normalize, silu

from polyad.model.block import build_feedforward
from polyad.model.build import build_model, count_parameters, initial_values
from polyad.model.decoder import GPT2Config
from polyad.model.feedforward import FeedForwardContext
from polyad.model.mxd import (
    MULTIPLIED_WHOLE,
    MixtureOfDecodersConfig,
    SparseGate,
    TranscoderConfig,
    sum_of_rows,
)
from polyad.model.smoe.router import spread
from tests.helpers.random_model import drawn

WIDTH = 8


def context(bias=True):
    return FeedForwardContext(
        hidden_size=WIDTH, bias=bias, dropout=0.0, initializer_std=0.02, residual_std=0.01
    )


def layer_of(config, bias=True):
    layer = drawn(lambda: build_feedforward(config, context(bias))).double()
    # The last layer of the dense part starts at zero.
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(len(parameter)))
    return layer


def tokens(count=40):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, count // 2, WIDTH, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_an_mxd_is_a_mixture_of_whole_last_layers(activation):
    config = MixtureOfDecodersConfig(num_experts=10, top_k=3, hidden_size=12, activation=activation)
    layer, x_BTD = layer_of(config), tokens()
    x_MD = x_BTD.flatten(0, 1)
    a_MN = spread(layer.gate(x_MD), 10)
    dense = layer.dense
    if activation == "swiglu":
        z_MH = silu(x_MD @ dense.gate.weight.T + dense.gate.bias) * (
            x_MD @ dense.up.weight.T + dense.up.bias
        )
    else:
        z_MH = gelu(x_MD @ dense.up.weight.T + dense.up.bias, approximate="tanh")
    # W[n, h, o] = C[n, o] D[h, o]: expert n is D diag(c_n), of full rank.
    c_NO, d_HO = normalize(layer.table, dim=1), dense.down.weight.T
    w_NHO = c_NO.unsqueeze(1) * d_HO
    assert torch.linalg.matrix_rank(w_NHO).tolist() == [WIDTH] * 10
    y_MO = torch.einsum("mn,mh,nho->mo", a_MN, z_MH, w_NHO) + layer.output_bias
    found_BTD, stats = layer(x_BTD, x_BTD)
    torch.testing.assert_close(found_BTD.flatten(0, 1), y_MO)
    assert stats.measures["active"].item() == pytest.approx(
        (a_MN > 0).sum(1).double().mean().item()
    )
    torch.testing.assert_close(stats.load_E, (a_MN > 0).double().mean(0) / 3)


def test_a_transcoder_is_a_sum_of_rows():
    layer, x_BTD = layer_of(TranscoderConfig(num_experts=10, top_k=3)), tokens()
    x_MD = x_BTD.flatten(0, 1)
    y_MO = spread(layer.gate(x_MD), 10) @ normalize(layer.table, dim=1) + layer.output_bias
    torch.testing.assert_close(layer(x_BTD, x_BTD)[0].flatten(0, 1), y_MO)


@pytest.mark.parametrize("experts", [12, MULTIPLIED_WHOLE + 1])
def test_a_table_multiplied_whole_gives_the_same_sums_and_gradients(experts):
    generator = torch.Generator().manual_seed(5)
    rows_ND = torch.randn(experts, WIDTH, generator=generator, dtype=torch.float64)
    ids_MK = torch.randint(experts, (30, 4), generator=generator)  # some of them twice
    weights_MK = torch.rand(30, 4, generator=generator, dtype=torch.float64)
    given = rows_ND.requires_grad_(), weights_MK.requires_grad_()
    found = []
    for whole in (True, False):
        sums_MD = sum_of_rows(rows_ND, ids_MK, weights_MK, whole=whole)
        found.append((sums_MD, *torch.autograd.grad(sums_MD.square().sum(), given)))
    expected_MD = (weights_MK[..., None] * rows_ND[ids_MK]).sum(1)
    torch.testing.assert_close(found[0][0], expected_MD)
    torch.testing.assert_close(*found)


def test_rows_have_unit_length_whatever_their_stored_length():
    layer, x_BTD = layer_of(TranscoderConfig(num_experts=10, top_k=3)), tokens()
    y_BTD, _ = layer(x_BTD, x_BTD)
    y_BTD.square().sum().backward()
    # The gradient of a row has no part along it: a step cannot change its length in first order.
    along_N = (layer.table.grad * layer.table).sum(1)
    torch.testing.assert_close(along_N, torch.zeros_like(along_N), atol=1e-10, rtol=0)
    with torch.no_grad():
        layer.table *= torch.arange(1, 11, dtype=torch.float64).unsqueeze(1)
        torch.testing.assert_close(layer(x_BTD, x_BTD)[0], y_BTD)


def test_the_table_starts_with_rows_of_unit_length_and_the_gate_as_torchs_linear_layers():
    config = GPT2Config.model_validate(
        {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "sequence_length": 8,
         "vocab_size": 11, "feed_forward": {"kind": "mxd", "num_experts": 40, "top_k": 2}}
    )  # fmt: skip
    values = dict(initial_values(build_model(config), seed=0))
    prefix = "blocks.0.feed_forward."
    torch.testing.assert_close(values[f"{prefix}table"].norm(dim=1), torch.ones(40))
    for name in ("gate.weight", "gate.bias", "dense.up.weight"):
        assert 0.2 < values[prefix + name].abs().max() <= 0.25, name  # 1 / sqrt(16)
    assert not values[f"{prefix}dense.down.weight"].any()


def test_parameters_are_those_of_the_paper():
    # N = round(2 d^2 (m - 4) / (2 d + 1)) matches a transcoder of m d features: METHODS-2.
    for width, experts in ((768, 21_490), (1024, 28_658), (2048, 57_330)):
        assert round(2 * width**2 * 28 / (2 * width + 1)) == experts
    assert MixtureOfDecodersConfig(num_experts=21_490).parameters(768, True) == 37_752_562
    with torch.device("meta"):
        wide = dataclasses.replace(context(), hidden_size=768)
        transcoder = build_feedforward(TranscoderConfig(num_experts=24_576), wide)
    assert count_parameters(transcoder) == 37_774_080
    for config in (
        MixtureOfDecodersConfig(num_experts=12, top_k=3),
        MixtureOfDecodersConfig(num_experts=9, top_k=3, hidden_size=5, activation="geglu"),
    ):
        for bias in (True, False):
            layer = layer_of(config, bias)
            counted = sum(p.numel() for p in layer.parameters())
            assert config.parameters(WIDTH, bias) == counted


@pytest.mark.parametrize(("activation", "dense"), [("gelu_tanh", 525_568), ("swiglu", 788_736)])
def test_match_dense_has_as_many_parameters_as_the_dense_block(activation, dense):
    config = MixtureOfDecodersConfig(
        num_experts=256, hidden_size="match-dense", activation=activation
    )
    filled = config.of_model(width=256, bias=True)
    assert abs(filled.parameters(256, True) - dense) <= 400


def test_weights_of_the_gate_are_relu_of_the_scores_and_have_their_gradient():
    gate = layer_of(TranscoderConfig(num_experts=12, top_k=5)).gate
    u_MD = tokens().flatten(0, 1)
    selected = gate(u_MD)
    weights_MK, ids_MK = (u_MD @ gate.weight.T + gate.bias).topk(5, dim=1)
    assert torch.equal(selected.expert_ids_NK, ids_MK)
    torch.testing.assert_close(selected.weights_NK, weights_MK.relu())
    used_MK = weights_MK > 0
    assert not used_MK.all()  # fewer than K are active for some tokens
    assert torch.equal(selected.counts_E, ids_MK[used_MK].bincount(minlength=12))
    found = torch.autograd.grad(selected.weights_NK.square().sum(), list(gate.parameters()))
    expected = torch.autograd.grad(weights_MK.relu().square().sum(), list(gate.parameters()))
    torch.testing.assert_close(found, expected)


def test_relu_before_top_k_leaves_fewer_than_k():
    # METHODS-2: scores N(0, 1), 16 experts, K 8: 42% of tokens have fewer than 8 active. In theory
    # the chance that fewer than 8 of 16 are positive, sum_(i < 8) C(16, i) / 2^16 = 0.4018.
    gate = SparseGate(16, 16, 8)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(16))
        gate.bias.zero_()
    u_MD = torch.randn(20_000, 16, generator=torch.Generator().manual_seed(0))
    active_M = (gate(u_MD).weights_NK > 0).sum(1)
    assert (active_M < 8).double().mean().item() == pytest.approx(0.402, abs=0.012)
