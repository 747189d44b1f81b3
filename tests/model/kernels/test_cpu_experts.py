"""Experts on a CPU are the loop over experts, however rows are spread.

Shapes: M rows, E experts, D width, F inner width.
"""

import pytest
import torch

from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.experts import Experts
from tests.helpers.routing import make, make_config, make_context

COUNTS = [
    [9, 17, 33, 70],
    [100, 1, 1, 1],
    [0, 40, 0, 19],
    [31, 0, 0, 0],
    [1, 2, 3, 300],
    [0, 0, 0, 0],
]


def run(counts, kind, *, width=16, inner=24):
    config: SparseMoEConfig = make_config(
        num_experts=len(counts), expert_hidden_size=inner, experts=kind
    )
    experts = make(Experts, config, make_context(hidden_size=width), torch.float64)
    rows_MD = torch.randn(sum(counts), width, generator=torch.Generator().manual_seed(3))
    rows_MD = rows_MD.double().requires_grad_()
    output_MD = experts(rows_MD, torch.tensor(counts))
    assert output_MD.shape == rows_MD.shape
    weights = torch.randn(output_MD.shape, generator=torch.Generator().manual_seed(4))
    output_MD.backward(weights.double())
    gradients = {name: p.grad for name, p in experts.named_parameters()}
    return {"output": output_MD.detach(), "rows": rows_MD.grad} | gradients


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_outputs_and_gradients_are_those_of_the_loop(counts):
    expected = run(counts, "loop")
    # New memory is NaN: nothing may be read that was not written.
    with _filled_memory():
        actual = run(counts, "grouped")
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], atol=1e-12, rtol=1e-10, msg=name)


class _filled_memory:
    def __enter__(self):
        self.before = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_):
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = self.before


def test_without_a_bias_nothing_else_changes():
    context = make_context(hidden_size=16, bias=False)
    config: SparseMoEConfig = make_config(num_experts=3, expert_hidden_size=24)
    results = []
    for kind in ("loop", "grouped"):
        experts = make(Experts, config.model_copy(update={"experts": kind}), context, torch.float64)
        rows_MD = torch.randn(50, 16, generator=torch.Generator().manual_seed(3)).double()
        rows_MD.requires_grad_()
        experts(rows_MD, torch.tensor([9, 34, 7])).square().sum().backward()
        results.append([rows_MD.grad, experts.up.grad, experts.down.grad])
        assert experts.up_bias is None
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=1e-10)


def test_memory_is_filled_with_nan_in_that_test():
    with _filled_memory():
        assert torch.empty(3, dtype=torch.float64).isnan().all()
