"""Every factorization against the tensor that it stands for, over the registry; and the ranks that
match a dense feed-forward."""

import math
from functools import partial

import pytest
import torch

from polyad.model.build import initial_value
from polyad.model.decoder import GPT2Config
from polyad.model.mumoe.config import FACTORIZATIONS, MuMoEConfig
from polyad.model.mumoe.factorizations import contract as contract_tokens
from polyad.parallel.plan import forward_flops
from polyad.train.config.run import parse_config
from polyad.train.tasks.language import with_vocabulary
from tests.helpers.factorized import coefficients, contract, full_tensor, make_layer, make_sizes
from tests.helpers.sections import section_of

every_factorization = pytest.mark.parametrize("name", FACTORIZATIONS)
every_depth = pytest.mark.parametrize("num_experts", [(5,), (5, 3), (4, 3, 2), (1,), (1, 3)])
with_and_without_bias = pytest.mark.parametrize("bias", [True, False])


@every_factorization
@every_depth
@with_and_without_bias
def test_output_and_gradients_are_those_of_the_whole_tensor(name, num_experts, bias):
    layer = make_layer(name, num_experts=num_experts, bias=bias)
    z_MI = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    levels = [a.requires_grad_() for a in coefficients(layer.sizes, 9)]
    inputs = [z_MI, *levels, *layer.parameters()]
    direction_MO = torch.randn(9, 7, dtype=torch.float64)
    actual_MO = layer(z_MI, levels)
    expected_MO = contract(full_tensor(name, layer), z_MI, levels, bias)
    torch.testing.assert_close(actual_MO, expected_MO, atol=1e-12, rtol=1e-12)
    ours = torch.autograd.grad((actual_MO * direction_MO).sum(), inputs)
    theirs = torch.autograd.grad((expected_MO * direction_MO).sum(), inputs)
    torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)


@every_factorization
@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        # I 6, O 7, ring ranks 2: CP R, ring 2 R, train R (R1 = 1), Tucker R; never above 6.
        (1, {"cp": 1, "tr": 2, "tt": 1, "tucker": 1}),
        (2, {"cp": 2, "tr": 4, "tt": 2, "tucker": 2}),
        (5, {"cp": 5, "tr": 6, "tt": 5, "tucker": 5}),
        (9, {"cp": 6, "tr": 6, "tt": 6, "tucker": 6}),
    ],
)
@pytest.mark.parametrize("num_experts", [(5,), (5, 3)])
def test_an_experts_matrix_has_the_rank_that_is_said(name, rank, expected, num_experts):
    layer = make_layer(name, rank=rank, bias=False, num_experts=num_experts)
    weight = full_tensor(name, layer)
    ranks = torch.linalg.matrix_rank(weight.flatten(0, -3)).unique().tolist()
    assert ranks == [expected[name]]  # random factors reach the bound


# 768 -> 1000, 128 experts, R 512, and the gate's 768 for each expert (METHODS, section 1).
@pytest.mark.parametrize(
    ("name", "num_experts", "expected"),
    [
        ("cp", (128,), 1_069_568),
        ("cp", (128, 2), 1_072_128),
        ("cp", (128, 4, 4, 4), 1_084_928),
        ("tr", (128,), 3_723_264),
        ("tr", (128, 2), 3_724_832),
        ("tr", (128, 4, 4, 4), 3_732_672),
        # Train: 1 x 128 x 4 + 4 x 769 x 512 + 512 x 1000 + 768 x 128.
        ("tt", (128,), 512 + 1_574_912 + 512_000 + 98_304),
        # Tucker: core 512 x 4 x 512, 128 x 4 + 769 x 512 + 512 x 1000 + 768 x 128.
        ("tucker", (128,), 1_048_576 + 512 + 393_728 + 512_000 + 98_304),
    ],
)
def test_a_layer_has_the_papers_number_of_parameters(name, num_experts, expected):
    sizes = make_sizes(num_experts=num_experts, inputs=768, outputs=1000, rank=512, expert_rank=4)
    assert FACTORIZATIONS[name].num_parameters(sizes) + 768 * sum(num_experts) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Levels 5 and 3, I 6, O 7, R 3, Q 2; the bias row is added, not multiplied.
        ("cp", 3 * (5 + 3 + 6 + 7)),
        # Ring: cores 2x5x2 + 2x3x2, their product 2x2x2, with the input 2x2x3; 2x6x3, 3x7x2.
        ("tr", 20 + 12 + 8 + 12 + 36 + 42),
        # Train: cores 1x5x2 + 2x3x2, product 1x2x2, with the input 1x2x3; 2x6x3, 3x7.
        ("tt", 10 + 12 + 4 + 6 + 36 + 21),
        # Tucker: 5x2 + 3x2, 6x3, core 3x2x2x3, contractions 2x2x3 and 2x3, 3x7.
        ("tucker", 16 + 18 + 36 + 12 + 6 + 21),
    ],
)
def test_multiply_adds_are_those_counted_by_hand(name, expected):
    with torch.device("meta"):
        layer = FACTORIZATIONS[name](make_sizes(num_experts=(5, 3)))
    rows = torch.zeros(2, 6), torch.zeros(2, 5), torch.zeros(2, 3)
    found = forward_flops(layer, rows, lambda layer, rows: layer(rows[0], list(rows[1:])))
    assert found == 2 * 2 * expected


