"""The block: one gate, two layers, what it reads, what it returns, how it starts."""

import math

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, silu

from polyad.model.build import build_model, matrix_dimensions
from polyad.model.feedforward import DenseFeedForward, DenseFeedForwardConfig, FeedForwardContext
from polyad.model.mumoe.config import FACTORIZATIONS, MuMoEConfig
from polyad.model.mumoe.gating import GateOutput, entmax15
from polyad.model.mumoe.layer import MuMoE, gate_statistics
from tests.helpers.allocated import saved_bytes
from tests.helpers.factorized import contract, full_tensor
from tests.helpers.random_model import drawn

every_factorization = pytest.mark.parametrize("name", FACTORIZATIONS)


def make_block(*, residual_std=0.02, trained_gate=True, **changes) -> MuMoE:
    """A block with its initial values, but for a gate that is not zero."""
    options = {"num_experts": [5], "rank": 6, "expert_rank": 2, "hidden_size": 12}
    config = MuMoEConfig.model_validate(options | changes)
    context = FeedForwardContext(
        hidden_size=8, bias=False, dropout=0.0, initializer_std=0.02, residual_std=residual_std
    )
    block = drawn(lambda: MuMoE(config, context), 5, dtype=torch.float64)
    if trained_gate:
        torch.nn.init.normal_(block.gate.weight)
    return block


@every_factorization
@pytest.mark.parametrize(("level_std", "learns"), [(0.0, False), (0.1, True)])
def test_levels_that_start_alike_stay_alike(name, level_std, learns):
    # Equal experts, equally weighted: no gradient tells them apart, whatever the tokens.
    block = make_block(
        factorization=name, num_experts=[4, 3], level_std=level_std, trained_gate=False
    )
    z_BTD, u_BTD, wanted_BTD = torch.randn(3, 2, 9, 8, dtype=torch.float64)
    (block(z_BTD, u_BTD)[0] * wanted_BTD).sum().backward()
    first_ND, second_ND = block.gate.weight.grad.split([4, 3])
    assert first_ND.abs().max() > 1e-6
    moves = second_ND.abs().max().item()
    assert moves > 1e-6 if learns else moves < 1e-12
    factor = block.up.expert_factor_1.grad  # the gate is even: it moves them together
    torch.testing.assert_close(factor, factor[:1].expand_as(factor), atol=1e-12, rtol=0)


@every_factorization
@pytest.mark.parametrize("num_experts", [[5], [4, 3]])
@pytest.mark.parametrize(
    ("gate_input", "activation"),
    [("residual", "gelu"), ("normalized", "gelu"), ("residual", "swiglu"), ("normalized", "geglu")],
)
def test_a_block_is_the_papers_formula_with_whole_tensors(
    name, num_experts, gate_input, activation
):
    block = make_block(
        factorization=name, num_experts=num_experts, gate_input=gate_input, activation=activation
    )
    z_BTD = torch.randn(2, 3, 8, dtype=torch.float64)
    u_BTD = torch.randn(2, 3, 8, dtype=torch.float64)
    y_BTD, stats = block(z_BTD, u_BTD)
    read_MD = (u_BTD if gate_input == "residual" else z_BTD).flatten(0, 1)
    scores_MS = read_MD @ block.gate.weight.T
    levels = [entmax15(layer_norm(x, x.shape[-1:])) for x in scores_MS.split(num_experts, -1)]
    inner = contract(full_tensor(name, block.up), z_BTD.flatten(0, 1), levels, True)
    if activation == "gelu":
        inner = gelu(inner)
    else:
        gate = contract(full_tensor(name, block.up_gate), z_BTD.flatten(0, 1), levels, True)
        inner = inner * (silu(gate) if activation == "swiglu" else gelu(gate, approximate="tanh"))
    expected = contract(full_tensor(name, block.down), inner, levels, True)
    torch.testing.assert_close(y_BTD.flatten(0, 1), expected, atol=1e-12, rtol=1e-12)
    # Statistics beside the leaves, written out.
    leaves_MN = levels[0]
    for p_MN in levels[1:]:
        leaves_MN = (leaves_MN.unsqueeze(-1) * p_MN.unsqueeze(1)).flatten(1)
    entropy_M = -torch.special.xlogy(leaves_MN, leaves_MN).sum(-1)
    torch.testing.assert_close(stats.load_E, torch.cat([p_MN.mean(0) for p_MN in levels]))
    torch.testing.assert_close(stats.measures["entropy"], entropy_M.mean())
    torch.testing.assert_close(stats.measures["effective_experts"], entropy_M.exp().mean())
    assert stats.levels == tuple(num_experts)
    assert stats.load_E.sum().item() == pytest.approx(len(levels))
    own = {"load_E", "entropy", "effective_experts", "dominated", "dominant_E"}
    if len(levels) > 1:
        own.add("level_entropy_L")
        assert stats.measures["level_entropy_L"].shape == (2,)
        torch.testing.assert_close(
            stats.measures["level_entropy_L"].sum(), stats.measures["entropy"]
        )
    assert stats.tensors().keys() == own
    assert not any(value.requires_grad for value in stats.tensors().values())


