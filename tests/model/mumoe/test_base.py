"""Products of tokens with a factor, against autograd's own, and what they keep."""

import pytest
import torch
from torch.nn.functional import gelu

from polyad.model.mumoe.factorizations import contract


def operands(rows):
    x_MC = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    return x_MC, torch.randn(rows, 2, 3, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize(("rows", "bias"), [(4, False), (5, True), (5, False)])
def test_outputs_and_gradients_are_autograds(rows, bias, activated):
    x_MC, factor = operands(rows)
    actual_MK = contract(x_MC, factor, bias=bias, activated=activated)
    flat = factor.flatten(1)
    expected_MK = (gelu(x_MC) if activated else x_MC) @ flat[:4] + (flat[4] if bias else 0)
    torch.testing.assert_close(actual_MK, expected_MK, atol=1e-14, rtol=1e-13)
    direction_MK = torch.randn_like(expected_MK)
    ours = torch.autograd.grad(actual_MK, (x_MC, factor), direction_MK)
    theirs = torch.autograd.grad(expected_MK, (x_MC, factor), direction_MK)
    torch.testing.assert_close(ours, theirs, atol=1e-14, rtol=1e-13)
    assert torch.autograd.gradcheck(
        lambda x, f: contract(x, f, bias=bias, activated=activated), (x_MC, factor)
    )


@pytest.mark.parametrize("modes", [1, 2])
def test_the_first_modes_are_summed_over(modes):
    factor = torch.randn(4, 3, 7, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, *factor.shape[:modes], dtype=torch.float64, requires_grad=True)
    actual = contract(x.flatten(1), factor, modes=modes)
    expected = torch.tensordot(x, factor, modes).flatten(1)
    torch.testing.assert_close(actual, expected, atol=1e-14, rtol=1e-13)
    direction = torch.randn_like(expected)
    ours = torch.autograd.grad(actual, (x, factor), direction)
    theirs = torch.autograd.grad(expected, (x, factor), direction)
    torch.testing.assert_close(ours, theirs, atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(frozen):
    both = operands(5)
    both[frozen].requires_grad_(False)
    contract(*both, bias=True, activated=True).sum().backward()
    assert both[frozen].grad is None
    assert both[1 - frozen].grad is not None


def test_tokens_and_the_parameter_itself_are_kept_and_nothing_else():
    x_MC, factor = operands(5)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        contract(x_MC, factor, bias=True, activated=True)
    assert {tensor.data_ptr() for tensor in kept} == {x_MC.data_ptr(), factor.data_ptr()}


def test_memory_of_a_parameter_that_is_freed_between_the_passes_is_free():
    """As ZeRO 3 does: a view would keep it, and would not see what is gathered."""
    x_MC, factor = operands(5)
    expected = torch.autograd.grad(
        contract(x_MC, factor, bias=True, activated=True).sum(), (x_MC, factor)
    )
    y_MK = contract(x_MC, factor, bias=True, activated=True)
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
        mixed_MK = contract(x_MC, factor, bias=True, activated=activated)
        y_MO = contract(mixed_MK, output_factor, modes=2)
        gradients = torch.autograd.grad(y_MO, (x_MC, factor, output_factor), direction.to(dtype))
        results.append((y_MO, *gradients))
    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).norm() < 0.006 * exact.norm()