def initialized(name, **changes):
    layer = make_layer(name, dtype=torch.float32, **changes)
    for parameter_name, parameter in layer.named_parameters():
        parameter.data = initial_value(layer, parameter_name, seed=3)
    return layer


def assert_uniform(values, bound):
    assert values.abs().max() <= bound
    assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert values.mean().item() == pytest.approx(0, abs=0.05 * bound)


LARGE = {"num_experts": (512, 6), "inputs": 96, "outputs": 80, "rank": 48, "expert_rank": 4}


@every_factorization
def test_input_and_output_factors_start_uniform_by_their_fan(name):
    layer = initialized(name, **LARGE)
    assert_uniform(layer.input_factor, 96**-0.5)
    fan = {"cp": 48, "tr": 48 * 4, "tt": 48, "tucker": 48}[name]
    assert_uniform(layer.output_factor, fan**-0.5)
    smaller = FACTORIZATIONS[name](make_sizes(**LARGE), output_scale=0.25)
    assert_uniform(initial_value(smaller, "output_factor", seed=3), 0.25 * fan**-0.5)
    assert_uniform(initial_value(smaller, "input_factor", seed=3), 96**-0.5)


def test_slices_of_a_ring_start_diagonal_and_further_levels_at_the_identity():
    layer = initialized("tr", **LARGE)
    first_NPQ = layer.expert_factor_0
    diagonal = first_NPQ.diagonal(dim1=1, dim2=2)
    assert (diagonal.mean().item(), diagonal.std().item()) == pytest.approx((1, 1), abs=0.05)
    assert (first_NPQ - torch.diag_embed(diagonal)).abs().max() == 0
    assert diagonal.unique().numel() == 512 * 4  # independent
    assert torch.equal(layer.expert_factor_1, torch.eye(4).expand(6, 4, 4))


@every_factorization
def test_orthogonal_factors_are_of_the_size_of_uniform_ones(name):
    uniform, orthogonal = (
        initialized(name, **LARGE, factor_start=each) for each in ("uniform", "orthogonal")
    )
    for factor, modes in (("input_factor", 1), ("output_factor", -1)):
        ours = getattr(orthogonal, factor).double()
        rows = math.prod(ours.shape[:modes])
        matrix = ours.reshape(rows, -1)
        matrix = matrix if rows >= matrix.shape[1] else matrix.T
        gram = matrix.T @ matrix
        torch.testing.assert_close(
            gram, gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype), atol=1e-5, rtol=0
        )
        size = getattr(uniform, factor).square().mean().sqrt().item()
        assert ours.square().mean().sqrt().item() == pytest.approx(size, rel=0.02)


@every_factorization
@pytest.mark.parametrize("start", ["uniform", "orthogonal"])
@pytest.mark.parametrize(
    "changes",
    [{"factor_scale": 0.5, "expert_std": 2.0}, {"num_experts": (64, 32), "level_std": 0.5}],
    ids=str,
)
def test_the_whole_tensor_starts_with_the_variance_that_is_said(name, start, changes):
    sizes = LARGE | {"num_experts": (512,), "bias": False, "factor_start": start} | changes
    layer = initialized(name, **sizes)
    scale, expert, level = (
        changes.get(key, default)
        for key, default in (("factor_scale", 1), ("expert_std", 1), ("level_std", 0))
    )
    # R paths with E[U2^2] = scale^2 / (3 x 96), E[U3^2] = scale^2 / (3 R), E[U1^2] = 1 + std^2.
    expected = scale**4 * (1 + expert**2) * (1 + level**2) / (9 * 96)
    if name == "tucker":
        expected /= 3
    weight = full_tensor(name, layer)
    assert weight.square().mean().item() == pytest.approx(expected, rel=0.12)
    assert weight.mean().item() == pytest.approx(0, abs=0.1 * expected**0.5)


def test_every_path_of_a_train_carries_signal():
    layer = initialized("tt", **LARGE)
    z_MI = torch.randn(32, 96)
    levels = [torch.full((32, number), 1 / number) for number in (512, 6)]
    shares = []
    for path in range(4):
        alone = initialized("tt", **LARGE)
        with torch.no_grad():
            alone.input_factor[:, torch.arange(4) != path] = 0
        shares.append(alone(z_MI, levels).square().mean().item())
    total = layer(z_MI, levels).square().mean().item()
    assert min(shares) > 0.1 * total


