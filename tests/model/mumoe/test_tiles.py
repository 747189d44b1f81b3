"""Products in the arrangement for a processor with tiles: the same sums, on every processor."""

import itertools

import pytest
import torch

from model.mumoe import tiles
from model.mumoe.products import affine, product, token_product

SIZES = (20, 32, 40, 105, 260)
"""Below a tile, whole tiles, and with a rest; some more than twice as wide as others."""


@pytest.fixture(params=["plain", "whole tiles", "pieces"])
def arrangement(request, monkeypatch):
    monkeypatch.setattr(tiles, "_is_tiled", lambda _: request.param != "plain")
    monkeypatch.setattr(tiles, "LARGE", 9 * 40 * 40 if request.param == "pieces" else 2**28)
    monkeypatch.setattr(tiles, "PIECE", 24)
    monkeypatch.setattr(tiles, "ROWS", 30)


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.usefixtures("arrangement")
@pytest.mark.parametrize(("rows", "columns"), list(itertools.product(SIZES, SIZES)))
def test_each_product_is_the_plain_one(rows, columns):
    a_MI, b_IC, c_MC, bias_C = random(9, rows), random(rows, columns), random(9, columns), random(1)
    bias_C = bias_C.expand(columns)
    close = {"atol": 1e-12, "rtol": 1e-12}
    torch.testing.assert_close(tiles.matmul(a_MI, b_IC), a_MI @ b_IC, **close)
    flipped_CI = b_IC.t().contiguous()
    torch.testing.assert_close(tiles.matmul(a_MI, flipped_CI.t()), a_MI @ b_IC, **close)
    torch.testing.assert_close(tiles.addmm(bias_C, a_MI, b_IC), a_MI @ b_IC + bias_C, **close)
    whole = torch.full((rows + 1, columns), 7.0, dtype=torch.float64)
    tiles.transposed_matmul(a_MI, c_MC, whole[:rows])
    torch.testing.assert_close(whole[:rows], a_MI.t() @ c_MC, **close)
    assert (whole[rows] == 7).all()


@pytest.mark.usefixtures("arrangement")
@pytest.mark.parametrize("activated", [False, True])
def test_gradients_are_numerical_ones(activated):
    z_MI, factor, out_CO = random(3, 70), random(71, 34), random(34, 69)
    operands = [tensor.requires_grad_() for tensor in (z_MI, factor, out_CO)]

    def layer(z_MI, factor, out_CO):
        return product(affine(z_MI, factor, bias=True, activated=activated), out_CO)

    assert torch.autograd.gradcheck(layer, operands, fast_mode=True)


def test_each_tokens_own_product_has_autograds_gradients():
    operands = [random(5, 4, 3).requires_grad_(), random(5, 3, 7).requires_grad_()]
    torch.testing.assert_close(token_product(*operands), operands[0] @ operands[1])
    assert torch.autograd.gradcheck(token_product, operands)


@pytest.mark.parametrize("shape", [(256, 300, 140), (128, 3072, 552), (200, 768, 588)])
def test_in_bf16_no_number_is_further_off_than_its_rounding(shape):
    tokens, rows, columns = shape
    a_MI, b_IC = random(tokens, rows).bfloat16(), random(rows, columns).bfloat16()
    c_MC = random(tokens, columns).bfloat16()
    out_IC = torch.empty_like(b_IC)
    tiles.transposed_matmul(a_MI, c_MC, out_IC)
    pairs = [
        (tiles.matmul(a_MI, b_IC), a_MI.double() @ b_IC.double()),
        (tiles.addmm(c_MC[0], a_MI, b_IC), a_MI.double() @ b_IC.double() + c_MC[0].double()),
        (out_IC, a_MI.double().t() @ c_MC.double()),
    ]
    for ours, exact in pairs:  # sums in fp32, rounded once
        torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-3)
