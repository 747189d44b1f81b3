"""Grouped products in Triton against definitions in float64: on the GPU, or by its interpreter.

Of products in bf16, which the interpreter has none of, fp16 stands in the place.
"""

import pytest
import torch

from polyad.model.kernels import switch
from polyad.model.kernels.grouped import INTERPRETED
from tests.helpers.everyday import everyday
from tests.helpers.machine_code import compiled_for
from tests.model.kernels.test_kernels import OPERATIONS, with_gradients

pytest.importorskip("triton", reason="triton is not installed")
from polyad.model.kernels import grouped_triton

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3}
if DEVICE == "cuda":
    TOLERANCES[torch.bfloat16] = 0.02
every_precision = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(autouse=True)
def _chosen(monkeypatch):
    monkeypatch.setattr(switch, "TRITON", True)


def assert_near(actual, exact, dtype):
    assert actual.dtype == dtype
    assert (actual.double().cpu() - exact).norm() <= TOLERANCES[dtype] * exact.norm().clamp_min(
        1e-3
    )


@every_precision
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name.startswith("experts")])
def test_outputs_and_gradients_are_the_definitions(name, dtype, monkeypatch):
    called, product = [], grouped_triton.grouped_mm
    monkeypatch.setattr(
        grouped_triton, "grouped_mm", lambda *given: called.append(1) or product(*given)
    )
    compute, definition, inputs = OPERATIONS[name]
    inputs = [x.to(dtype).double() for x in inputs]
    exact = with_gradients(definition, inputs, torch.float64)
    ours = with_gradients(compute, [x.to(DEVICE) for x in inputs], dtype)
    for mine, other in zip(ours, exact, strict=True):
        assert_near(mine, other, dtype)
    assert called


SIZES = [[5, 0, 9, 3], [0, 0, 17, 0], [130, 1, 0, 256], [1] * 40, [0, 0]]


@every_precision
@everyday(
    "counts",
    SIZES,
    keep=["4 of 17", "4 of 387", "2 of 0"],
    ids=lambda counts: f"{len(counts)} of {sum(counts)}",
)
@pytest.mark.parametrize("spare", [0, 7])
def test_groups_of_any_sizes_are_products_one_by_one(counts, spare, dtype):
    generator = torch.Generator().manual_seed(0)
    rows_here, groups = sum(counts), len(counts)
    a_MD = torch.randn(rows_here + spare, 24, generator=generator).to(dtype)
    b_EDF = torch.randn(groups, 24, 40, generator=generator).to(dtype)
    g_MF = torch.randn(rows_here + spare, 40, generator=generator).to(dtype)
    a_MD[rows_here:] = g_MF[rows_here:] = torch.nan  # nobody's
    offsets_E = torch.tensor(counts).cumsum(0).to(torch.int32)
    split = [x[:rows_here].double().split(counts) for x in (a_MD, g_MF)]
    forward = [a @ b.double() for a, b in zip(split[0], b_EDF, strict=True)]
    back = [g @ b.double().t() for g, b in zip(split[1], b_EDF, strict=True)]
    outer = [a.t() @ g for a, g in zip(*split, strict=True)]
    a_MD, b_EDF, g_MF, offsets_E = (x.to(DEVICE) for x in (a_MD, b_EDF, g_MF, offsets_E))
    for actual, exact in (
        (grouped_triton.grouped_mm(a_MD, b_EDF, offsets_E)[:rows_here], torch.cat(forward)),
        (grouped_triton.grouped_mm(g_MF, b_EDF.mT, offsets_E)[:rows_here], torch.cat(back)),
        (grouped_triton.grouped_mm(a_MD.t(), g_MF, offsets_E), torch.stack(outer)),
    ):
        assert_near(actual, exact, dtype)


@pytest.mark.slow
def test_a_compiler_traces_them_whole():
    compute, _, inputs = OPERATIONS["experts"]
    inputs = [x.to(DEVICE) for x in inputs]
    torch._dynamo.reset()
    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    plain = with_gradients(compute, inputs, torch.float32)
    torch.testing.assert_close(with_gradients(compiled, inputs, torch.float32), plain)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared"), [(80, 163), (90, 227)])
def test_they_become_machine_code_of_an_a100_and_an_h100(capability, shared, tmp_path):
    found = compiled_for(capability, tmp_path, "products")
    assert len(found) == 4
    for name, about in found.items():
        assert about["shared_bytes"] <= shared * 1024, name  # of a block, by CUDA's tables
        assert about["tensor_cores"] == name.endswith("bf16"), name
