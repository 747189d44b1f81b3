"""Padding changes nothing: no score of a sequence, no gradient, no statistic, no expert's share."""

import pytest
import torch
import transformers

from polyad.model.block import FEED_FORWARDS
from polyad.model.families.decoders import GPT2
from polyad.model.feedforward import BlockInput
from polyad.model.layers import RealTokens
from polyad.model.mumoe.gating import NORMS
from polyad.model.smoe.graph import GRAPHS, head_entropies
from tests.helpers.random_model import built
from tests.helpers.routing import make, make_config, make_context, make_trace, scatter

SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 64, "vocab_size": 61,
}  # fmt: skip
SCORED = SIZES | {"kind": "gpt2", "head": {"kind": "classification", "num_classes": 3}}
SPARSE = {
    "kind": "smoe", "num_experts": 4, "expert_hidden_size": 16, "sigma": 8.0, "tau": 3.0,
}  # fmt: skip
UNITS = {"kind": "emoe", "num_experts": 4, "top_k": 2}
ANY = {
    "dense": {"kind": "dense"},
    "mumoe": {"kind": "mumoe", "num_experts": [5], "rank": 7, "hidden_size": 24},
    "two levels": {"kind": "mumoe", "num_experts": [3, 2], "rank": 4, "hidden_size": 24},
    **{f"smoe, {graph}": SPARSE | {"graph": graph} for graph in GRAPHS},
    "emoe": UNITS,
    "mxd": {"kind": "mxd", "num_experts": 12, "top_k": 3},
    "transcoder": {"kind": "transcoder", "num_experts": 15, "top_k": 3},
}
BOTH_WAYS = {
    **{f"{norm} norm": ANY["two levels"] | {"gate_norm": norm} for norm in NORMS},
    "smoe, capacity": SPARSE | {"capacity_factor": 0.5},
    "emoe, capacity": UNITS | {"capacity_factor": 0.5},
}
CASES = {f"gpt2 {name}": SCORED | {"feed_forward": section} for name, section in ANY.items()}
CASES |= {
    f"bert {name}": SIZES | {"kind": "bert", "feed_forward": section}
    for name, section in (ANY | BOTH_WAYS).items()
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
LENGTHS = torch.tensor([5, 40, 12, 1])


def model_of(case):
    model = built(case)
    return scatter(model).double()


def padded(length, filling):
    """The same real tokens, padded to a length with any others."""
    generator = torch.Generator().manual_seed(2)
    real_BT = torch.randint(0, 61, (len(LENGTHS), 40), generator=generator)
    mask_BT = torch.arange(length) < LENGTHS[:, None]
    ids_BT = torch.full((len(LENGTHS), length), filling)
    ids_BT[mask_BT] = real_BT[mask_BT[:, :40]]
    return ids_BT, mask_BT


def outcome(model, ids_BT, mask_BT):
    """Logits of real tokens or of sequences, gradients, and every number of the statistics."""
    model.zero_grad()
    logits, routing = model(ids_BT, mask_BT=mask_BT)
    if logits.dim() == 3:
        logits = logits[mask_BT]
    losses = [value for stats in routing for value in stats.losses.values()]
    (logits.square().sum() + sum(losses)).backward()
    numbers = {
        f"{stats.name}/{name}": value
        for stats in routing
        for name, value in stats.tensors().items()
    }
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": logits} | numbers | gradients


def test_every_feed_forward_is_tried():
    assert {section["kind"] for section in ANY.values()} == FEED_FORWARDS.keys()


@every_case
def test_two_paddings_of_the_same_sequences_are_one(case):
    model = model_of(case)
    one, other = outcome(model, *padded(40, 3)), outcome(model, *padded(64, 60))
    assert one.keys() == other.keys()
    # A bias of each word is added to what padding alone has; no token is it.
    for key in one.keys() - {"token_embedding.weight", "head.decoder.bias"}:
        torch.testing.assert_close(other[key], one[key], rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.parametrize("name", [name for name in CASES if "capacity" not in name])
def test_padded_sequences_are_computed_as_alone(name):
    model = model_of(CASES[name]).eval()
    ids_BT, mask_BT = padded(48, 7)
    together = model(ids_BT, mask_BT=mask_BT)
    each = [model(ids_BT[row : row + 1, :size]) for row, size in enumerate(LENGTHS)]
    for row, (size, alone) in enumerate(zip(LENGTHS, each, strict=True)):
        ours = together.logits[row]
        torch.testing.assert_close(ours if ours.dim() == 1 else ours[:size], alone.logits[0])
    for layer, stats in enumerate(together.routing):
        assert stats.tokens == LENGTHS.sum()
        for key in ("load_E", "entropy", "effective_neighbours"):
            if key in stats.tensors():
                values = [output.routing[layer].tensors()[key] for output in each]
                weighted = [v * size for v, size in zip(values, LENGTHS, strict=True)]
                mean = torch.stack(weighted).sum(0) / LENGTHS.sum()
                torch.testing.assert_close(stats.tensors()[key], mean, msg=key)


@every_case
def test_a_mask_of_real_tokens_alone_is_none(case):
    model, ids_BT = model_of(case), padded(40, 3)[0]
    whole_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    logits, others = (model(ids_BT, mask_BT=mask_BT).logits for mask_BT in (None, whole_BT))
    torch.testing.assert_close(others, logits, rtol=1e-9, atol=1e-12)


def test_experts_get_the_rows_of_real_tokens_alone():
    model, (ids_BT, mask_BT) = model_of(CASES["gpt2 smoe, none"]), padded(64, 7)
    seen = []
    for block in model.blocks:
        block.feed_forward.experts.register_forward_hook(
            lambda _, given, __: seen.append((given[0].shape[0], int(given[1].sum())))
        )
    model(ids_BT, mask_BT=mask_BT)
    rows = int(LENGTHS.sum()) * 2
    assert seen == [(rows, rows)] * 2


def test_a_head_s_entropies_are_those_without_padding():
    """As in a model that reads both ways."""
    graph = make(GRAPHS["attention"], make_config(graph="attention"), make_context(causal=False))
    generator = torch.Generator().manual_seed(0)
    random = {"generator": generator, "dtype": torch.float64}
    scores, u = torch.randn(2, 48, 6, **random).softmax(-1), torch.randn(2, 48, 12, **random)
    trace, lengths = make_trace(48), torch.tensor([7, 40])
    real = RealTokens.of(torch.arange(48) < lengths[:, None])
    mixed = graph(scores, u, BlockInput(real=real, attention=trace))
    entropies = torch.zeros(3)
    for row, size in enumerate(lengths.tolist()):
        names = ("qkv_BT3AH", "of_head_BT3H", "output_BTD")
        parts = {name: getattr(trace, name)[row : row + 1, :size] for name in names}
        entropies = entropies + head_entropies(trace._replace(**parts), causal=False) * size / 47
    torch.testing.assert_close(mixed.measures["head_entropy_A"], entropies)


def test_scores_are_those_of_transformers():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, num_labels=3,
        pad_token_id=60, attn_implementation="eager",
    )  # fmt: skip
    theirs = scatter(transformers.GPT2ForSequenceClassification(config).double().eval())
    ours, weights = model_of(CASES["gpt2 dense"]).eval(), theirs.state_dict()
    for name, parameter in ours.named_parameters():
        if name == "head.weight":
            parameter.data.copy_(weights["score.weight"])
            continue
        (piece,) = GPT2.pieces(name, tuple(parameter.shape))
        value = weights[f"transformer.{piece.name}"]
        parameter.data.copy_(piece.in_our_form(value, piece.size))
    ids_BT, mask_BT = padded(48, 60)
    with torch.no_grad():
        expected = theirs(ids_BT, attention_mask=mask_BT.long()).logits
        torch.testing.assert_close(ours(ids_BT, mask_BT=mask_BT).logits, expected)
