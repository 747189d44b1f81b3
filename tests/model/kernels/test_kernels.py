"""Every operation, in every way that computes it, against its definition in float64.

Shapes: B batch, S tokens, T of them queries, F features or inner width, E experts, M rows, D width.
"""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from polyad.model.kernels import grouped, rows, switch
from polyad.model.kernels.cpu import gelu
from tests.helpers.definitions import by_definition
from tests.helpers.everyday import everyday
from tests.helpers.routing import Watch

# Four tokens with two experts each: 8 rows, sorted by expert.
ASSIGNMENTS = torch.tensor([2, 7, 0, 5, 1, 6, 3, 4])
ROWS = torch.tensor([2, 4, 0, 6, 7, 3, 5, 1])
COUNTS, FEWER = torch.tensor([5, 0, 9, 3]), torch.tensor([5, 0, 7, 2])
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.03}
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
)


def loop(*arguments, **options):
    with by_definition():
        return grouped.by_products(*arguments, **options)


def numbers(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def experts_inputs(bias=True):
    rows, up, up_bias, down = numbers((17, 8), (4, 8, 16), (4, 16), (4, 16, 8))
    return [rows, up, up_bias, down] if bias else [rows, up, down]


def order(like):
    """The assignments of rows and the rows of assignments, on a tensor's device."""
    return ASSIGNMENTS.to(like.device), ROWS.to(like.device)


def leaving_out(compute):
    """Experts that do not take the last rows, whose outputs and gradients have no meaning."""

    def call(rows_MD, *weights):
        kept_M1 = (torch.arange(17, device=rows_MD.device) < 14).unsqueeze(1)
        rows_MD = torch.where(kept_M1, rows_MD, 0)
        outputs_MD = running(compute, counts_E=FEWER)(rows_MD, *weights)
        return torch.where(kept_M1, outputs_MD, 0)

    return call


def running(compute, drop=None, counts_E=COUNTS):
    def call(rows_MD, up_EDF, *others):
        bias_EF, down_EFD = others if len(others) == 2 else (None, *others)
        weights = grouped.ExpertWeights(up_EDF, bias_EF, down_EFD)
        return compute(rows_MD, weights, counts_E.to(rows_MD.device), drop=drop)

    return call


# Name: how to call it, its definition, and its inputs.
OPERATIONS = {
    "experts": (running(grouped.grouped), running(loop), experts_inputs()),
    "experts without a bias": (
        running(grouped.grouped),
        running(loop),
        experts_inputs(bias=False),
    ),
    "experts that leave rows out": (
        leaving_out(grouped.grouped),
        leaving_out(loop),
        experts_inputs(),
    ),
    "rows permuted": (
        lambda given: rows.take(given, *order(given), 1),
        lambda given: given[order(given)[0]],
        numbers((8, 6)),
    ),
    "rows taken": (
        lambda tokens: rows.take(tokens, *order(tokens), 2),
        lambda tokens: rows.take_by_definition(tokens, order(tokens)[0], 2),
        numbers((4, 6)),
    ),
    "rows combined": (
        lambda *both: rows.combine(*both, *order(both[0])),
        lambda *both: rows.combine_by_definition(*both, *order(both[0])),
        numbers((8, 6), (4, 2)),
    ),
}
every_operation = pytest.mark.parametrize("name", OPERATIONS)


@pytest.fixture(params=["fast", "reference"])
def way(request, monkeypatch):
    monkeypatch.setattr(switch, "REFERENCE", request.param == "reference")
    return request.param


def with_gradients(compute, inputs, dtype, context=None):
    """Output and gradients; of a loss that weighs every element differently."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    with context or nullcontext():
        output = compute(*leaves)
        (direction,) = numbers(output.shape)
        gradients = torch.autograd.grad(output, leaves, direction.to(output))
    return [output.detach(), *gradients]


def assert_close(ours, exact, dtype):
    for mine, other in zip(ours, exact, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - other).norm() <= TOLERANCES[dtype] * other.norm().clamp_min(1)


@every_operation
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_outputs_and_gradients_are_the_definitions(name, dtype, way):
    compute, definition, inputs = OPERATIONS[name]
    inputs = [x.to(dtype).double() for x in inputs]
    exact = with_gradients(definition, inputs, torch.float64)
    ours_on_cpu = mock.patch.object(grouped, "experts_on_cpu", wraps=grouped.experts_on_cpu)
    with Watch() as watch, ours_on_cpu as on_cpu:
        ours = with_gradients(compute, inputs, dtype)
    assert_close(ours, exact, dtype)
    if name.startswith("experts"):
        assert on_cpu.called == (way == "fast" and gelu.has_gelu(dtype))
    if name in ("rows permuted", "rows taken"):  # by the gradient, which a definition adds up
        assert bool({"index_add", "index_add_"} & watch.operations) == (way == "reference")


@every_operation
def test_without_the_compiled_library_nothing_changes(name, monkeypatch):
    monkeypatch.setattr(gelu, "_LIBRARY", None)
    compute, definition, inputs = OPERATIONS[name]
    inputs = [x.float().double() for x in inputs]
    exact = with_gradients(definition, inputs, torch.float64)
    assert_close(with_gradients(compute, inputs, torch.float32), exact, torch.float32)


@every_operation
def test_recomputation_changes_no_number(name, way):
    compute, _, inputs = OPERATIONS[name]
    plain = with_gradients(compute, inputs, torch.float32)
    again = with_gradients(
        lambda *leaves: checkpoint(compute, *leaves, use_reentrant=False), inputs, torch.float32
    )
    assert all(map(torch.equal, plain, again))


@everyday("name", OPERATIONS, keep=["rows combined"])
def test_a_compiler_traces_it_whole_but_the_loop(name, way):
    compute, _, inputs = OPERATIONS[name]
    # The loop over experts reads the counts, which no trace knows.
    is_loop = way == "reference" and name.startswith("experts")
    torch._dynamo.reset()
    compiled = torch.compile(compute, backend="aot_eager", fullgraph=not is_loop)
    plain = with_gradients(compute, inputs, torch.float32)
    torch.testing.assert_close(with_gradients(compiled, inputs, torch.float32), plain)


@every_operation
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_shapes_are_known_without_numbers(name, kind):
    compute, _, inputs = OPERATIONS[name]
    real = with_gradients(compute, inputs, torch.float32)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else torch.device("meta")
    with switch.without_numbers(), mode:
        leaves = [torch.empty(x.shape, requires_grad=True) for x in inputs]
        call = compute
        if name.startswith("experts"):
            counts = torch.empty(4, dtype=torch.int64)
            call = _with_counts(counts)
        output = call(*leaves)
        gradients = torch.autograd.grad(output, leaves, torch.empty_like(output))
    assert [x.shape for x in (output, *gradients)] == [x.shape for x in real]


def _with_counts(counts_E):
    def call(rows_MD, up_EDF, *others):
        bias_EF, down_EFD = others if len(others) == 2 else (None, *others)
        weights = grouped.ExpertWeights(up_EDF, bias_EF, down_EFD)
        return grouped.grouped(rows_MD, weights, counts_E)

    return call


def test_pytorch_finds_no_fault_in_a_registration():
    rows, up = (x.float().requires_grad_() for x in experts_inputs()[:2])
    offsets_E = COUNTS.cumsum(0).to(torch.int32)
    torch.library.opcheck(grouped._grouped_mm, (rows, up, offsets_E), test_utils=CHECKS)
    odd = rows.double(), up.double(), offsets_E
    torch.library.opcheck(grouped._grouped_mm, odd, test_utils=CHECKS)


# Of a custom operation without a derivative, and of a backward pass that differentiates once, whose
# gradients lead nowhere.
REFUSED = re.compile(r"no autograd formula was registered|not have been used in the graph")


@every_operation
@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_are_refused_or_right(name, power, way):
    """Also of a loss whose gradient is a constant, which asks for no derivative of its own."""
    compute, definition, inputs = OPERATIONS[name]

    def second(function):
        leaves = [x.clone().requires_grad_() for x in inputs]
        loss = function(*leaves).pow(power).sum()
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in gradients), leaves)

    exact = second(definition)
    try:
        ours = second(compute)
    except RuntimeError as error:
        if way == "reference" or not REFUSED.search(str(error)):
            raise
        return
    assert_close(ours, exact, torch.float64)


# Grouped products


@pytest.mark.parametrize("drop", [None, torch.tanh])  # in place of dropout, which draws
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_products_are_the_definition(dtype, drop):
    inputs = [x.to(dtype).double() for x in experts_inputs()]
    exact = with_gradients(running(loop, drop), inputs, torch.float64)
    ours = with_gradients(running(grouped.by_products, drop), inputs, dtype)
    assert_close(ours, exact, dtype)


def test_matrices_that_lie_anywhere_are_copied_to_where_a_grouped_product_can_begin(monkeypatch):
    """As weights do in one flat tensor after others of odd sizes."""
    rows, up = (x.float() for x in experts_inputs()[:2])
    places = []

    def grouped_mm(a, b, offs):
        places.extend((a.data_ptr() % 16, b.data_ptr() % 16))
        return torch.nn.functional.grouped_mm(a, b, offs=offs)

    monkeypatch.setattr(grouped, "grouped_mm", grouped_mm)
    offsets_E = COUNTS.cumsum(0).to(torch.int32)
    expected = grouped._grouped_mm(rows, up, offsets_E)
    moved = torch.cat([up.new_zeros(1), up.flatten()])[1:].view(up.shape)
    assert moved.data_ptr() % 16
    assert torch.equal(grouped._grouped_mm(rows, moved, offsets_E), expected)
    assert places == [0] * 4


def test_second_derivatives_of_grouped_products_are_right():
    rows, up = (x.float() for x in experts_inputs()[:2])
    offsets_E = COUNTS.cumsum(0).to(torch.int32)

    def by_loop(rows_MD, up_EDF):
        parts = zip(rows_MD.split(COUNTS.tolist()), up_EDF, strict=True)
        return torch.cat([part @ each for part, each in parts])

    results = []
    for compute in (by_loop, lambda a, b: grouped._grouped_mm(a, b, offsets_E)):
        leaves = [x.clone().requires_grad_() for x in (rows, up)]
        loss = compute(*leaves).pow(3).sum()
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(x.square().sum() for x in gradients), leaves))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


# The switch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "reference"),
    [(None, False), ("", False), ("fast", False), ("reference", True)],
)
def test_the_variable_chooses(value, reference):
    environment = {k: v for k, v in os.environ.items() if k != switch.VARIABLE}
    if value is not None:
        environment[switch.VARIABLE] = value
    code = "from polyad.model.kernels import switch; print(switch.REFERENCE)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{reference}\n"


@pytest.mark.slow
def test_another_value_is_one_line_and_exit_status_2():
    done = subprocess.run(
        [sys.executable, "-m", "polyad.launch", "validate", "configs/quickstart/gpt2.yaml"],
        env=os.environ | {switch.VARIABLE: "quick"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    line = "polyad: error: POLYAD_KERNELS: 'quick' is not allowed: fast, reference\n"
    assert done.stderr == line
