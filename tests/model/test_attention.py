import pytest
import torch

from polyad.model.attention import SelfAttention
from tests.helpers.allocated import Allocated
from tests.helpers.routing import make_context


@pytest.fixture
def attention():
    torch.manual_seed(0)
    return SelfAttention(make_context(hidden_size=24))


def test_trace_is_handed_out_only_when_asked(attention):
    x_BTD = torch.randn(2, 5, 24)
    y_BTD, nothing = attention(x_BTD)
    same_BTD, trace = attention(x_BTD, traced_head=torch.tensor([1]))
    assert nothing is None
    assert torch.equal(trace.of_head_BT3H, trace.qkv_BT3AH[:, :, :, 1])
    assert [t.shape for t in (trace.q_BATH, trace.k_BATH, trace.v_BATH)] == [(2, 3, 5, 8)] * 3
    assert torch.equal(y_BTD, same_BTD)


def test_output_equals_attention_written_out(attention):
    x_BTD = torch.randn(2, 5, 24)
    y_BTD, trace = attention(x_BTD, traced_head=torch.tensor([1]))
    scores_BATT = trace.q_BATH @ trace.k_BATH.transpose(-1, -2) / 8**0.5
    future_TT = torch.ones(5, 5, dtype=torch.bool).triu(1)
    weights_BATT = scores_BATT.masked_fill(future_TT, -torch.inf).softmax(-1)
    heads_BTD = (weights_BATT @ trace.v_BATH).transpose(1, 2).flatten(2)
    torch.testing.assert_close(y_BTD, attention.projection(heads_BTD))


def test_fused_weight_splits_by_head(attention):
    # [3, heads, head size, width]: head 1's queries are rows 8 to 16 of the first third, and so on.
    x_BTD = torch.randn(2, 5, 24)
    _, trace = attention(x_BTD, traced_head=torch.tensor([1]))
    weight_3AHD = attention.qkv.weight.view(3, 3, 8, 24)
    bias_3AH = attention.qkv.bias.view(3, 3, 8)
    for part in range(3):
        for head in range(3):
            expected = x_BTD @ weight_3AHD[part, head].T + bias_3AH[part, head]
            torch.testing.assert_close(trace.qkv_BT3AH[:, :, part, head], expected)


def test_the_head_that_was_asked_for_has_its_part_in_the_gradient(attention):
    x_BTD, weights_BTD = torch.randn(2, 2, 5, 24)
    weights_BT3H = torch.randn(2, 5, 3, 8)

    def gradients(asked):
        attention.zero_grad()
        y_BTD, trace = attention(x_BTD, traced_head=torch.tensor([2]) if asked else None)
        if asked:
            of_head_BT3H = trace.of_head_BT3H
        else:
            of_head_BT3H = attention.qkv(x_BTD).view(2, 5, 3, 3, 8)[:, :, :, 2]
        ((y_BTD * weights_BTD).sum() + (of_head_BT3H * weights_BT3H).sum()).backward()
        return [parameter.grad.clone() for parameter in attention.parameters()]

    torch.testing.assert_close(gradients(True), gradients(False))


def test_dropout_acts_on_the_weights_and_on_the_output():
    def outputs(dropout):
        torch.manual_seed(0)
        layer = SelfAttention(make_context(hidden_size=24, bias=False, dropout=dropout))
        return layer(torch.ones(4, 64, 24))[0]

    assert not (outputs(0.0) == 0).any()
    dropped_BTD = outputs(0.25)
    assert 0.2 < (dropped_BTD == 0).float().mean() < 0.3
    # All inputs are equal: without dropout on the weights, a unit's kept outputs were equal too.
    kept = dropped_BTD[..., 0][dropped_BTD[..., 0] != 0]
    assert kept.std() > 0


@pytest.mark.parametrize("head", [None, 1])
def test_gradients_of_q_k_and_v_are_copied_once(attention, head):
    x_BTD = torch.randn(2, 5, 24, requires_grad=True)
    asked = None if head is None else torch.tensor([head])
    y_BTD, trace = attention(x_BTD, traced_head=asked)
    total = y_BTD.sum() if trace is None else y_BTD.sum() + trace.of_head_BT3H.sum()
    written = Allocated()
    with written:
        total.backward()
    # The kernel's three gradients, all of them in one tensor, those of the parameters, and some of
    # the size of the input. Any other copy of the three would be 2 x 5 x 72 numbers more.
    of_qkv = 4 * 2 * 5 * 72
    parameters = 4 * sum(p.numel() for p in attention.parameters())
    assert 2 * of_qkv < written.total - parameters < 3 * of_qkv
