"""Products with little kept for the backward pass, against autograd's own."""

import pytest
import torch
from torch.nn.functional import gelu

from model.mumoe.products import affine, product, token_product


def operands(rows):
    z_MI = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    return z_MI, torch.randn(rows, 2, 3, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize(("rows", "bias"), [(4, False), (5, True), (5, False)])
def test_outputs_and_gradients_are_autograds(rows, bias, activated):
    z_MI, factor = operands(rows)
    actual_MC = affine(z_MI, factor, bias=bias, activated=activated)
    flat = factor.flatten(1)
    expected_MC = (gelu(z_MI) if activated else z_MI) @ flat[:4] + (flat[4] if bias else 0)
    torch.testing.assert_close(actual_MC, expected_MC, atol=1e-14, rtol=1e-13)
    direction_MC = torch.randn_like(expected_MC)
    ours = torch.autograd.grad(actual_MC, (z_MI, factor), direction_MC)
    theirs = torch.autograd.grad(expected_MC, (z_MI, factor), direction_MC)
    torch.testing.assert_close(ours, theirs, atol=1e-14, rtol=1e-13)
    assert torch.autograd.gradcheck(
        lambda z, f: affine(z, f, bias=bias, activated=activated), (z_MI, factor)
    )


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(frozen):
    both = operands(5)
    both[frozen].requires_grad_(False)
    affine(*both, bias=True, activated=True).sum().backward()
    assert both[frozen].grad is None
    assert both[1 - frozen].grad is not None


def test_the_activation_is_not_kept():
    z_MI, factor = operands(5)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        affine(z_MI, factor, bias=True, activated=True)
    assert {tensor.data_ptr() for tensor in kept} == {z_MI.data_ptr(), factor.data_ptr()}


def test_both_products_of_a_layer_have_numerical_gradients():
    shapes = ((3, 70), (71, 34), (34, 69))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def layer(z_MI, factor, out_CO):
        return product(affine(z_MI, factor, bias=True, activated=True), out_CO)

    assert torch.autograd.gradcheck(layer, leaves, fast_mode=True)


def test_each_tokens_own_product_has_autograds_gradients():
    shapes = ((5, 4, 3), (5, 3, 7))
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    torch.testing.assert_close(token_product(a, b), a @ b)
    assert torch.autograd.gradcheck(token_product, (a, b))


@pytest.mark.parametrize("activated", [False, True])
def test_in_bf16_gradients_are_those_of_float64_rounded(activated):
    shapes = ((512, 300), (301, 40, 4), (40, 4, 330))
    leaves = [torch.randn(shape).bfloat16() for shape in shapes]
    direction = torch.randn(512, 330).bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        z_MI, factor, out_CO = (leaf.to(dtype).requires_grad_() for leaf in leaves)
        y_MO = product(affine(z_MI, factor, bias=True, activated=activated), out_CO)
        results.append(
            (y_MO, *torch.autograd.grad(y_MO, (z_MI, factor, out_CO), direction.to(dtype)))
        )
    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).norm() < 0.006 * exact.norm()
