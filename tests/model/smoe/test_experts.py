"""Experts: the loop is the reference, by hand; the grouped product is compared with it.

Shapes: M rows, E experts, D width, F inner width.
"""

from contextlib import nullcontext

import pytest
import torch

from polyad.model.build import build_model, initial_value, initial_values
from polyad.model.kernels import grouped as kernels
from polyad.model.kernels.grouped import by_products
from polyad.model.smoe.experts import Experts
from tests.helpers.definitions import by_definition
from tests.helpers.everyday import everyday
from tests.helpers.routing import make, make_config, make_context

COUNTS = {
    "even": [4, 4, 4, 4],
    "empty experts": [0, 5, 0, 3],
    "all to one": [0, 0, 9, 0],
    "one row": [0, 1, 0, 0],
    "many": [1, 200, 17, 40],
    "no rows": [0, 0, 0, 0],
}
every_count = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


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
    return lambda rows_MD, counts_E: by_products(rows_MD, experts.stacked(), counts_E)


def run(kind, counts, bias, dtype, inner=24):
    """Output and gradients, in float64, of one and the same experts and rows in a precision.

    `device` is the grouped product of a GPU, on this processor.
    """
    config = make_config(num_experts=4, expert_hidden_size=inner)
    experts = make(Experts, config, make_context(hidden_size=16, bias=bias), dtype)
    rows_MD = torch.randn(sum(counts), 16, generator=torch.Generator().manual_seed(3))
    rows_MD = rows_MD.to(dtype).requires_grad_()
    compute = on_device(experts) if kind == "device" else experts
    with by_definition() if kind == "loop" else nullcontext():
        output_MD = compute(rows_MD, torch.tensor(counts))
    weights = torch.randn(output_MD.shape, generator=torch.Generator().manual_seed(4))
    output_MD.backward(weights.to(dtype))
    named = {"rows": rows_MD, **dict(experts.named_parameters())}
    results = {name: tensor.grad.double() for name, tensor in named.items()}
    return {"output": output_MD.detach().double()} | results


@every_count
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 0.02)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["grouped", "device"])
def test_grouped_equals_loop(counts, bias, dtype, tolerance, kind):
    loop, grouped = (run(kind, counts, bias, dtype) for kind in ("loop", kind))
    assert set(loop) == {"output", "rows", "up", "down"} | ({"up_bias"} if bias else set())
    for name, value in loop.items():
        scale = max(1.0, value.abs().max().item() if value.numel() else 0.0)
        assert (grouped[name] - value).abs().le(tolerance * scale).all(), name


@everyday(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 0.02)],
    keep=[(torch.bfloat16, 0.02)],
)
def test_grouped_products_of_a_device_are_traced_whole(dtype, tolerance):
    # In bf16 PyTorch's own grouped product is called, in fp32 one that says what comes out.
    config = make_config(num_experts=4, expert_hidden_size=24)
    experts = make(Experts, config, make_context(hidden_size=16), dtype)
    rows_MD, counts_E = torch.randn(9, 16).to(dtype), torch.tensor([4, 0, 2, 3])
    compiled = torch.compile(on_device(experts), backend="aot_eager", fullgraph=True)
    results = []
    for compute in (on_device(experts), compiled):
        output_MD = compute(rows_MD, counts_E)
        (gradient,) = torch.autograd.grad(output_MD.square().mean(), experts.up)
        results.append((output_MD, gradient))
    torch.testing.assert_close(results[1], results[0], atol=tolerance, rtol=tolerance)


@every_count
@pytest.mark.parametrize("kind", ["loop", "grouped", "device"])
def test_an_expert_without_rows_gets_a_gradient_of_zeros(counts, kind):
    results = run(kind, counts, True, torch.float32)
    for name in ("up", "up_bias", "down"):
        busy = results[name].flatten(1).abs().amax(1) > 0
        assert busy.tolist() == [count > 0 for count in counts], name


def test_on_a_processor_a_row_and_its_inner_units_are_kept_for_backward():
    experts = make(Experts, make_config(num_experts=4), make_context(), torch.float32)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output_MD = experts(torch.randn(9, 12), torch.tensor([4, 0, 2, 3]))
    assert output_MD.requires_grad
    parameters = {id(parameter) for parameter in experts.parameters()}
    others = [tuple(tensor.shape) for tensor in kept if id(tensor) not in parameters]
    assert sorted(others) == [(4,), (9, 10), (9, 12)]


def test_float64_goes_through_the_loop_on_a_device():
    grouped, loop = (run(kind, [3, 0, 2, 4], True, torch.float64) for kind in ("device", "loop"))
    for name, value in loop.items():
        torch.testing.assert_close(grouped[name], value, atol=1e-12, rtol=1e-12)


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
    for name, value in run("loop", counts, True, dtype, inner).items():
        torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-5)


def test_initial_values_of_an_expert_depend_on_seed_name_and_expert_alone(small_config):
    def built(**options):
        return build_model(small_config(feed_forward={"kind": "smoe", **options}))

    model, more = built(num_experts=4), built(num_experts=8)
    name = "blocks.1.feed_forward.experts.up"
    value = initial_value(model, name, seed=3)
    assert value.shape == (4, 32, 128)
    assert torch.equal(initial_value(more, name, seed=3)[:4], value)
    assert torch.equal(initial_value(more, name, seed=3, experts=[3, 1]), value[[3, 1]])
    for other in (
        initial_value(model, name, seed=4)[0],
        initial_value(model, name.replace("1", "2"), seed=3)[0],
        value[1],
    ):
        assert not torch.equal(other, value[0])


@pytest.mark.parametrize("scaled", [True, False])
def test_initial_statistics_are_those_of_the_dense_feed_forward(small_config, scaled):
    section = {"kind": "smoe", "num_experts": 16, "scale_residual_init": scaled}
    config = small_config(feed_forward=section)
    branches = 6 if scaled else 1  # 2 L
    for name, value in initial_values(build_model(config), seed=0):
        if name.endswith("bias"):
            assert not value.any(), name
        elif "feed_forward.experts" in name or "router" in name:
            std = 0.02 / branches**0.5 if name.endswith("down") else 0.02
            error = std / value.numel() ** 0.5
            assert abs(value.mean()) < 5 * error, name
            assert abs(value.std() - std) < 5 * error, name
