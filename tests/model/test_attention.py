import pytest
import torch

from polyad.model.attention import SelfAttention
from tests.helpers.routing import make_context


@pytest.fixture
def attention():
    torch.manual_seed(0)
    return SelfAttention(make_context(hidden_size=24))


def test_output_and_trace_are_attention_written_out(attention):
    x_BTD = torch.randn(2, 5, 24)
    same_BTD, nothing = attention(x_BTD)
    y_BTD, trace = attention(x_BTD, traced_head=torch.tensor([1]))
    assert nothing is None
    assert torch.equal(y_BTD, same_BTD)
    # [3, heads, head size, width]: head 1's queries are rows 8 to 16 of the first third, and so on.
    weight_3AHD, bias_3AH = attention.qkv.weight.view(3, 3, 8, 24), attention.qkv.bias.view(3, 3, 8)
    qkv_BT3AH = torch.einsum("btd,nahd->btnah", x_BTD, weight_3AHD) + bias_3AH
    torch.testing.assert_close(trace.qkv_BT3AH, qkv_BT3AH)
    assert torch.equal(trace.of_head_BT3H, trace.qkv_BT3AH[:, :, :, 1])
    q_BATH, k_BATH, v_BATH = qkv_BT3AH.permute(2, 0, 3, 1, 4)
    scores_BATT = q_BATH @ k_BATH.mT / 8**0.5
    future_TT = torch.ones(5, 5, dtype=torch.bool).triu(1)
    weights_BATT = scores_BATT.masked_fill(future_TT, -torch.inf).softmax(-1)
    heads_BTD = (weights_BATT @ v_BATH).transpose(1, 2).flatten(2)
    torch.testing.assert_close(y_BTD, attention.projection(heads_BTD))


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
