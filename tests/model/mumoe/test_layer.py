"""The block: one gate, two layers, what it reads, what it returns, how it starts."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import gelu, layer_norm, silu

from polyad.model.build import build_model, materialize, matrix_dimensions
from polyad.model.decoder_config import GPT2Config
from polyad.model.feedforward import DenseFeedForward, DenseFeedForwardConfig, FeedForwardContext
from polyad.model.mumoe.config import FACTORIZATIONS, MuMoEConfig
from polyad.model.mumoe.gating import NORMS, GateOutput, entmax15
from polyad.model.mumoe.layer import MuMoE, gate_statistics
from tests.helpers.factorized import contract, full_tensor

every_factorization = pytest.mark.parametrize("name", FACTORIZATIONS)


def make_block(
    dtype=torch.float64,
    width=8,
    residual_std=0.02,
    dropout=0.0,
    trained_gate=True,
    **changes,
) -> MuMoE:
    """A block with its initial values, but for a gate that is not zero."""
    options = {"num_experts": [5], "rank": 6, "expert_rank": 2, "hidden_size": 12}
    config = MuMoEConfig.model_validate(options | changes)
    context = FeedForwardContext(
        hidden_size=width,
        bias=False,
        dropout=dropout,
        initializer_std=0.02,
        residual_std=residual_std,
    )
    with torch.device("meta"):
        block = MuMoE(config, context)
    materialize(block, seed=5, dtype=dtype)
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


def test_a_coefficient_just_below_a_half_dominates_nothing():
    below = torch.nextafter(torch.tensor(0.5), torch.tensor(0.0)).item()
    stats = gate_statistics(GateOutput([torch.tensor([[below, 0.3, 0.2 + 0.5 - below]])]))
    assert (stats.measures["dominated"], stats.measures["dominant_E"].tolist()) == (0, [0, 0, 0])


def test_an_expert_that_no_token_uses_has_a_load_of_exactly_zero():
    block = make_block(num_experts=[3], gate_input="normalized")
    with torch.no_grad():
        block.gate.weight.copy_(torch.tensor([[1.0], [0.9], [-9.0]]).expand(3, 8))
    z_BTD = torch.rand(1, 4, 8, dtype=torch.float64)
    _, stats = block(z_BTD, z_BTD)
    assert (stats.load_E > 0).tolist() == [True, True, False]


def test_evaluation_drops_nothing_and_training_drops_outputs():
    block = make_block(dropout=0.5)
    z_BTD = torch.randn(2, 3, 8, dtype=torch.float64)
    dropped = block(z_BTD, z_BTD)[0].eq(0).double().mean()
    assert 0.2 < dropped < 0.8
    assert not block.eval()(z_BTD, z_BTD)[0].eq(0).any()


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


def test_evaluation_does_without_no_expert():
    plain, dropping = make_block(), make_block(expert_dropout=0.9)
    with torch.no_grad():
        dropping.gate.weight.copy_(plain.gate.weight)
    z_BTD = torch.randn(2, 3, 8, dtype=torch.float64)
    expected_BTD = plain(z_BTD, z_BTD)[0]
    assert not torch.equal(dropping(z_BTD, z_BTD)[0], expected_BTD)
    assert torch.equal(dropping.eval()(z_BTD, z_BTD)[0], expected_BTD)


def test_batch_norm_is_the_leak_that_it_is_refused_for():
    block = make_block(gate_norm="batch")
    z_BTD = torch.randn(1, 16, 8, dtype=torch.float64)
    changed_BTD = z_BTD.clone()
    changed_BTD[:, 9:] += 1
    before, after = block(z_BTD, z_BTD)[0], block(changed_BTD, changed_BTD)[0]
    assert (after[:, :9] - before[:, :9]).abs().max() > 1e-3
    block.eval()
    before, after = block(z_BTD, z_BTD)[0], block(changed_BTD, changed_BTD)[0]
    torch.testing.assert_close(after[:, :9], before[:, :9], atol=1e-12, rtol=0)


def test_the_loop_updates_what_batch_norm_reads():
    block = make_block(gate_norm="batch", num_experts=[4, 2])
    z_BTD = torch.randn(4, 16, 8, dtype=torch.float64)
    _, stats = block(z_BTD, z_BTD)
    assert block.gate.norm.running_mean.tolist() == [0] * 6
    block.update(stats, progress=0.5)
    scores_MS = (z_BTD @ block.gate.weight.T).flatten(0, 1)
    torch.testing.assert_close(
        block.gate.norm.running_mean.double(), 0.1 * scores_MS.mean(0), atol=1e-6, rtol=1e-6
    )
    expected_S = 0.9 + 0.1 * scores_MS.var(0, correction=0)
    torch.testing.assert_close(
        block.gate.norm.running_variance.double(), expected_S, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("norm", NORMS)
def test_the_first_step_of_a_gate_is_not_lost(norm):
    # All coefficients are even at first, but experts differ, so the gate learns from the start.
    block = make_block(gate_norm=norm)
    torch.nn.init.zeros_(block.gate.weight)
    z_BTD = torch.randn(2, 3, 8, dtype=torch.float64)
    (block(z_BTD, z_BTD)[0] * torch.randn(2, 3, 8)).sum().backward()
    assert (block.gate.weight.grad.abs().amax(1) > 1e-6).all()


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


def test_factors_of_both_layers_are_scaled():
    plain, scaled = (dict(make_block(factor_scale=each).named_parameters()) for each in (1.0, 2.0))
    for factor, values in plain.items():
        if factor != "gate.weight":
            scale = 2.0 if factor.endswith("put_factor") else 1.0
            torch.testing.assert_close(scaled[factor], scale * values)


@pytest.mark.parametrize("name", FACTORIZATIONS)
def test_every_factor_decays_with_the_bias_row_in_it(small_config, name):
    section = {"kind": "mumoe", "factorization": name, "num_experts": [8, 2]}
    model = build_model(small_config(feed_forward=section, bias=False))
    dimensions = {
        parameter_name: number
        for parameter_name, number in matrix_dimensions(model).items()
        if "feed_forward." in parameter_name
    }
    assert {parameter_name.split(".")[-1] for parameter_name in dimensions} >= {
        "weight", "expert_factor_0", "expert_factor_1", "input_factor", "output_factor",
    }  # fmt: skip
    assert all(number >= 2 for number in dimensions.values())
    assert model.blocks[0].feed_forward.up.input_factor.shape[0] == 33  # no bias of its own


def count(factorization, num_experts, rank):
    section = {
        "kind": "mumoe",
        "factorization": factorization,
        "num_experts": num_experts,
        "rank": rank,
    }
    config = GPT2Config(vocab_size=50257, bias=False, feed_forward=section)
    blocks = build_model(config).blocks
    return sum(p.numel() for block in blocks for p in block.feed_forward.parameters())


def test_all_blocks_of_gpt2_have_the_papers_number_of_parameters():
    assert count("cp", [256], 556) == 12 * 4_752_472 == 57_029_664
    assert count("tr", [256], 149) == 12 * 4_783_272 == 57_399_264


@every_factorization
@pytest.mark.parametrize("gate_norm", NORMS)
@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode], ids=["meta", "fake"])
def test_a_block_runs_without_numbers(name, gate_norm, mode):
    options = {"factorization": name, "num_experts": [5, 3], "rank": 6, "hidden_size": 12}
    config = MuMoEConfig.model_validate(options | {"gate_norm": gate_norm})
    context = FeedForwardContext(
        hidden_size=8, bias=True, dropout=0.0, initializer_std=0.02, residual_std=0.02
    )
    with mode(), torch.device("meta" if mode is nullcontext else "cpu"):
        block = MuMoE(config, context)
        z_BTD = torch.empty(2, 3, 8, requires_grad=True)
        y_BTD, _ = block(z_BTD, z_BTD)
        y_BTD.sum().backward()
    assert y_BTD.shape == z_BTD.grad.shape == (2, 3, 8)
    assert all(parameter.grad.shape == parameter.shape for parameter in block.parameters())


def saved_numbers(block, tokens, width):
    """Numbers that one forward pass keeps, but parameters and what was given."""
    z_BTD = torch.randn(1, tokens, width)
    given = {t.untyped_storage().data_ptr() for t in (*block.parameters(), z_BTD)}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            storages[storage.data_ptr()] = (storage.nbytes() / tensor.element_size(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(z_BTD, z_BTD)
    return sum(size for size, _ in storages.values())


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
        kept.append(saved_numbers(block, 16, 768))
    assert kept[0] <= 1.3 * kept[1]
