"""No gradient of frozen weights is computed, and no rank of LoRA falls back to a loop.

Shapes: M rows, N tokens, K experts of a token, E experts, D width, F inner width, r rank.
"""

import itertools
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from polyad.model.kernels.cpu import experts as cpu
from polyad.model.kernels.cpu.experts import experts_on_cpu
from polyad.model.kernels.grouped import ExpertWeights, by_products, grouped_linear
from polyad.model.kernels.rows import combine
from polyad.model.lora import LoRAConfig, LoRAExperts
from polyad.model.smoe.experts import Experts
from polyad.model.smoe.layer import make_plan
from polyad.model.smoe.router import count
from tests.helpers.definitions import by_definition
from tests.helpers.routing import make, make_config, make_context

COUNTS = [5, 0, 9, 2]


class Operations(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self):
        super().__init__()
        self.times = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.times[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self):
        named = ("polyad::grouped_mm", "aten::mm", "aten::bmm", "aten::addmm")
        return {name: self.times[name] for name in named if self.times[name]}


def leaves(seed=0):
    """Rows, first layers, their biases, second layers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (sum(COUNTS), 8), (4, 8, 16), (4, 16), (4, 16, 8)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradients(function, tensors, wanted):
    """Gradients of the wanted arguments, and what the backward pass did."""
    given = [x.clone().requires_grad_(want) for x, want in zip(tensors, wanted, strict=True)]
    output = function(*given)
    generator = torch.Generator().manual_seed(9)
    gradient = torch.randn(output.shape, generator=generator)
    with Operations() as did:
        output.backward(gradient)
    return [x.grad for x in given], did


SUBSETS = [each for each in itertools.product([False, True], repeat=4) if any(each)]


@pytest.mark.parametrize("wanted", SUBSETS, ids=str)
def test_experts_on_a_cpu_compute_what_is_wanted(wanted):
    counts_E = torch.tensor(COUNTS)

    def run(*given):
        return experts_on_cpu(*given, counts_E)

    expected, _ = gradients(run, leaves(), (True,) * 4)
    with mock.patch.object(torch, "mm", wraps=torch.mm) as multiply:
        output = run(*(x.requires_grad_(w) for x, w in zip(leaves(), wanted, strict=True)))
        before = multiply.call_count
        output.backward(torch.ones_like(output))
        products = multiply.call_count - before
    of_rows, of_up, of_bias, of_down = wanted
    each = of_rows + of_up + of_down + (of_rows or of_up or of_bias)
    assert products == 3 * each  # an expert has no row
    found, _ = gradients(run, leaves(), wanted)
    for ours, theirs, want in zip(found, expected, wanted, strict=True):
        assert (ours is not None) == want
        assert ours is None or torch.equal(ours, theirs)


def test_an_expert_without_a_bias_has_no_sum_for_it():
    rows_MD, up_EDF, _, down_EFD = leaves()
    run = experts_on_cpu(rows_MD.requires_grad_(), up_EDF, None, down_EFD, torch.tensor(COUNTS))
    with mock.patch.object(cpu, "gelu_backward", wraps=cpu.gelu_backward) as gelu:
        run.backward(torch.ones_like(run))
    assert all(call.args[4] is None for call in gelu.call_args_list)
    assert gelu.call_count == 3


@pytest.mark.parametrize("wanted", SUBSETS, ids=str)
def test_grouped_products_compute_what_is_wanted(wanted):
    counts_E = torch.tensor(COUNTS)

    def run(rows_MD, *weights):
        return by_products(rows_MD, ExpertWeights(*weights), counts_E)

    expected, _ = gradients(run, leaves(), (True,) * 4)
    found, did = gradients(run, leaves(), wanted)
    for ours, theirs, want in zip(found, expected, wanted, strict=True):
        assert (ours is not None) == want
        assert ours is None or torch.equal(ours, theirs)
    of_rows, of_up, of_bias, of_down = wanted
    # The sum for the bias is a product with ones.
    each = of_rows + of_up + of_bias + of_down + (of_rows or of_up or of_bias)
    assert did.products == {"polyad::grouped_mm": each}


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)], ids=str)
def test_one_layer_computes_what_is_wanted(wanted):
    rows_MD, up_EDF, *_ = leaves()
    run = lambda rows, weight: grouped_linear(rows, weight, torch.tensor(COUNTS))  # noqa: E731
    expected, _ = gradients(run, (rows_MD, up_EDF), (True, True))
    found, did = gradients(run, (rows_MD, up_EDF), wanted)
    assert did.products == {"polyad::grouped_mm": sum(wanted)}
    assert all(x is None or torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)], ids=str)
def test_weights_of_experts_without_a_gradient_cost_none(wanted):
    ids_NK = torch.tensor([[0, 2], [2, 1], [3, 2]])
    plan = make_plan(ids_NK, count(ids_NK, 4))
    rows_MD, weights_NK = torch.randn(6, 8), torch.rand(3, 2)

    def run(rows, weights):
        return combine(rows, weights, plan.assignment_M, plan.row_A)

    expected, _ = gradients(run, (rows_MD, weights_NK), (True, True))
    found, did = gradients(run, (rows_MD, weights_NK), wanted)
    assert all(x is None or torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert (did.times["aten::mul"], did.times["aten::bmm"]) == wanted


def lora_experts(rank, dtype):
    config = make_config(num_experts=4, expert_hidden_size=32)
    experts = make(Experts, config, make_context(hidden_size=16), dtype)
    adapted = LoRAExperts(experts, LoRAConfig(rank=rank, alpha=2.0, experts=True)).to(dtype)
    generator = torch.Generator().manual_seed(rank)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora" in name)
        if "lora" in name:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    return adapted


def lora_step(rank, dtype):
    experts = lora_experts(rank, dtype)
    generator = torch.Generator().manual_seed(5)
    rows_MD = torch.randn(sum(COUNTS), 16, generator=generator).to(dtype).requires_grad_()
    with Operations() as forward:
        output_MD = experts(rows_MD, torch.tensor(COUNTS))
    with Operations() as backward:
        output_MD.backward(torch.ones_like(output_MD))
    grads = {name: p.grad for name, p in experts.named_parameters()}
    return output_MD.detach(), grads | {"rows": rows_MD.grad}, forward, backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 5, 8, 12])
def test_lora_of_any_rank_takes_as_many_grouped_products(rank, dtype):
    output_MD, grads, forward, backward = lora_step(rank, dtype)
    assert forward.products == {"polyad::grouped_mm": 6}
    # Up, down: for rows alone. A and B of each: for rows and for themselves.
    assert backward.products == {"polyad::grouped_mm": 10}
    for did in (forward, backward):  # no number is read on the host
        assert not did.times["aten::_local_scalar_dense"]
    with by_definition():
        expected_MD, theirs, *_ = lora_step(rank, dtype)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(output_MD, expected_MD, **close)
    for name, grad in grads.items():
        assert (grad is None) == (name in ("up", "up_bias", "down")), name
        if grad is not None:
            torch.testing.assert_close(grad, theirs[name], **close)