@every_factorization
def test_the_forward_pass_never_holds_the_whole_tensor(name):
    layer = make_layer(name, num_experts=(64, 16), inputs=32, outputs=32)
    largest = 0

    def note(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(torch.randn(4, 32).double(), coefficients(layer.sizes, 4))
    assert 0 < largest < 32 * 32 * 64  # one level of W; all of it is 16 times that


def test_memory_of_a_parameter_that_is_freed_between_the_passes_is_free():
    """As ZeRO 3 does: a view would keep it, and would not see what is gathered."""
    x_MC = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(
        contract_tokens(x_MC, factor, bias=True, activated=True).sum(), (x_MC, factor)
    )
    y_MK = contract_tokens(x_MC, factor, bias=True, activated=True)
    whole = factor.data
    factor.data = torch.full_like(whole, torch.nan)  # what stands there now is what is read
    assert torch.autograd.grad(y_MK.sum(), x_MC, retain_graph=True)[0].isnan().all()
    factor.data = whole.clone()
    found = torch.autograd.grad(y_MK.sum(), (x_MC, factor))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("activated", [False, True])
def test_in_bf16_gradients_are_those_of_float64_rounded(activated):
    shapes = ((512, 300), (301, 40, 4), (40, 4, 330))
    leaves = [torch.randn(shape).bfloat16() for shape in shapes]
    direction = torch.randn(512, 330).bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        x_MC, factor, output_factor = (leaf.to(dtype).requires_grad_() for leaf in leaves)
        mixed_MK = contract_tokens(x_MC, factor, bias=True, activated=activated)
        y_MO = contract_tokens(mixed_MK, output_factor, modes=2)
        gradients = torch.autograd.grad(y_MO, (x_MC, factor, output_factor), direction.to(dtype))
        results.append((y_MO, *gradients))
    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).norm() < 0.006 * exact.norm()


parse = partial(section_of, "mumoe")


def gpt2_block(bias=True, **changes):
    config = GPT2Config(bias=bias, feed_forward={"kind": "mumoe", **changes})
    return config.known_feed_forward()


# The paper's rank with the parameters of GPT-2's twelve blocks, and the rank that is nearest to a
# dense block of 4,722,432 parameters, or without biases 4,718,592.
@pytest.mark.parametrize(
    ("factorization", "num_experts", "rank", "expected", "nearest"),
    [
        ("cp", 256, 556, 57_029_664, 552),
        ("tr", 256, 149, 57_399_264, 147),
        ("cp", 64, 599, 56_728_104, 598),
        ("tr", 64, 153, 57_031_008, 152),
    ],
)
def test_a_block_has_the_papers_parameters_or_matches_a_dense_one(
    factorization, num_experts, rank, expected, nearest
):
    options = {"factorization": factorization, "num_experts": [num_experts]}
    assert 12 * gpt2_block(rank=rank, **options).parameters(768) == expected
    assert [gpt2_block(bias, **options).rank for bias in (True, False)] == [nearest] * 2


@pytest.mark.parametrize("factorization", FACTORIZATIONS)
@pytest.mark.parametrize("num_experts", [[16], [8, 2], [1]])
@pytest.mark.parametrize("hidden_size", [None, 100, 5])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_no_other_rank_is_nearer(factorization, num_experts, hidden_size, activation):
    config = MuMoEConfig(
        activation=activation,
        factorization=factorization,
        num_experts=num_experts,
        expert_rank=2,
        hidden_size=hidden_size,
    )
    inner = 256 if hidden_size is None else hidden_size
    firsts = 2 if activation == "swiglu" else 1
    dense = (firsts + 1) * 64 * inner + 64 + firsts * inner
    if config.model_copy(update={"rank": 1}).parameters(64) > dense:
        with pytest.raises(ValueError, match="at rank 1"):
            config.of_model(width=64, bias=True)
        return
    chosen = config.of_model(width=64, bias=True).rank
    away = {
        rank: abs(config.model_copy(update={"rank": rank}).parameters(64) - dense)
        for rank in range(1, 200)
    }
    assert away[chosen] == min(away.values())


def test_a_run_is_resolved_to_a_number():
    config = parse("num_experts=[8]")
    assert config.model.feed_forward.rank == "match-dense"
    # Dense 8,352, gate 8 x 32, and 2 x 8 + 33 + 128 + 129 + 32 for each rank: 23.95.
    assert {block.rank for block in config.model.block_feed_forwards()} == {24}
    model = with_vocabulary(config.model, 61, "data.path: x")
    resolved = config.model_copy(update={"model": model})
    assert resolved.model.feed_forward.rank == 24
    assert parse_config(resolved.to_yaml(), origin="again") == resolved
