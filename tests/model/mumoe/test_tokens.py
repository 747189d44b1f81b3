"""What a muMoE computes for each token by itself, compiled: against float64 and by hand.

Shapes: M tokens, N experts of a level, P and Q of a token's small matrix, R columns of the other.
"""

import pytest
import torch

from model.mumoe import tokens
from model.mumoe.gating import entmax15
from model.mumoe.products import token_product

native = pytest.mark.skipif(
    not tokens.has_native_tokens(), reason="no C compiler was there at installation"
)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def _in_pytorch(monkeypatch):
    monkeypatch.setattr(tokens, "_library", lambda: None)


def with_gradient(function, leaves, direction):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    result = function(*leaves)
    return result, torch.autograd.grad(result, leaves, direction.to(result.dtype))


@native
def test_entmax_by_hand():
    x_MN = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 0.0], [-1e30, 1e30]])
    assert tokens.takes_scores(x_MN)
    expected = [[0.83071891, 0.16928109], [1, 0], [0.5, 0.5], [0, 1]]
    torch.testing.assert_close(entmax15(x_MN), torch.tensor(expected))


@native
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 256, 2048])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_entmax_and_its_gradient_are_those_of_float64(size, scale, threads):
    x_MN, direction_MN = scale * torch.randn(70, size), torch.randn(70, size)
    exact, (exact_gradient,) = with_gradient(entmax15, [x_MN.double()], direction_MN)
    results = []
    for count in (1, 3):
        threads(count)
        results.append(with_gradient(entmax15, [x_MN], direction_MN))
    (ours, (gradient,)), (again, (gradient_again,)) = results
    assert torch.equal(ours, again)
    assert torch.equal(gradient, gradient_again)
    torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=0)
    torch.testing.assert_close(ours.sum(-1), torch.ones(70))
    # Near the threshold a root is as uncertain as the threshold, about 1e-6.
    torch.testing.assert_close(gradient.double(), exact_gradient, atol=2e-5, rtol=0)


@native
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_takes_its_row_alone(bad):
    x_MN = torch.randn(5, 20)
    expected_MN = entmax15(x_MN)
    x_MN[2, 7] = bad
    p_MN = entmax15(x_MN)
    assert p_MN[2].isnan().all()
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(p_MN[others], expected_MN[others])


@native
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 4, 147), (1, 4, 255), (3, 5, 257), (16, 16, 600)])
def test_each_tokens_own_product_is_that_of_float64(shape, dtype, rtol, threads):
    p, q, r = shape
    leaves = [torch.randn(9, p, q).to(dtype), torch.randn(9, q, r).to(dtype)]
    direction = torch.randn(9, p, r).to(dtype)
    assert tokens.takes_product(*leaves, direction)
    exact = with_gradient(torch.matmul, [leaf.double() for leaf in leaves], direction)
    threads(1)
    one = with_gradient(token_product, leaves, direction)
    threads(3)
    three = with_gradient(token_product, leaves, direction)
    for ours, again, wanted in zip(
        *((c, *gradients) for c, gradients in (one, three, exact)), strict=True
    ):
        assert torch.equal(ours, again)
        atol = rtol * 0.02 * wanted.abs().max().item()  # where a sum nearly vanishes
        torch.testing.assert_close(ours.double(), wanted, rtol=rtol, atol=max(atol, 1e-5))


@native
def test_many_tokens_are_shared_by_threads(threads):
    """As many as are worth several threads, and not a multiple of them."""
    threads(5)
    a_MPQ, b_MQR = torch.randn(1003, 4, 4), torch.randn(1003, 4, 147)
    torch.testing.assert_close(token_product(a_MPQ, b_MQR), a_MPQ @ b_MQR)
    x_MN = torch.randn(1003, 256)
    torch.testing.assert_close(entmax15(x_MN).double(), entmax15(x_MN.double()), atol=2e-6, rtol=0)


@native
def test_what_is_not_compiled_for_is_pytorchs():
    a_MPQ, b_MQR = torch.randn(3, 4, 17), torch.randn(3, 17, 5)
    assert not tokens.takes_product(a_MPQ, b_MQR)
    torch.testing.assert_close(token_product(a_MPQ, b_MQR), a_MPQ @ b_MQR)
    assert not tokens.takes_product(a_MPQ[:, :, :4], b_MQR[:, :4])  # not contiguous
    assert not tokens.takes_product(a_MPQ[:0, :, :4].contiguous(), b_MQR[:0, :4].contiguous())
    assert not tokens.takes_scores(torch.randn(3, 4).double())
    assert not tokens.takes_scores(torch.randn(4, 3).t())
    x_MN = torch.randn(4, 3).t()
    torch.testing.assert_close(entmax15(x_MN), entmax15(x_MN.contiguous()))


@pytest.mark.usefixtures("_in_pytorch")
def test_without_the_library_both_are_pytorchs():
    x_MN = torch.randn(20, 30, requires_grad=True)
    expected_MN = entmax15(x_MN.double())
    p_MN = entmax15(x_MN)
    torch.testing.assert_close(p_MN.double(), expected_MN, atol=2e-6, rtol=0)
    (ours,) = torch.autograd.grad(p_MN.square().sum(), x_MN)
    (exact,) = torch.autograd.grad(expected_MN.square().sum(), x_MN)
    torch.testing.assert_close(ours, exact, atol=2e-5, rtol=0)
    a_MPQ, b_MQR = torch.randn(3, 4, 4), torch.randn(3, 4, 5)
    assert torch.equal(token_product(a_MPQ, b_MQR), a_MPQ @ b_MQR)
    assert not tokens.takes_scores(x_MN)
    assert not tokens.takes_product(a_MPQ, b_MQR)
