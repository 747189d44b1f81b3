"""Grouped products beside a loop, the switch between kernels and definitions, and what frozen
weights cost: nothing. Outputs and gradients of experts and rows are in `tests/model/smoe`.

Shapes: E experts, M rows, D width, F inner width.
"""

import itertools
import os
import subprocess
import sys
from collections import Counter
from unittest import mock

import pytest
import torch

from polyad.model.kernels import grouped, switch
from polyad.model.kernels.cpu_experts import experts_on_cpu
from polyad.model.kernels.grouped import ExpertWeights
from polyad.model.lora import LoRAConfig, add_lora
from polyad.model.smoe.experts import Experts
from tests.helpers.allocated import Observed
from tests.helpers.definitions import by_definition, by_products
from tests.helpers.routing import make, make_config, make_context

COUNTS = torch.tensor([5, 0, 9, 3])
OFFSETS_E = COUNTS.cumsum(0).to(torch.int32)
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
)


@pytest.fixture
def inputs():
    """Rows [M, D], and matrices of experts [E, D, F]."""
    return torch.randn(17, 8), torch.randn(4, 8, 16)


def test_pytorch_finds_no_fault_in_a_registration(inputs):
    rows, up = (x.requires_grad_() for x in inputs)
    torch.library.opcheck(grouped._grouped_mm, (rows, up, OFFSETS_E), test_utils=CHECKS)
    odd = rows.double(), up.double(), OFFSETS_E
    torch.library.opcheck(grouped._grouped_mm, odd, test_utils=CHECKS)


def test_matrices_that_lie_anywhere_are_copied_to_where_a_grouped_product_can_begin(
    inputs, monkeypatch
):
    """As weights do in one flat tensor after others of odd sizes."""
    rows, up = inputs
    places = []

    def grouped_mm(a, b, offs):
        places.extend((a.data_ptr() % 16, b.data_ptr() % 16))
        return torch.nn.functional.grouped_mm(a, b, offs=offs)

    monkeypatch.setattr(grouped, "grouped_mm", grouped_mm)
    expected = grouped._grouped_mm(rows, up, OFFSETS_E)
    moved = torch.cat([up.new_zeros(1), up.flatten()])[1:].view(up.shape)
    assert moved.data_ptr() % 16
    assert torch.equal(grouped._grouped_mm(rows, moved, OFFSETS_E), expected)
    assert places == [0] * 4


def test_second_derivatives_of_grouped_products_are_right(inputs):
    def by_loop(rows_MD, up_EDF):
        parts = zip(rows_MD.split(COUNTS.tolist()), up_EDF, strict=True)
        return torch.cat([part @ each for part, each in parts])

    results = []
    for compute in (by_loop, lambda a, b: grouped._grouped_mm(a, b, OFFSETS_E)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        loss = compute(*leaves).pow(3).sum()
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(x.square().sum() for x in gradients), leaves))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, "", "fast", "reference", "quick"])
def test_the_variable_chooses_or_is_refused_in_a_line(value):
    environment = {k: v for k, v in os.environ.items() if k != switch.VARIABLE}
    if value is not None:
        environment[switch.VARIABLE] = value
    words = ["-c", "from polyad.model.kernels import switch; print(switch.REFERENCE)"]
    if value == "quick":
        words = ["-m", "polyad.launch", "validate", "configs/quickstart/gpt2.yaml"]
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    if value == "quick":
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert "POLYAD_KERNELS: 'quick'" in line
    else:
        assert done.stdout == f"{value == 'reference'}\n"


ROWS = [5, 0, 9, 2]


def counting(times):
    """A context that counts operations by their names."""
    return Observed(lambda func, *_: times.update([func._schema.name]))


def products(times):
    named = ("polyad::grouped_mm", "aten::mm", "aten::bmm", "aten::addmm")
    return {name: times[name] for name in named if times[name]}


def leaves(seed=0):
    """Rows, first layers, their biases, second layers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (sum(ROWS), 8), (4, 8, 16), (4, 16), (4, 16, 8)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradients(function, tensors, wanted):
    """Gradients of the wanted arguments, what the backward pass did, and how often by `mm`."""
    given = [x.clone().requires_grad_(want) for x, want in zip(tensors, wanted, strict=True)]
    output = function(*given)
    generator = torch.Generator().manual_seed(9)
    gradient = torch.randn(output.shape, generator=generator)
    did = Counter()
    with counting(did), mock.patch.object(torch, "mm", wraps=torch.mm) as multiply:
        output.backward(gradient)
    return [x.grad for x in given], did, multiply.call_count


SUBSETS = [each for each in itertools.product([False, True], repeat=4) if any(each)]


@pytest.mark.parametrize("kind", ["cpu", "grouped"])
@pytest.mark.parametrize("wanted", SUBSETS, ids=str)
def test_experts_compute_what_is_wanted(wanted, kind):
    counts_E = torch.tensor(ROWS)

    def run(rows_MD, *weights):
        if kind == "cpu":
            return experts_on_cpu(rows_MD, *weights, counts_E)
        with by_products():
            return grouped.grouped(rows_MD, ExpertWeights(*weights), counts_E)

    expected, *_ = gradients(run, leaves(), (True,) * 4)
    found, did, multiplied = gradients(run, leaves(), wanted)
    for ours, theirs, want in zip(found, expected, wanted, strict=True):
        assert (ours is not None) == want
        assert ours is None or torch.equal(ours, theirs)
    of_rows, of_up, of_bias, of_down = wanted
    each = of_rows + of_up + of_down + (of_rows or of_up or of_bias)
    if kind == "cpu":
        assert multiplied == 3 * each  # an expert has no row
    else:  # the sum for the bias is a product with ones
        assert products(did) == {"polyad::grouped_mm": each + of_bias}


def lora_experts(rank, dtype):
    config = make_config(num_experts=4, expert_hidden_size=32)

    def adapted(*given):
        experts = Experts(*given)
        add_lora(experts, LoRAConfig(rank=rank, alpha=2.0, targets=(), experts=True))
        return experts

    return make(adapted, config, make_context(hidden_size=16), dtype)


def lora_step(rank, dtype):
    experts = lora_experts(rank, dtype)
    generator = torch.Generator().manual_seed(5)
    rows_MD = torch.randn(sum(ROWS), 16, generator=generator).to(dtype).requires_grad_()
    forward, backward = Counter(), Counter()
    with counting(forward):
        output_MD = experts(rows_MD, torch.tensor(ROWS))
    with counting(backward):
        output_MD.backward(torch.ones_like(output_MD))
    grads = {name: p.grad for name, p in experts.named_parameters()}
    return output_MD.detach(), grads | {"rows": rows_MD.grad}, forward, backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 5, 8, 12])
def test_lora_of_any_rank_takes_as_many_grouped_products(rank, dtype):
    output_MD, grads, forward, backward = lora_step(rank, dtype)
    assert products(forward) == {"polyad::grouped_mm": 6}
    # Up, down: for rows alone. A and B of each: for rows and for themselves.
    assert products(backward) == {"polyad::grouped_mm": 10}
    for did in (forward, backward):  # no number is read on the host
        assert not did["aten::_local_scalar_dense"]
    with by_definition():
        expected_MD, theirs, *_ = lora_step(rank, dtype)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(output_MD, expected_MD, **close)
    for name, grad in grads.items():
        assert (grad is None) == (name in ("up", "up_bias", "down")), name
        if grad is not None:
            torch.testing.assert_close(grad, theirs[name], **close)
