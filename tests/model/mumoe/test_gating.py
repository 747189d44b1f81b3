"""The gate: entmax against numbers worked out by hand and an independent implementation."""

import entmax
import pytest
import torch

from polyad.model.mumoe.config import MuMoEConfig
from polyad.model.mumoe.gating import ACTIVATIONS, EPSILON, BatchNorm, Gate, entmax15
from tests.helpers.random_model import drawn


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        # x = scores / 2, p = (x - tau)^2. [1, 0]: x = (0.5, 0), (0.5 - tau)^2 + tau^2 = 1 gives
        # tau = (1 - sqrt(7)) / 4 = -0.4114378.
        ([1.0, 0.0], [0.83071891, 0.16928109]),
        # x = (1, 0): tau = 0, the second is exactly out.
        ([2.0, 0.0], [1.0, 0.0]),
        ([0.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
        ([7.0], [1.0]),
        ([5.0, 5.0, -9.0], [0.5, 0.5, 0.0]),
    ],
)
def test_entmax_is_the_one_worked_out_by_hand(scores, expected):
    actual = entmax15(torch.tensor(scores, dtype=torch.float64))
    torch.testing.assert_close(
        actual, torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=0
    )
    assert actual.eq(0).tolist() == [number == 0 for number in expected]


def scores(kind, dtype):
    x_MN = torch.randn(64, 512, dtype=dtype)
    return {
        "normal": x_MN,
        "sharp": 6 * x_MN,
        "flat": 1e-3 * x_MN,
        "ties": (2 * x_MN).round(),
        "all equal": torch.full_like(x_MN, 3.0),
        "large": 1e3 * x_MN,
        "far from zero": x_MN + 1e4,
        "one": x_MN[:, :1],
    }[kind]


KINDS = ["normal", "sharp", "flat", "ties", "all equal", "large", "far from zero", "one"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_entmax_equals_the_package_with_gradients(kind, dtype, atol):
    x_MN = scores(kind, dtype)
    direction_MN = torch.randn_like(x_MN)
    results = []
    for function in (entmax15, entmax.entmax15):
        leaf_MN = x_MN.clone().requires_grad_()
        p_MN = function(leaf_MN)
        (p_MN * direction_MN).sum().backward()
        results.append((p_MN.detach(), leaf_MN.grad))
    (ours, our_gradient), (theirs, their_gradient) = results
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
    # A root of a nearly zero coefficient has few digits: hence ten times as much.
    torch.testing.assert_close(our_gradient, their_gradient, atol=1e3 * atol, rtol=0)
    torch.testing.assert_close(ours.sum(-1), torch.ones(64, dtype=dtype), atol=1e-5, rtol=0)


def test_entmax_of_larger_scores_than_squares_allow_is_finite():
    x_MN = torch.tensor([[1e30, 0.0, -1e30], [3e38, 3e38, -3e38]])
    expected_MN = torch.tensor([[1, 0, 0], [0.5, 0.5, 0]])
    torch.testing.assert_close(entmax15(x_MN), expected_MN, atol=1e-6, rtol=0)


def batch_norm(size):
    norm = BatchNorm((size,))
    norm.running_mean.zero_()
    norm.running_variance.fill_(1.0)
    return norm


def test_batch_norm_is_torchs_and_reads_running_statistics_in_evaluation():
    ours, theirs = batch_norm(6), torch.nn.BatchNorm1d(6, affine=False)
    for _ in range(3):
        x_MS = 2 * torch.randn(500, 6) + 1
        normalized = ours(x_MS)
        torch.testing.assert_close(normalized.coefficients[0], theirs(x_MS), atol=1e-5, rtol=1e-5)
        before = ours.running_mean.clone()
        assert torch.equal(before, ours.running_mean)  # forward reads alone
        ours.update(normalized.moments)
    # torch's running variance divides by 499, ours by 500.
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_variance, theirs.running_var, atol=0, rtol=3e-3)
    x_MS = torch.randn(1, 6)  # of one token there is no variance
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x_MS).coefficients[0], theirs(x_MS), atol=1e-3, rtol=1e-2)


