"""GELU on a CPU, compiled, against its formula in float64.

Shapes: m rows, F inner width.
"""

import math

import pytest
import torch

from polyad.model.kernels.cpu_experts import has_gelu, native_gelu

pytestmark = pytest.mark.skipif(
    not has_gelu(torch.float32), reason="no C compiler was there when Polyad was installed"
)


def reference(inner_mF, bias_F, change_mF):
    """The gelu, the gradient of the inner rows and their sum, in float64."""
    h = inner_mF.double()
    if bias_F is not None:
        h = h + bias_F.double()
    slope = 2 * math.sqrt(2 / math.pi)
    share = torch.sigmoid(slope * h * (1 + 0.044715 * h.square()))
    other = torch.sigmoid(-slope * h * (1 + 0.044715 * h.square()))  # 1 - share, all its places
    derivative = share + h * share * other * slope * (1 + 3 * 0.044715 * h.square())
    change_mF = change_mF.double() * derivative
    return h * share, change_mF, change_mF.sum(0)


def both_ways(inner_mF, bias_F, change_mF):
    """As `reference`; memory that nobody has written is NaN."""
    active_mF, again_mF = torch.full_like(inner_mF, torch.nan), torch.full_like(inner_mF, torch.nan)
    for_bias_F = torch.full_like(inner_mF[0], torch.nan)
    change_mF = change_mF.clone()
    native_gelu("forward", inner_mF, bias_F, active_mF)
    native_gelu("backward", inner_mF, bias_F, again_mF, change_mF, for_bias_F)
    torch.testing.assert_close(active_mF, again_mF, rtol=0, atol=0, equal_nan=True)
    return active_mF, change_mF, for_bias_F


def numbers(rows, columns, dtype, seed=0):
    """Inner rows, a bias and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((rows, columns), (columns,), (rows, columns))
    return [(2 * torch.randn(size, generator=generator)).to(dtype) for size in sizes]


# One number, more columns than go together, rows for all threads.
@pytest.mark.parametrize("shape", [(1, 1), (5, 1031), (600, 96)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)], ids=str
)
def test_it_is_the_formula(dtype, tolerance, with_bias, shape):
    inner, bias, change = numbers(*shape, dtype)
    bias = bias if with_bias else None
    actual = both_ways(inner, bias, change)
    expected = reference(inner, bias, change)
    for name, got, want in zip(("value", "change", "bias"), actual, expected, strict=True):
        scale = math.sqrt(shape[0]) if name == "bias" else 1
        torch.testing.assert_close(
            got.double(), want, rtol=tolerance, atol=scale * tolerance, msg=name
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_change_no_bit(dtype):
    inner, bias, change = numbers(300, 1500, dtype)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(both_ways(inner, bias, change))
    torch.set_num_threads(before)
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


def test_every_number_of_bf16_is_rounded_once():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    inner = bits.view(torch.bfloat16)
    inner = inner[inner.isfinite()].view(-1, 16)
    change = torch.randn(inner.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    active, gradient, _ = both_ways(inner, None, change)
    expected, expected_gradient, _ = reference(inner, None, change)
    # Half a unit of the last of 8 places, and a little for fp32, down to where bf16 is denormal.
    torch.testing.assert_close(active.double(), expected, rtol=2**-7.99, atol=1e-37)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2**-7.99, atol=1e-36)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ends_and_what_is_not_finite(dtype):
    inner = torch.tensor([[math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, 10.5, -10.5]]).to(dtype)
    active, change, _ = both_ways(inner, None, torch.ones_like(inner))
    assert active[0, :3].isfinite().tolist() == [False] * 3
    assert active[0, 3:].tolist() == [inner[0, 3].item(), 0, 0, 10.5, 0]
    assert change[0, 0].isnan()
    assert change[0, 3:].tolist() == [1, 0, 0.5, 1, 0]