def test_statistics_of_a_gate_by_hand():
    # Four tokens, two levels. Level entropies: ln 2, 0, ln 4, 0 and 0, 0, 0, ln 2.
    first_MN = torch.tensor([[0.5, 0.5, 0, 0], [1, 0, 0, 0], [0.25] * 4, [0, 1, 0, 0]])
    second_MN = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.5, 0.5]])
    stats = gate_statistics(GateOutput([first_MN, second_MN]))
    expected_E = [1.75 / 4, 1.75 / 4, 0.25 / 4, 0.25 / 4, 3.5 / 4, 0.5 / 4]
    assert stats.load_E.tolist() == pytest.approx(expected_E)
    assert stats.measures["entropy"].item() == pytest.approx(4 * math.log(2) / 4)
    assert stats.measures["level_entropy_L"].tolist() == pytest.approx(
        [3 * math.log(2) / 4, math.log(2) / 4]
    )
    assert stats.measures["effective_experts"].item() == pytest.approx((2 + 1 + 4 + 2) / 4)
    # Leaves: 0.5 twice, 1, 0.25 four times, 0.5 twice: three of four tokens.
    assert stats.measures["dominated"].item() == 0.75
    # Of the first level 0.5 counts: tokens 0 and 1, and 0 and 3.
    assert stats.measures["dominant_E"].tolist() == [0.5, 0.5, 0, 0, 1, 0.25]


@every_factorization
def test_both_layers_do_without_the_same_experts(name):
    block = make_block(factorization=name, num_experts=[5, 3], expert_dropout=0.4)
    z_BTD = torch.randn(2, 9, 8, dtype=torch.float64)
    torch.manual_seed(3)
    y_BTD, stats = block(z_BTD, z_BTD)
    undropped = block.gate(z_BTD.flatten(0, 1)).coefficients
    torch.manual_seed(3)
    # As torch draws it, one level after the other.
    dropped = [a_MN * torch.empty_like(a_MN).bernoulli_(0.6) / 0.6 for a_MN in undropped]
    for a_MN, d_MN in zip(undropped, dropped, strict=True):
        assert a_MN.count_nonzero() > d_MN.count_nonzero() > 0
    inner = gelu(contract(full_tensor(name, block.up), z_BTD.flatten(0, 1), dropped, True))
    expected = contract(full_tensor(name, block.down), inner, dropped, True)
    torch.testing.assert_close(y_BTD.flatten(0, 1), expected, atol=1e-12, rtol=1e-12)
    # Of the gate, not of what was dropped.
    torch.testing.assert_close(stats.load_E, torch.cat([a_MN.mean(0) for a_MN in undropped]))
    inner = gelu(contract(full_tensor(name, block.up), z_BTD.flatten(0, 1), undropped, True))
    expected = contract(full_tensor(name, block.down), inner, undropped, True)
    torch.testing.assert_close(block.eval()(z_BTD, z_BTD)[0].flatten(0, 1), expected)


def test_an_update_moves_what_batch_norm_reads():
    block = make_block(gate_norm="batch", num_experts=[4, 2])
    z_BTD = torch.randn(4, 16, 8, dtype=torch.float64)
    block.update(block(z_BTD, z_BTD)[1], progress=0.5)
    scores_MS = (z_BTD @ block.gate.weight.T).flatten(0, 1)
    mean_S, variance_S = scores_MS.mean(0), scores_MS.var(0, correction=0)
    norm, close = block.gate.norm.double(), {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(norm.running_mean, 0.1 * mean_S, **close)
    torch.testing.assert_close(norm.running_variance, 0.9 + 0.1 * variance_S, **close)


@every_factorization
def test_only_the_second_layers_output_factor_is_scaled_as_a_residual_projection(name):
    scale = 1 / math.sqrt(2 * 12)
    plain = make_block(factorization=name, residual_std=0.02 * scale)
    scaled = make_block(factorization=name, scale_residual_init=True, residual_std=0.02 * scale)
    weights = dict(plain.named_parameters())
    for parameter_name, weight in scaled.named_parameters():
        if parameter_name != "gate.weight":
            ratio = scale if parameter_name == "down.output_factor" else 1.0
            torch.testing.assert_close(weight, ratio * weights[parameter_name])


@pytest.mark.parametrize("name", FACTORIZATIONS)
def test_every_factor_decays_with_the_bias_row_in_it(small_config, name):
    section = {"kind": "mumoe", "factorization": name, "num_experts": [8, 2]}
    model = build_model(small_config(feed_forward=section, bias=False))
    dimensions = matrix_dimensions(model)
    factors = [number for key, number in dimensions.items() if key.endswith("put_factor")]
    assert len(factors) == 3 * 2 * 2
    assert min(n for key, n in dimensions.items() if "feed_forward." in key) >= 2
    assert model.blocks[0].feed_forward.up.input_factor.shape[0] == 33  # no bias of its own


@pytest.mark.parametrize("name", ["cp", "tr", "tt"])
def test_a_block_of_256_experts_keeps_at_most_1_3_times_what_a_dense_one_keeps(name):
    context = FeedForwardContext(
        hidden_size=768, bias=True, dropout=0.0, initializer_std=0.02, residual_std=0.02
    )
    kept = []
    for kind, config in (
        (MuMoE, MuMoEConfig(factorization=name, num_experts=(256,))),
        (DenseFeedForward, DenseFeedForwardConfig()),
    ):
        block = kind(config, context)  # whatever memory holds: only sizes are asked for
        z_BTD = torch.randn(1, 16, 768)
        own = (*block.parameters(), z_BTD)
        kept.append(saved_bytes(lambda block=block, z_BTD=z_BTD: block(z_BTD, z_BTD), own))
    assert kept[0] <= 1.3 * kept[1]
