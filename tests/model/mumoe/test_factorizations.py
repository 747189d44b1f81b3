"""Every factorization against the tensor that it stands for, over the registry."""

import math
import string

import pytest
import torch

from polyad.model.build import initial_value
from polyad.model.mumoe.config import FACTORIZATIONS
from polyad.parallel.plan import forward_flops
from tests.helpers.everyday import everyday
from tests.helpers.factorized import coefficients, contract, full_tensor, make_layer, make_sizes

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
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, atol=1e-11, rtol=1e-11)


def test_cp_is_the_sum_worked_out_by_hand():
    # Two experts, one input, one output, R = 1: W_n = U1_n U2 U3, its bias U1_n b U3.
    layer = make_layer("cp", num_experts=(2,), inputs=1, outputs=1, rank=1)
    with torch.no_grad():
        layer.expert_factor_0.copy_(torch.tensor([[2.0], [-1.0]]))
        layer.input_factor.copy_(torch.tensor([[3.0], [0.5]]))
        layer.output_factor.fill_(10.0)
    a_MN = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    # (0.25 x 2 - 0.75) x (3 x 4 + 0.5) x 10 = -0.25 x 12.5 x 10
    y_MO = layer(torch.tensor([[4.0]], dtype=torch.float64), [a_MN])
    assert y_MO.item() == pytest.approx(-31.25, abs=1e-12)


@every_factorization
@with_and_without_bias
def test_one_expert_is_one_affine_map(name, bias):
    layer = make_layer(name, num_experts=(1,), bias=bias)
    weight_IO = full_tensor(name, layer)[0]
    z_MI, one_M1 = torch.randn(4, 6).double(), torch.ones(4, 1).double()
    expected_MO = z_MI @ weight_IO[:6] + (weight_IO[6] if bias else 0)
    torch.testing.assert_close(layer(z_MI, [one_M1]), expected_MO, atol=1e-12, rtol=1e-12)


