"""Kernels that no GPU has measured, against definitions in float64: see the README beside this.

They run on the GPU, or by Triton's interpreter. Of products in bf16, which that has none of, fp16
stands in the place.
"""

import math
from pathlib import Path

import pytest
import torch

from polyad.model.kernels import rows as ours
from polyad.model.kernels.entmax import above_threshold
from polyad.model.kernels.grouped import INTERPRETED
from tests.helpers.machine_code import compiled_for

pytest.importorskip("triton", reason="triton is not installed")
from tests.benchmarks.kernels import entmax, rows

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3}
if DEVICE == "cuda":
    TOLERANCES[torch.bfloat16] = 0.02
TOKENS, TOP_K, WIDTH = 23, 3, 40


def assert_near(actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert (actual.double().cpu() - exact).norm() <= TOLERANCES[dtype] * exact.norm()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", [WIDTH, rows.WIDTH + 8])
def test_sums_of_rows_and_their_gradients_are_the_definitions(
    dtype: torch.dtype, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows_MD = torch.randn(TOKENS * TOP_K, width, generator=generator).to(dtype)
    weights_NK = torch.rand(TOKENS, TOP_K, generator=generator).to(dtype)
    gradient_ND = torch.randn(TOKENS, width, generator=generator).to(dtype)
    row_A = torch.randperm(TOKENS * TOP_K, generator=generator)
    assignment_M = row_A.argsort()
    exact = [x.double().requires_grad_() for x in (rows_MD, weights_NK)]
    sum_ND = ours.combine_by_definition(*exact, assignment_M, row_A)
    for_rows_MD, for_weights_NK = torch.autograd.grad(sum_ND, exact, gradient_ND.double())
    row_NK = row_A.view_as(weights_NK)
    here = [x.to(DEVICE) for x in (rows_MD, row_NK, weights_NK, gradient_ND, assignment_M)]
    assert_near(rows.sum_rows(*here[:3]), sum_ND.detach(), dtype)
    plain_ND = rows_MD.double()[row_A].view(TOKENS, TOP_K, width).sum(1)
    assert_near(rows.sum_rows(*here[:2], None), plain_ND, dtype)
    found = rows.spread_rows(here[3], here[0], here[2], here[4])
    assert_near(found[0], for_rows_MD, dtype)
    assert_near(found[1], for_weights_NK, dtype)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 1), (7, 5), (130, 64), (3, 3000)])
def test_the_root_of_entmax_is_that_of_newtons_steps_one_by_one(tokens: int, experts: int) -> None:
    scores_MN = 3 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(1))
    x_MN = scores_MN - scores_MN.amax(-1, keepdim=True)
    steps = math.ceil(math.log(experts / torch.finfo(torch.float32).eps, 4))
    found_MN = entmax.entmax_root(x_MN.to(DEVICE), steps).cpu()
    exact_MN = above_threshold(x_MN.double())
    torch.testing.assert_close(found_MN.double(), exact_MN, atol=3e-6, rtol=1e-5)
    assert torch.equal(found_MN == 0, exact_MN == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared"), [(80, 163), (90, 227)])
def test_they_become_machine_code_of_an_a100_and_an_h100(
    capability: int, shared: int, tmp_path: Path
) -> None:
    found = compiled_for(capability, tmp_path, "rows")
    assert len(found) == 5
    for name, about in found.items():
        assert about["shared_bytes"] <= shared * 1024, name  # of a block, by CUDA's tables
        assert not about["tensor_cores"], name
