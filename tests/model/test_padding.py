"""Padding changes nothing: no score of a sequence, no gradient, no statistic, no expert's share."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from polyad.model.build import build_model, materialize
from polyad.model.decoder_config import GPT2Config
from polyad.model.feedforward import BlockInput
from polyad.model.padding import RealTokens
from polyad.model.smoe.graph import GRAPHS, head_entropies
from tests.helpers.routing import make, make_config, make_context, make_trace

SPARSE = {"kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 16}
FEED_FORWARDS = {
    "dense": {"kind": "dense"},
    "mumoe": {"kind": "mumoe", "num_experts": [5], "rank": 7, "hidden_size": 24},
    "two levels": {"kind": "mumoe", "num_experts": [3, 2], "rank": 4, "hidden_size": 24},
    "mxd": {"kind": "mxd", "num_experts": 12, "top_k": 3},
    "transcoder": {"kind": "transcoder", "num_experts": 15, "top_k": 3},
    "smoe": SPARSE,
    "similarity": SPARSE | {"graph": "similarity"},
    "attention": SPARSE | {"graph": "attention"},
}
LENGTHS = torch.tensor([5, 40, 12, 1])


def model_of(name, **changes):
    config = GPT2Config.model_validate(
        {
            "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 64,
            "vocab_size": 61, "feed_forward": FEED_FORWARDS[name],
            "head": {"kind": "classification", "num_classes": 3},
        } | changes
    )  # fmt: skip
    model = build_model(config)
    materialize(model, seed=0)
    # Gates of a muMoE start at zero, where every token has the same coefficients.
    generator = torch.Generator().manual_seed(1)
    for weight in (p for n, p in model.named_parameters() if "gate" in n or "router" in n):
        weight.data.normal_(generator=generator)
    return model.double()


def padded(length, filling):
    """The same real tokens, padded to a length with any others."""
    generator = torch.Generator().manual_seed(2)
    real = torch.randint(0, 61, (len(LENGTHS), 40), generator=generator)
    ids = torch.full((len(LENGTHS), length), filling)
    mask = torch.arange(length) < LENGTHS[:, None]
    for row, size in enumerate(LENGTHS):
        ids[row, :size] = real[row, :size]
    return ids, mask


def outcome(model, ids, mask):
    """Logits, gradients of all losses, and every number of the statistics."""
    model.zero_grad()
    logits, routing = model(ids, mask_BT=mask)
    loss = cross_entropy(logits, torch.tensor([0, 2, 1, 1]))
    for stats in routing:
        for name in ("balance_loss", "z_loss", "importance_loss"):
            if name in stats.losses:
                loss = loss + stats.losses[name]
    loss.backward()
    numbers = {
        f"{stats.name}/{name}": value
        for stats in routing
        for name, value in stats.tensors().items()
    }
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"logits": logits} | numbers | gradients


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_two_paddings_of_the_same_sequences_are_one(name):
    model = model_of(name)
    one, other = outcome(model, *padded(40, 3)), outcome(model, *padded(64, 60))
    assert one.keys() == other.keys()
    # Position embeddings of padding alone get a gradient of zero, not none.
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", ["mumoe", "smoe", "attention"])
def test_a_mask_of_real_tokens_alone_is_none(name):
    model, (ids, _) = model_of(name), padded(40, 3)
    one, other = (outcome(model, ids, mask) for mask in (None, torch.ones_like(ids).bool()))
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=1e-9, atol=1e-12, msg=key)


def test_statistics_of_a_padded_batch_are_those_of_its_sequences_by_themselves():
    model, (ids, mask) = model_of("smoe"), padded(48, 7)
    whole = model(ids, mask_BT=mask).routing
    alone = [model(ids[row : row + 1, :size]).routing for row, size in enumerate(LENGTHS)]
    for layer, stats in enumerate(whole):
        assert stats.tokens == LENGTHS.sum()
        for name in ("load_E", "entropy", "z_loss"):
            values = [routing[layer].tensors()[name] for routing in alone]
            each = [value * size for value, size in zip(values, LENGTHS, strict=True)]
            expected = torch.stack(each).sum(0) / LENGTHS.sum()
            torch.testing.assert_close(stats.tensors()[name], expected, msg=name)


def test_experts_get_the_rows_of_real_tokens_alone():
    model, (ids, mask) = model_of("smoe"), padded(64, 7)
    seen = []
    for block in model.blocks:
        block.feed_forward.experts.register_forward_hook(
            lambda _, given, __: seen.append((given[0].shape[0], int(given[1].sum())))
        )
    model(ids, mask_BT=mask)
    rows = int(LENGTHS.sum()) * 2
    assert seen == [(rows, rows)] * 2


def test_recomputation_knows_the_padding():
    plain, again = model_of("attention"), model_of("attention", recompute="block")
    one, other = (outcome(model, *padded(48, 3)) for model in (plain, again))
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, msg=key)


@pytest.mark.parametrize("kind", ["similarity", "attention"])
def test_a_graph_without_a_mask_sees_no_padding(kind):
    """As in a model that reads both ways: mixtures and measures are those without padding."""
    config = make_config(graph=kind)
    graph = make(GRAPHS[kind], config, make_context(causal=False))
    generator = torch.Generator().manual_seed(0)
    random = {"generator": generator, "dtype": torch.float64}
    scores, u = torch.randn(2, 48, 6, **random).softmax(-1), torch.randn(2, 48, 12, **random)
    trace, lengths = make_trace(2, 48, heads=3, size=4, width=12), torch.tensor([7, 40])
    real = RealTokens.of(torch.arange(48) < lengths[:, None])
    mixed = graph(scores, u, BlockInput(real=real, attention=trace))
    neighbours, entropies = torch.zeros(()), torch.zeros(3)
    for row, size in enumerate(lengths.tolist()):
        own = trace._replace(
            **{
                name: getattr(trace, name)[row : row + 1, :size]
                for name in ("qkv_BT3AH", "of_head_BT3H", "output_BTD")
            }
        )
        rows = slice(row, row + 1), slice(size)
        alone = graph(scores[rows], u[rows], BlockInput(attention=own))
        torch.testing.assert_close(mixed.scores_BTE[row, :size], alone.scores_BTE[0])
        neighbours = neighbours + alone.measures["effective_neighbours"] * size / 47
        entropies = entropies + head_entropies(own, causal=False) * size / 47
    torch.testing.assert_close(mixed.measures["effective_neighbours"], neighbours)
    if kind == "attention":
        torch.testing.assert_close(mixed.measures["head_entropy_A"], entropies)


def test_scores_are_those_of_transformers():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, num_labels=3,
        pad_token_id=60, attn_implementation="eager",
    )  # fmt: skip
    theirs = transformers.GPT2ForSequenceClassification(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    from polyad.model.families.gpt2 import GPT2

    ours, weights = model_of("dense").eval(), theirs.state_dict()
    for name, parameter in ours.named_parameters():
        if name == "head.weight":
            parameter.data.copy_(weights["score.weight"])
            continue
        (piece,) = GPT2.pieces(name, tuple(parameter.shape))
        value = weights[f"transformer.{piece.name}"]
        parameter.data.copy_(piece.in_our_form(value, piece.size))
    ids, mask = padded(48, 60)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask.long()).logits
        torch.testing.assert_close(ours(ids, mask_BT=mask).logits, expected)
