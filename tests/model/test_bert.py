"""BERT against transformers. Padding is for `test_padding.py`."""

import pytest
import torch

from polyad.model.bert import Bert, BertConfig
from polyad.model.block import FEED_FORWARDS
from polyad.model.build import build_model, num_parameters
from polyad.model.families.encoders import BERT
from tests.helpers.bert import padded_input, small_bert, their_bert
from tests.helpers.routing import scatter
from tests.model.test_contract import SECTIONS

LARGE = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16}
HEADS = {
    "BertModel": {"kind": "none"},
    "BertForMaskedLM": {"kind": "language"},
    "BertForSequenceClassification": {"kind": "classification", "num_classes": 5},
}


@pytest.mark.parametrize(
    ("sizes", "head", "count"),
    [
        ({}, "BertModel", 109_482_240),
        ({}, "BertForMaskedLM", 109_514_298),
        (LARGE, "BertModel", 335_141_888),
        (LARGE, "BertForMaskedLM", 335_174_458),
    ],
)
def test_parameters_are_those_of_the_released_models(sizes, head, count):
    config = BertConfig.model_validate(sizes | {"vocab_size": 30_522, "head": HEADS[head]})
    assert num_parameters(config) == count


def copied(theirs, **keys) -> Bert:
    """Our model with the weights of transformers' one."""
    ours = small_bert(torch.float64, num_segments=3, feed_forward={"hidden_size": 96}, **keys)
    held = {BERT.plain_name(name): value for name, value in theirs.state_dict().items()}
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            pieces = BERT.pieces(name, tuple(parameter.shape))
            parameter.copy_(torch.cat([held[piece.name] for piece in pieces]))
    return ours


@pytest.mark.parametrize("kind", HEADS)
def test_equals_transformers_with_padding_and_segments(kind):
    extra = {"num_labels": 5} if "Sequence" in kind else {}
    theirs = their_bert(kind, **extra).double()
    ours = copied(theirs, head=HEADS[kind])
    ids, mask, segments = padded_input(3)
    expected = theirs(ids, attention_mask=mask.long(), token_type_ids=segments)
    found = ours(ids, mask, segments).logits
    close = {"atol": 1e-10, "rtol": 0}
    if kind == "BertModel":
        torch.testing.assert_close(found[mask], expected.last_hidden_state[mask], **close)
        torch.testing.assert_close(ours.head.pooler(found), expected.pooler_output, **close)
    elif kind == "BertForMaskedLM":
        torch.testing.assert_close(found[mask], expected.logits[mask], **close)
    else:
        torch.testing.assert_close(found, expected.logits, **close)


def test_loss_and_gradients_are_those_of_transformers():
    theirs = their_bert("BertForMaskedLM").double()
    ours = copied(theirs)
    ids, mask, segments = padded_input(3)
    positions = torch.tensor([[1, 5], [0, 10], [0, 0]])
    targets = torch.tensor([[3, 4], [5, 6], [7, 7]])
    labels = torch.full_like(ids, -100).scatter(1, positions, targets)
    expected = theirs(ids, attention_mask=mask.long(), token_type_ids=segments, labels=labels)
    each = ours(ids, mask, segments, positions).logits
    with torch.no_grad():
        both = ours(ids, mask, segments, positions, targets).logits  # a softmax in fp32
    # transformers' mean counts the one target of the last row once.
    weights = torch.tensor([[1, 1], [1, 1], [1, 0]])
    mean = (both[..., 0] * weights).sum() / 5
    torch.testing.assert_close(mean, expected.loss.float(), atol=1e-6, rtol=0)
    assert torch.equal(both[..., 1].bool(), each.argmax(-1) == targets)
    first = slice(0, 2)
    labels = labels[first]
    theirs(ids[first], mask[first].long(), segments[first], labels=labels).loss.backward()
    ours(
        ids[first], mask[first], segments[first], positions[first], targets[first]
    ).logits.backward()
    of_theirs = theirs.bert.embeddings.word_embeddings.weight.grad
    torch.testing.assert_close(ours.token_embedding.weight.grad, of_theirs, atol=1e-6, rtol=0)
    of_bias = theirs.cls.predictions.bias.grad
    torch.testing.assert_close(ours.head.decoder.bias.grad, of_bias, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", FEED_FORWARDS)
def test_every_token_sees_both_sides(kind):
    model = small_bert(torch.float64, feed_forward=SECTIONS[kind] | {"kind": kind})
    scatter(model)
    ids, _, _ = padded_input()
    before = model(ids).logits
    for changed in (2, 13):
        other = ids.clone()
        other[:, changed] = (other[:, changed] + 1) % 61
        assert (model(other).logits - before).abs().amax(-1).min() > 1e-6


def test_what_the_data_decides_is_asked_for():
    open_head = {"head": {"kind": "classification"}, "num_layers": 1}
    assert BertConfig().left_to_data() == "model.vocab_size"
    known = BertConfig.model_validate(open_head | {"vocab_size": 61})
    assert known.left_to_data() == "model.head.num_classes"
    with pytest.raises(ValueError, match="num_classes is not set"):
        build_model(known)
