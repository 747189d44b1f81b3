"""BERT against transformers, and what padding reaches: nothing."""

import pytest
import torch
from torch import Tensor

from polyad.model.bert import Bert, BertConfig
from polyad.model.block import FEED_FORWARDS
from polyad.model.build import build_model, num_parameters
from polyad.model.families.bert import BERT
from polyad.model.mumoe.gating import NORMS
from polyad.model.smoe.graph import GRAPHS
from tests.helpers.bert import LENGTHS, padded_input, scatter, small_bert, their_bert

LARGE = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16}
HEADS = {
    "BertModel": {"kind": "none"},
    "BertForMaskedLM": {"kind": "language"},
    "BertForSequenceClassification": {"kind": "classification", "num_classes": 5},
}
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-10}


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


def copied(theirs, dtype: torch.dtype, **keys) -> Bert:
    """Our model with the weights of transformers' one."""
    ours = small_bert(dtype, num_segments=3, feed_forward={"hidden_size": 96}, **keys)
    held = {BERT.plain_name(name): value for name, value in theirs.state_dict().items()}
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            pieces = BERT.pieces(name, tuple(parameter.shape))
            parameter.copy_(torch.cat([held[piece.name] for piece in pieces]))
    return ours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", HEADS)
def test_equals_transformers_with_padding_and_segments(kind, dtype):
    extra = {"num_labels": 5} if "Sequence" in kind else {}
    theirs = their_bert(kind, **extra).to(dtype)
    ours = copied(theirs, dtype, head=HEADS[kind])
    ids, mask, segments = padded_input(3)
    expected = theirs(ids, attention_mask=mask.long(), token_type_ids=segments)
    found = ours(ids, mask, segments).logits
    close = {"atol": DTYPES[dtype], "rtol": 0}
    if kind == "BertModel":
        torch.testing.assert_close(found[mask], expected.last_hidden_state[mask], **close)
        torch.testing.assert_close(ours.pooled(found), expected.pooler_output, **close)
    elif kind == "BertForMaskedLM":
        torch.testing.assert_close(found[mask], expected.logits[mask], **close)
    else:
        torch.testing.assert_close(found, expected.logits, **close)


def test_loss_and_gradients_are_those_of_transformers():
    theirs = their_bert("BertForMaskedLM").double()
    ours = copied(theirs, torch.float64)
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


SECTIONS = {
    "dense": {"kind": "dense"},
    **{
        f"mumoe, {norm}": {"kind": "mumoe", "num_experts": [4], "gate_norm": norm}
        for norm in NORMS
    },
    **{
        f"smoe, {graph}": {
            "kind": "smoe", "num_experts": 4, "expert_hidden_size": 16, "graph": graph,
            "router_noise": 0.0, "sigma": 8.0, "tau": 3.0,
        }
        for graph in GRAPHS
    },
    "smoe, capacity": {
        "kind": "smoe", "num_experts": 4, "expert_hidden_size": 16, "capacity_factor": 0.5,
    },
    "mxd": {"kind": "mxd", "num_experts": 12, "top_k": 3},
    "transcoder": {"kind": "transcoder", "num_experts": 15, "top_k": 3},
    "emoe": {"kind": "emoe", "num_experts": 4, "top_k": 2},
    "emoe, linear": {"kind": "emoe", "num_experts": 4, "top_k": 2, "score": "linear"},
    "emoe, capacity": {
        "kind": "emoe", "num_experts": 4, "top_k": 2, "capacity_factor": 0.5,
    },
}  # fmt: skip


def test_every_feed_forward_is_tried():
    assert {section["kind"] for section in SECTIONS.values()} == FEED_FORWARDS.keys()


def run(model: Bert, ids: Tensor, mask: Tensor, segments: Tensor):
    output = model(ids, mask, segments)
    numbers = [
        value.detach()
        for stats in output.routing
        for name, value in stats.tensors().items()
        if name != "tokens"
    ]
    return output.logits, numbers


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_padding_reaches_nothing(section, training):
    # Neither outputs, nor statistics, nor gradients of the weights depend on what padding says,
    # and the embedding of a token that only padding has gets none.
    model = small_bert(torch.float64, feed_forward=section).train(training)
    scatter(model)
    ids, mask, segments = padded_input()
    ids = ids.clamp_max(58).masked_fill(~mask, 59)
    results = []
    for filling in (59, 60):
        model.zero_grad()
        logits, numbers = run(model, ids.masked_fill(~mask, filling), mask, segments)
        logits[mask].square().sum().backward()
        gradients = [p.grad for name, p in model.named_parameters() if name != "head.decoder.bias"]
        results.append([logits[mask].detach(), *numbers, *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-9)


# A capacity counts the tokens of a batch.
@pytest.mark.parametrize(
    "name", [n for n, each in SECTIONS.items() if "capacity_factor" not in each]
)
def test_padded_sequences_are_computed_as_alone(name):
    section = SECTIONS[name]
    model = small_bert(torch.float64, feed_forward=section)
    scatter(model)
    ids, mask, segments = padded_input()
    together = model(ids, mask, segments)
    for row, length in enumerate(LENGTHS):
        alone = model(ids[row : row + 1, :length], None, segments[row : row + 1, :length])
        torch.testing.assert_close(together.logits[row, :length], alone.logits[0])


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_a_mask_of_tokens_alone_changes_nothing(section):
    model = small_bert(torch.float64, feed_forward=section).train()
    scatter(model)
    ids, _, segments = padded_input()
    for one, other in zip(
        run(model, ids, torch.ones_like(ids, dtype=torch.bool), segments)[1],
        run(model, ids, None, segments)[1],
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", FEED_FORWARDS)
def test_every_token_sees_both_sides(kind):
    section = next(each for each in SECTIONS.values() if each["kind"] == kind)
    model = small_bert(torch.float64, feed_forward=section)
    scatter(model)
    ids, _, _ = padded_input()
    before = model(ids).logits
    for changed in (2, 13):
        other = ids.clone()
        other[:, changed] = (other[:, changed] + 1) % 61
        assert (model(other).logits - before).abs().amax(-1).min() > 1e-6


def test_one_position_is_scored_as_in_the_whole():
    model = small_bert(torch.float64)
    ids, mask, segments = padded_input()
    positions = torch.tensor([[3, 9], [0, 10], [0, 0]])
    whole = model(ids, mask, segments).logits
    some = model(ids, mask, segments, positions).logits
    torch.testing.assert_close(some, whole[torch.arange(3).unsqueeze(1), positions])


def test_what_the_data_decides_is_asked_for():
    open_head = {"head": {"kind": "classification"}, "num_layers": 1}
    assert BertConfig().left_to_data() == "model.vocab_size"
    known = BertConfig.model_validate(open_head | {"vocab_size": 61})
    assert known.left_to_data() == "model.head.num_classes"
    with pytest.raises(ValueError, match="num_classes is not set"):
        build_model(known)


def test_a_longer_input_is_refused():
    with pytest.raises(ValueError, match="input of 17 tokens"):
        small_bert()(torch.zeros(1, 17, dtype=torch.int64))
