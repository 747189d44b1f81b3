"""Products in tiles of bf16 against exact ones, for shapes that are no whole tiles.

Shapes: M rows, K summands, N columns.
"""

import itertools

import pytest
import torch

from model import matmul as module
from model.matmul import FEWEST, has_native_matmul, matmul

native = pytest.mark.skipif(
    not has_native_matmul(),
    reason="this processor has no tiles of bf16, or no C compiler was there at installation",
)
SHAPES = [
    (32, 32, 32),  # one block
    (33, 45, 70),  # a row, 13 summands and 6 columns more than whole ones
    (47, 577, 40),  # more summands than go at once, by one
    (95, 64, 385),  # more columns than are side by side at once
    (545, 1200, 97),  # several goes, and more rows than wait
]
LAYOUTS = list(itertools.product([False, True], repeat=2))


@pytest.fixture
def _every_size(monkeypatch):
    """The library takes small products, too."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "SMALL", 0)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def factors(shape, turned, make=torch.randn):
    """a [M, K] and b [K, N] in bf16, some of them transposed views."""
    rows, depth, columns = shape
    a = make(depth, rows).bfloat16().t() if turned[0] else make(rows, depth).bfloat16()
    b = make(columns, depth).bfloat16().t() if turned[1] else make(depth, columns).bfloat16()
    return a, b


def signs(*shape):
    """-1, 0 or 1, four of five 0: sums that bf16 holds exactly."""
    return torch.randint(-2, 3, shape).div(2).trunc() * (torch.rand(shape) < 0.5)


@native
@pytest.mark.usefixtures("_every_size")
@pytest.mark.parametrize("turned", LAYOUTS, ids=["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_numbers_are_exact_with_any_threads(shape, turned, threads):
    a_MK, b_KN = factors(shape, turned, signs)
    row_N = torch.randint(-20, 20, shape[2:]).bfloat16()
    exact_MN = a_MK.long() @ b_KN.long()
    assert exact_MN.abs().max() < 200  # with the row below 256, from where on bf16 rounds
    assert module._takes(a_MK, b_KN, row_N, None)
    for count in (1, 2, 5):
        threads(count)
        assert torch.equal(matmul(a_MK, b_KN).long(), exact_MN)
        assert torch.equal(matmul(a_MK, b_KN, row_N=row_N).long(), exact_MN + row_N.long())


@native
@pytest.mark.usefixtures("_every_size")
@pytest.mark.parametrize("turned", LAYOUTS, ids=["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", [*SHAPES, (128, 3072, 552)], ids=str)
def test_no_number_is_further_off_than_its_rounding(shape, turned, threads):
    a_MK, b_KN = factors(shape, turned)
    row_N = torch.randn(shape[2]).bfloat16()
    exact_MN = a_MK.double() @ b_KN.double() + row_N.double()
    ours_MN = matmul(a_MK, b_KN, row_N=row_N)
    # Summed in fp32, rounded once: half a unit of 8 places.
    slack = 1e-6 * (a_MK.double().abs() @ b_KN.double().abs()).max().item()
    torch.testing.assert_close(ours_MN.double(), exact_MN, rtol=2**-8, atol=slack)
    threads(3)
    assert torch.equal(matmul(a_MK, b_KN, row_N=row_N), ours_MN)


@native
@pytest.mark.usefixtures("_every_size")
def test_nothing_is_written_beside_the_result():
    a_MK, b_KN = factors((50, 40, 70), (False, False))
    whole = torch.full((52, 80), 7.0).bfloat16()
    result = matmul(a_MK, b_KN, out_MN=whole[1:51, 4:74])
    assert result.data_ptr() == whole[1:, 4:].data_ptr()
    assert torch.equal(whole[1:51, 4:74], matmul(a_MK, b_KN))
    whole[1:51, 4:74] = 7
    assert (whole == 7).all()


@native
@pytest.mark.usefixtures("_every_size")
@pytest.mark.parametrize("turned", LAYOUTS, ids=["nn", "nt", "tn", "tt"])
def test_what_is_read_lies_in_the_factors(turned):
    """Around them is what is no number; it would be seen, times zero, too."""
    a_MK, b_KN = factors((45, 37, 41), turned)

    def surrounded(matrix):
        whole = torch.full([size + 64 for size in matrix.shape], torch.nan).bfloat16()
        whole = whole.t().contiguous().t() if matrix.stride(0) == 1 else whole
        inside = whole[32:-32, 32:-32]
        inside.copy_(matrix)
        return inside

    assert torch.equal(matmul(surrounded(a_MK), surrounded(b_KN)), matmul(a_MK, b_KN))


@native
@pytest.mark.usefixtures("_every_size")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_stays_where_it_belongs(bad):
    a_MK, b_KN = factors((45, 70, 41), (False, False))
    expected_MN = matmul(a_MK, b_KN)
    a_MK[40, 69] = bad
    result_MN = matmul(a_MK, b_KN)
    assert not result_MN[40].isfinite().any()
    others = torch.arange(45) != 40
    assert torch.equal(result_MN[others], expected_MN[others])


@native
def test_the_library_is_asked_for_large_products_in_bf16_alone():
    a_MK, b_KN = factors((512, 768, 552), (False, False))
    assert module._takes(a_MK, b_KN, None, None)
    assert module._takes(a_MK, b_KN, b_KN[0], torch.empty(512, 552).bfloat16())
    assert not module._takes(a_MK[:64], b_KN[:, :64], None, None)  # small
    assert not module._takes(a_MK[: FEWEST - 1], b_KN, None, None)
    assert not module._takes(a_MK.float(), b_KN.float(), None, None)
    assert not module._takes(a_MK[:1].expand(512, -1), b_KN, None, None)  # rows overlap
    assert not module._takes(a_MK, b_KN, b_KN[:1, 0].expand(552), None)
    # Many rows of short sums; with long ones, or turned, as many are taken.
    many_MK = a_MK.repeat(8, 1)
    assert module._takes(many_MK, b_KN, None, None)
    assert not module._takes(many_MK, b_KN.repeat(1, 2), None, None)
    assert module._takes(
        a_MK.repeat(1, 8).t(), factors((1, 512, 3072), (False, False))[1], None, None
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_elsewhere_products_are_pytorchs(dtype, monkeypatch):
    monkeypatch.setattr(module, "_library", lambda: None)
    a_MK, b_KN, row_N = (torch.randn(s).to(dtype) for s in ((512, 96), (96, 512), (512,)))
    assert torch.equal(matmul(a_MK, b_KN), a_MK @ b_KN)
    assert torch.equal(matmul(a_MK, b_KN, row_N=row_N), torch.addmm(row_N, a_MK, b_KN))
    out_MN = torch.empty(512, 512, dtype=dtype)
    assert matmul(a_MK, b_KN, out_MN=out_MN) is out_MN
    assert torch.equal(out_MN, a_MK @ b_KN)
