"""Experts on a CPU: rows padded to few numbers, as in bf16, change no result.

Shapes: M rows, E experts, D width, F inner width.
"""

import itertools
import random

import pytest
import torch

from polyad.model.kernels.cpu import experts as cpu
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.experts import Experts
from tests.helpers.routing import make, make_config, make_context

COUNTS = [
    [9, 17, 33, 70],
    [100, 1, 1, 1],  # what the first reads and writes are the rows of all others
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
def test_padding_and_threads_change_no_output_and_no_gradient(counts, threads, monkeypatch):
    expected = run(counts, "loop")
    monkeypatch.setattr(cpu, "_pads", lambda dtype: True)
    monkeypatch.setattr(cpu, "SHARED_NUMBERS", 0)
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


def test_without_a_bias_nothing_else_changes(threads, monkeypatch):
    context = make_context(hidden_size=16, bias=False)
    config: SparseMoEConfig = make_config(num_experts=3, expert_hidden_size=24)
    monkeypatch.setattr(cpu, "_pads", lambda dtype: True)
    monkeypatch.setattr(cpu, "SHARED_NUMBERS", 0)
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


def test_few_numbers_of_rows_are_multiplied_and_little_is_added():
    padded = {count: cpu._padded(count) for count in range(1, 4096)}
    assert all(0 <= to - count < min(32, max(1, count / 8)) for count, to in padded.items())
    # Each is a program in 6 products; oneDNN keeps 1,024 programs.
    assert len(set(padded.values())) == 168


def test_inner_rows_have_room_however_rows_are_spread(monkeypatch):
    monkeypatch.setattr(cpu, "_pads", lambda dtype: True)
    generator = random.Random(0)
    for experts, rows in itertools.product((1, 4, 64), (0, 3, 100, 5000)):
        room = cpu._most_padded(torch.empty(rows, 1), torch.empty(experts, 1, 1))
        for _ in range(20):
            cuts = sorted(generator.randint(0, rows) for _ in range(experts - 1))
            counts = [b - a for a, b in itertools.pairwise([0, *cuts, rows])]
            spans = cpu._spans(torch.tensor(counts), torch.bfloat16)
            assert (spans[-1].first + spans[-1].padded if spans else 0) <= room


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_bf16_is_padded(dtype):
    assert not cpu._pads(dtype)
    assert [span.padded for span in cpu._spans(torch.tensor([33, 0, 70]), dtype)] == [33, 70]
