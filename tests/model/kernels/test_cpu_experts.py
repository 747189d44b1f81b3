"""Experts on a CPU are the loop over experts, however rows are spread.

Shapes: M rows, E experts, D width, F inner width.
"""

from contextlib import nullcontext

import pytest
import torch

from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.experts import Experts
from tests.helpers.definitions import by_definition
from tests.helpers.routing import make, make_config, make_context

COUNTS = [
    [9, 17, 33, 70],
    [100, 1, 1, 1],
    [0, 40, 0, 19],
    [31, 0, 0, 0],
    [1, 2, 3, 300],
    [0, 0, 0, 0],
]


def run(counts, *, bias=True, context=None):
    config: SparseMoEConfig = make_config(num_experts=len(counts), expert_hidden_size=24)
    experts = make(Experts, config, make_context(hidden_size=16, bias=bias), torch.float32)
    rows_MD = torch.randn(sum(counts), 16, generator=torch.Generator().manual_seed(3))
    rows_MD.requires_grad_()
    with context or nullcontext():
        output_MD = experts(rows_MD, torch.tensor(counts))
    assert output_MD.shape == rows_MD.shape
    weights = torch.randn(output_MD.shape, generator=torch.Generator().manual_seed(4))
    output_MD.backward(weights)
    gradients = {name: p.grad for name, p in experts.named_parameters()}
    return {"output": output_MD.detach(), "rows": rows_MD.grad} | gradients


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_outputs_and_gradients_are_those_of_the_loop(counts):
    expected = run(counts, context=by_definition())
    # New memory is NaN: nothing may be read that was not written.
    with _filled_memory():
        actual = run(counts)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], atol=2e-5, rtol=2e-5, msg=name)


class _filled_memory:
    def __enter__(self):
        self.before = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_):
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = self.before


def test_without_a_bias_nothing_else_changes():
    counts = [9, 34, 7]
    ours, expected = run(counts, bias=False), run(counts, bias=False, context=by_definition())
    assert ours.keys() == {"output", "rows", "up", "down"}
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


def test_memory_is_filled_with_nan_in_that_test():
    with _filled_memory():
        assert torch.empty(3, dtype=torch.float64).isnan().all()
