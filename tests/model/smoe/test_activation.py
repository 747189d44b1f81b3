"""GELU on a CPU, computed and read from a table, against PyTorch's in float64."""

import pytest
import torch
from torch.nn.functional import gelu

from model.smoe import activation
from model.smoe.activation import BlockGelu, TableGelu, gelu_for


def reference(inner, change):
    """The activation and the gradient of the inner rows, in float64."""
    wide = inner.detach().double().clone().requires_grad_()
    active = gelu(wide, approximate="tanh")
    (gradient,) = torch.autograd.grad(active, wide, change.double())
    return active.detach(), gradient


def every_number():
    """All finite numbers of bf16, in rows of 16."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    return numbers[numbers.isfinite()].view(-1, 16)


@pytest.mark.parametrize("block", [2**16, 2**12, 7])
def test_the_table_has_every_number_rounded_once(block, monkeypatch):
    monkeypatch.setattr(activation, "BLOCK_NUMBERS", block)
    inner = every_number() if block > 7 else every_number()[::511].contiguous()
    change = torch.randn(inner.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected, expected_gradient = reference(inner, change)
    kernel, active, gradient = TableGelu(), torch.empty_like(inner), change.clone()
    kernel.forward(inner, active)
    # Where 1 + tanh loses all places, the reference is 0 for what is not.
    exact = expected.abs() > 1e-10
    assert torch.equal(active[exact], expected[exact].bfloat16())
    assert (active[~exact].abs() < 2e-10).all()
    again = active.clone()
    active.fill_(torch.nan)
    kernel.backward(inner, active, gradient)
    assert torch.equal(active, again)
    # Half a unit of the last of 8 places, and what the slope in fp32 leaves where it is near 0.
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2**-7.99, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-8)],
)
def test_it_is_computed_alike(dtype, tolerance):
    inner = 3 * torch.randn(37, 24, generator=torch.Generator().manual_seed(1))
    change = torch.randn(37, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    inner = inner.to(dtype)
    expected, expected_gradient = reference(inner, change)
    active, gradient = torch.empty_like(inner), change.clone()
    BlockGelu(inner).backward(inner, active, gradient)
    torch.testing.assert_close(active.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=tolerance, atol=tolerance)


def test_rows_behind_the_inner_ones_are_left_alone():
    inner, active = torch.ones(3, 8).bfloat16(), torch.zeros(5, 8).bfloat16()
    TableGelu().forward(inner, active)
    assert (active[:3] != 0).all()
    assert (active[3:] == 0).all()


def test_what_is_not_finite_stays_so():
    inner = torch.tensor([[float("nan"), float("inf")]]).bfloat16()
    active = torch.empty_like(inner)
    TableGelu().forward(inner, active)
    assert not active.isfinite().any()


def test_the_table_is_read_in_bf16_by_few_threads(monkeypatch):
    for dtype, threads, kernel in (
        (torch.bfloat16, 2, TableGelu),
        (torch.bfloat16, 3, BlockGelu),
        (torch.float32, 1, BlockGelu),
    ):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert type(gelu_for(torch.empty(1, 8, dtype=dtype))) is kernel