def test_statistics_of_two_micro_batches_are_those_of_both_together():
    x_MS = torch.randn(8, 3)
    whole, halves = batch_norm(3), batch_norm(3)
    whole.update(whole(x_MS).moments)
    one, other = (halves(part).moments for part in x_MS.split(4))
    halves.update({name: (one[name] + other[name]) / 2 for name in one})
    torch.testing.assert_close(whole.running_variance, halves.running_variance)


def make_gate(norm="layer", activation="entmax15"):
    config = MuMoEConfig(num_experts=(8, 3), gate=activation, gate_norm=norm)
    return drawn(lambda: Gate(config, 5), 2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_a_gate_starts_with_even_coefficients(activation, norm):
    first, second = make_gate(norm, activation)(torch.randn(16, 5)).coefficients
    torch.testing.assert_close(first, torch.full((16, 8), 1 / 8))
    torch.testing.assert_close(second, torch.full((16, 3), 1 / 3))


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_the_first_gradients_of_a_gate_are_316_times_those_without_a_norm(norm):
    # All scores are 0, so the norm divides by sqrt(0 + epsilon). The gradient of even coefficients
    # has no mean over the experts, and the norm takes none away; BatchNorm takes away the mean
    # over tokens, which is 0 here because the inputs have none.
    u_MD = torch.randn(16, 5, dtype=torch.float64)
    u_MD = torch.cat([u_MD, -u_MD])
    direction_MN = torch.randn(16, 8, dtype=torch.float64)
    direction_MN = torch.cat([direction_MN, -direction_MN])
    factor = EPSILON**-0.5
    gate = make_gate(norm).double()
    (gate(u_MD).coefficients[0] * direction_MN).sum().backward()
    bare = torch.zeros(8, 5, dtype=torch.float64, requires_grad=True)
    (entmax15(u_MD @ bare.T) * direction_MN).sum().backward()
    torch.testing.assert_close(gate.weight.grad[:8], factor * bare.grad, atol=1e-9, rtol=1e-6)
    assert factor == pytest.approx(316.2, abs=0.1)
    assert bare.grad.abs().max() > 0.01


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_entmax_finds_thresholds_among_scores_of_many_scales(dtype, atol):
    # Clusters, each far smaller and more numerous than the one above: where Newton's steps are
    # shortest. Rows of their own and all at once, as rows end together.
    scale_N = torch.cat([torch.full((2**k,), -(2.0**-k)) for k in range(11)]).double()
    x_MN = torch.stack([factor * scale_N for factor in (1e-3, 0.1, 1.0, 2.0, 8.0, 1e3)]).to(dtype)
    expected_MN = entmax.entmax15(x_MN.double()).to(dtype)
    torch.testing.assert_close(entmax15(x_MN), expected_MN, atol=atol, rtol=0)
    for row_N, expected_N in zip(x_MN, expected_MN, strict=True):
        torch.testing.assert_close(entmax15(row_N[None])[0], expected_N, atol=atol, rtol=0)


def test_minus_infinity_is_no_expert():
    x_MN = torch.tensor([[1.0, -torch.inf, 1.0]], requires_grad=True)
    p_MN = entmax15(x_MN)
    assert p_MN.tolist() == [[pytest.approx(0.5), 0, pytest.approx(0.5)]]
    (gradient_MN,) = torch.autograd.grad(p_MN[0, 0], x_MN)
    assert gradient_MN.tolist() == [[pytest.approx(0.3535534), 0, pytest.approx(-0.3535534)]]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_travels_on(name, poison):
    x_MN = torch.zeros(2, 4)
    x_MN[0, 2] = poison
    a_MN = ACTIVATIONS[name](x_MN)
    assert a_MN[0].isnan().any()  # and not an error on one of many processes
    assert a_MN[1].tolist() == [0.25] * 4
