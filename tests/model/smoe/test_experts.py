"""Experts: the loop is the reference, by hand; the grouped product is compared with it.

Shapes: M rows, E experts, D width, F inner width.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from polyad.model.kernels import cpu_experts as on_cpu
from polyad.model.kernels import grouped as kernels
from polyad.model.smoe.experts import Experts
from tests.helpers.allocated import saved_bytes
from tests.helpers.definitions import by_definition, by_products
from tests.helpers.routing import make, make_config, make_context

COUNTS = {
    "even": [4, 4, 4, 4],
    "empty experts": [0, 5, 0, 3],
    "all to one": [0, 0, 9, 0],
    "one row": [0, 1, 0, 0],
    "many": [1, 200, 17, 40],
    "no rows": [0, 0, 0, 0],
}


def test_experts_equal_numbers_worked_out_by_hand():
    # Width 2, inner width 1. Expert 0: up (1, 2), bias 0.5, down (3, -1); for (1, -0.5) as in the
    # dense feed-forward: h = gelu(0.5) = 0.3457144, (1.0371433, -0.3457144). Expert 1: up (0, 1),
    # no bias, down (2, 0); for (9, 1): gelu(1) = 0.5 (1 + tanh(0.7978846 x 1.044715)) = 0.8411920.
    config = make_config(num_experts=2, expert_hidden_size=1)
    experts = make(Experts, config, make_context(hidden_size=2))
    with torch.no_grad():
        experts.up.copy_(torch.tensor([[[1.0], [2.0]], [[0.0], [1.0]]]))
        experts.up_bias.copy_(torch.tensor([[0.5], [0.0]]))
        experts.down.copy_(torch.tensor([[[3.0, -1.0]], [[2.0, 0.0]]]))
    rows_MD = torch.tensor([[1.0, -0.5], [9.0, 1.0]], dtype=torch.float64)
    output_MD = experts(rows_MD, torch.tensor([1, 1]))
    expected = torch.tensor([[1.0371433, -0.3457144], [1.6823840, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(output_MD, expected, atol=2e-6, rtol=0)


def on_device(experts):
    """The grouped product of a GPU, on this processor."""

    def compute(rows_MD, counts_E):
        with by_products():
            return experts(rows_MD, counts_E)

    return compute


def run(kind, counts, bias, dtype, inner=24):
    """Output and gradients, in float64, of one and the same experts and rows in a precision.

    `device` is the grouped product of a GPU, on this processor. There are three rows after those of
    the last expert, whose outputs have no meaning.
    """
    config = make_config(num_experts=4, expert_hidden_size=inner)
    experts = make(Experts, config, make_context(hidden_size=16, bias=bias), dtype)
    rows_MD = torch.randn(sum(counts) + 3, 16, generator=torch.Generator().manual_seed(3))
    rows_MD = rows_MD.to(dtype).requires_grad_()
    compute = on_device(experts) if kind == "device" else experts
    with by_definition() if kind == "loop" else nullcontext():
        output_MD = compute(rows_MD, torch.tensor(counts))[:-3]
    weights = torch.randn(output_MD.shape, generator=torch.Generator().manual_seed(4))
    output_MD.backward(weights.to(dtype))
    results = {"output": output_MD.detach(), "rows": rows_MD.grad[:-3]}
    results |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {name: value.double() for name, value in results.items()}


@contextmanager
def memory_of_nan():
    """New memory is NaN: nothing may be read that was not written."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 0.02)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["cpu", "cpu without the library", "device"])
def test_experts_equal_the_loop(counts, bias, dtype, tolerance, kind, monkeypatch):
    loop = run("loop", counts, bias, dtype)
    if kind == "cpu without the library":
        monkeypatch.setattr(on_cpu, "_LIBRARY", None)
    with memory_of_nan():
        ours = run(kind, counts, bias, dtype)
    assert set(loop) == {"output", "rows", "up", "down"} | ({"up_bias"} if bias else set())
    for name, value in loop.items():
        scale = max(1.0, value.abs().max().item() if value.numel() else 0.0)
        assert (ours[name] - value).abs().le(tolerance * scale).all(), name
        if name not in ("output", "rows"):  # an expert without rows has a gradient of zeros
            busy = ours[name].flatten(1).abs().amax(1) > 0
            assert busy.tolist() == [count > 0 for count in counts], name


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gate_stacked_with_its_layer_gives_what_both_give(counts, activation, bias):
    config = make_config(num_experts=4, expert_hidden_size=24, activation=activation)
    experts = make(Experts, config, make_context(hidden_size=16, bias=bias))
    rows_MD = torch.randn(sum(counts), 16, dtype=torch.float64, requires_grad=True)
    named = dict(experts.named_parameters())
    values = [rows_MD, *named.values()]

    def outputs_and_gradients():
        output_MD = experts(rows_MD, torch.tensor(counts))
        return output_MD, *torch.autograd.grad(output_MD.square().sum(), values)

    apart = outputs_and_gradients()
    stacked_ED2F = torch.stack((named["gate"], named["up"]), 2)
    del experts.gate, experts.up
    experts.gate, experts.up = None, stacked_ED2F
    torch.testing.assert_close(outputs_and_gradients(), apart, atol=1e-13, rtol=1e-13)


def test_on_a_processor_a_row_and_its_inner_units_are_kept_for_backward():
    experts = make(Experts, make_config(num_experts=4), make_context(), torch.float32)
    rows_MD, counts_E = torch.randn(9, 12), torch.tensor([4, 0, 2, 3])
    kept = saved_bytes(lambda: experts(rows_MD, counts_E), experts.parameters())
    assert kept == 8 * 4 + 4 * (9 * 10 + 9 * 12)


@pytest.mark.parametrize(
    ("dtype", "inner", "grouped"),
    [(torch.float32, 12, True), (torch.float32, 10, False), (torch.bfloat16, 12, False)],
    ids=str,
)
def test_rows_that_are_no_whole_16_bytes_go_through_the_loop_on_a_device(
    dtype, inner, grouped, monkeypatch
):
    counts, products = [3, 0, 2, 4], []

    def grouped_mm(a, b, offs):
        products.append((*a.stride(), *b.stride()))
        return torch.nn.functional.grouped_mm(a, b, offs=offs)

    monkeypatch.setattr(kernels, "grouped_mm", grouped_mm)
    ours = run("device", counts, True, dtype, inner)
    sizes = {dtype.itemsize * stride for strides in products for stride in strides if stride > 1}
    assert not any(size % 16 for size in sizes)
    # Two layers and a bias: 2 products forward, 5 backward.
    assert len(products) == (7 if grouped else 1)
    loop = run("loop", counts, True, dtype, inner)
    torch.testing.assert_close(ours, loop, atol=1e-5, rtol=1e-5)