@every_factorization
@every_depth
def test_leaving_an_expert_out_of_the_factor_is_leaving_it_out_of_the_tensor(name, num_experts):
    layer = make_layer(name, num_experts=num_experts)
    z_MI, levels = torch.randn(9, 6).double(), coefficients(layer.sizes, 9)
    before_MO = layer(z_MI, levels)
    weight = full_tensor(name, layer)
    weight[num_experts[0] - 1] = 0  # of the first level, so with all that is below it
    with torch.no_grad():
        layer.expert_factor_0[num_experts[0] - 1] = 0
    expected_MO = contract(weight, z_MI, levels, bias=True)
    torch.testing.assert_close(layer(z_MI, levels), expected_MO, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(before_MO, expected_MO)


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


@every_factorization
@every_depth
@with_and_without_bias
def test_the_counts_are_those_of_the_module(name, num_experts, bias):
    layer = make_layer(name, num_experts=num_experts, bias=bias)
    assert sum(p.numel() for p in layer.parameters()) == layer.num_parameters(layer.sizes)


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


def test_expert_factors_start_around_one_and_further_levels_at_one():
    layer = initialized("cp", **LARGE)
    first = layer.expert_factor_0
    assert (first.mean().item(), first.std().item()) == pytest.approx((1, 1), abs=0.02)
    assert layer.expert_factor_1.eq(1).all()
    tucker = initialized("tucker", **LARGE)
    first = tucker.expert_factor_0
    assert (first.mean().item(), first.std().item()) == pytest.approx((1, 1), abs=0.05)
    assert tucker.expert_factor_1.eq(1).all()
    assert_uniform(tucker.core, (48 * 4 * 4) ** -0.5)


def test_slices_of_a_ring_start_diagonal_and_further_levels_at_the_identity():
    layer = initialized("tr", **LARGE)
    first_NPQ = layer.expert_factor_0
    diagonal = first_NPQ.diagonal(dim1=1, dim2=2)
    assert (diagonal.mean().item(), diagonal.std().item()) == pytest.approx((1, 1), abs=0.05)
    assert (first_NPQ - torch.diag_embed(diagonal)).abs().max() == 0
    assert diagonal.unique().numel() == 512 * 4  # independent
    assert torch.equal(layer.expert_factor_1, torch.eye(4).expand(6, 4, 4))


@pytest.mark.parametrize("name", ["cp", "tucker"])
def test_further_levels_can_start_apart(name):
    factor = initialized(
        name, **(LARGE | {"num_experts": (6, 4096)}), level_std=0.1
    ).expert_factor_1
    assert (factor.mean().item(), factor.std().item()) == pytest.approx((1, 0.1), abs=0.01)


@pytest.mark.parametrize("name", ["tr", "tt"])
def test_further_slices_can_start_apart(name):
    layer = initialized(name, **(LARGE | {"num_experts": (6, 512)}), level_std=0.1)
    diagonal = layer.expert_factor_1.diagonal(dim1=1, dim2=2)
    assert (diagonal.mean().item(), diagonal.std().item()) == pytest.approx((1, 0.1), abs=0.02)
    assert (layer.expert_factor_1 - torch.diag_embed(diagonal)).abs().max() == 0


@pytest.mark.parametrize("name", ["cp", "tucker"])
def test_experts_can_start_nearer_to_one_another(name):
    factor = initialized(name, **LARGE, expert_std=0.1).expert_factor_0
    assert (factor.mean().item(), factor.std().item()) == pytest.approx((1, 0.1), abs=0.01)


def test_slices_can_start_nearer_to_one_another():
    diagonal = initialized("tr", **LARGE, expert_std=0.1).expert_factor_0.diagonal(dim1=1, dim2=2)
    assert (diagonal.mean().item(), diagonal.std().item()) == pytest.approx((1, 0.1), abs=0.01)
    entries_NPQ = initialized("tt", **LARGE, expert_std=0.1).expert_factor_0 * 4**0.5
    assert (entries_NPQ.mean().item(), entries_NPQ.std().item()) == pytest.approx(
        (1, 0.1), abs=0.01
    )


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
def test_a_scale_multiplies_input_and_output_factors_and_no_others(name, start):
    plain, scaled = (
        dict(initialized(name, **LARGE, factor_start=start, factor_scale=each).named_parameters())
        for each in (1.0, 0.3)
    )
    for factor, values in plain.items():
        scale = 0.3 if factor in ("input_factor", "output_factor") else 1.0
        torch.testing.assert_close(scaled[factor], scale * values)


@every_factorization
@pytest.mark.parametrize("start", ["uniform", "orthogonal"])
@everyday(
    "changes",
    [
        {},
        {"rank": 24},
        {"factor_scale": 1.5},
        {"factor_scale": 0.5, "expert_std": 2.0},
        {"num_experts": (64, 32), "level_std": 0.5},
    ],
    keep=[{"factor_scale": 0.5, "expert_std": 2.0}],
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


@pytest.mark.slow
@pytest.mark.parametrize(("inputs", "outputs", "scale"), [(768, 3072, 1.08), (3072, 768, 1.53)])
@pytest.mark.parametrize("start", ["uniform", "orthogonal"])
def test_cp_starts_with_the_size_of_gpt2s_weights_at_the_scale_that_is_said(
    inputs, outputs, scale, start
):
    sizes = {"num_experts": (64,), "inputs": inputs, "outputs": outputs, "rank": 599}
    layer = initialized("cp", **sizes, factor_scale=scale, factor_start=start)
    mean_squares = [  # of some experts: each is U2 diag(U1_n) U3
        ((layer.input_factor[:-1] * u_R) @ layer.output_factor).square().mean()
        for u_R in layer.expert_factor_0[:16]
    ]
    assert torch.stack(mean_squares).mean().sqrt().item() == pytest.approx(0.02, rel=0.03)


def test_every_path_of_a_train_carries_signal():
    layer = initialized("tt", **LARGE)
    assert torch.equal(layer.expert_factor_1, torch.eye(4).expand(6, 4, 4))
    first_NPQ = layer.expert_factor_0
    assert first_NPQ.mean((0, 1)).tolist() == pytest.approx([0.5] * 4, abs=0.1)  # 1 / sqrt(4)
    assert first_NPQ.std((0, 1)).tolist() == pytest.approx([0.5] * 4, abs=0.1)
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
@pytest.mark.parametrize("num_experts", [(256,), (128, 4)])
def test_outputs_start_with_a_like_variance(name, num_experts):
    # Experts alike: each is a sum over paths with E[U2^2] E[U3^2] = 1 / (9 I fan), so 1/9 of the
    # input's variance whatever the ranks; Tucker's core is one more uniform factor, 1/27.
    # Over seeds of the ring's factors the sum varies, hence the wide margin.
    sizes = {"num_experts": num_experts, "inputs": 256, "outputs": 256, "rank": 64}
    layer = initialized(name, **sizes, expert_rank=4, bias=False)
    z_MI = torch.randn(64, 256)
    levels = [torch.full((64, number), 1 / number) for number in num_experts]
    expected = 1 / 27 if name == "tucker" else 1 / 9
    assert layer(z_MI, levels).var().item() == pytest.approx(expected, rel=0.4)


@every_factorization
@pytest.mark.parametrize("num_experts", [(5, 3), (1,)])
def test_bf16_is_finite_and_close_to_fp32(name, num_experts):
    layer = initialized(name, **(LARGE | {"num_experts": num_experts}))
    z_MI = torch.randn(64, 96)
    levels = [a / a.sum(1, keepdim=True) for a in coefficients(layer.sizes, 64, torch.float32)]
    exact_MO = layer(z_MI, levels)
    rounded_MO = layer.to(torch.bfloat16)(z_MI.bfloat16(), [a.bfloat16() for a in levels])
    assert rounded_MO.isfinite().all()
    assert (rounded_MO - exact_MO).norm() < 0.02 * exact_MO.norm()


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


def test_letters_of_the_oracle_do_not_meet():
    assert not set(string.ascii_lowercase[:4]) & set("iomyz")
