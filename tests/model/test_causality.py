"""The gate against leaks, over every kind and registry; and that it stops what leaks."""

import dataclasses

import pytest
import torch

from polyad.model.build import build_model, materialize
from polyad.model.mumoe.config import FACTORIZATIONS
from polyad.model.mumoe.gating import ACTIVATIONS
from polyad.model.smoe.graph import GRAPHS, AttentionGraph, SimilarityGraph, head_entropies
from polyad.model.smoe.router import SCORES
from tests.helpers.routing import assert_causal, logits_and_experts, scatter

END = 18
"""Ends a document in the middle of both sequences of most tests."""
SECTIONS = {
    "dense": {},
    "smoe": {
        "num_experts": 8,
        "expert_hidden_size": 16,
        "sigma": 8.0,
        "tau": 3.0,
    },
    "mumoe": {"num_experts": [8]},
    "emoe": {"num_experts": 8, "top_k": 3},
}


def gated_model(small_config, update=None, kind="smoe", **options):
    """A float64 model with the reference experts, away from its initial state.

    `update` sets keys of the feed-forward behind the back of the checks.
    """
    feed_forward = {"kind": kind} | SECTIONS[kind]
    # Without biases, which make all tokens alike, block by block.
    config = small_config(bias=False, feed_forward=feed_forward | options, end_of_text_id=END)
    routed = config.feed_forward.model_copy(update=update or {})
    model = build_model(config.model_copy(update={"feed_forward": routed}))
    materialize(model, seed=0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith(("head_entropy", "balancing_bias")):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    scatter(model, 0.2)
    with torch.no_grad():
        model.token_embedding.weight.mul_(10)
    return model


OPTIONS = (
    {f"{score}, {graph}": {"score": score, "graph": graph} for score in SCORES for graph in GRAPHS}
    | {
        "a fixed head": {"graph": "attention", "attention_head": 2},
        "a head's own values": {"graph": "attention", "head_mean": False, "sigma": 2.0},
        "cosine similarity": {"graph": "similarity", "similarity": "cosine", "tau": 0.5},
        "balancing": {"balancing_rate": 0.1},
        "balancing, similarity": {"graph": "similarity", "balancing_rate": 0.1},
        "one expert, attention": {"graph": "attention", "top_k": 1},
        "all experts, similarity": {"graph": "similarity", "top_k": 8},
        "growing k": {"score": "random", "top_k": 1, "final_top_k": 8},
        "every second block": {"graph": "similarity", "placement": 2},
    }
    | {
        f"pools of the prefix, {graph}": {"pool": "prefix", "pool_most": 3, "graph": graph}
        | ({"pool_least": 3} if graph == "none" else {"pool_least": 3, "balancing_rate": 0.1})
        for graph in GRAPHS
    }
)
FACTORIZED = {
    f"{name}, {gate}, {gate_input}, {len(levels)} levels": {
        "kind": "mumoe", "factorization": name, "gate": gate, "gate_input": gate_input,
        "num_experts": levels,
    }
    for name in FACTORIZATIONS
    for gate in ACTIVATIONS
    for gate_input in ("residual", "normalized")
    for levels in ([8], [4, 2, 2])
} | {
}  # fmt: skip
GROUPS = {
    f"groups, {', '.join(map(str, options.values()))}": {"kind": "emoe"} | options
    for options in (
        {"score": "avg_k"},
        {"score": "linear"},
        {"score": "cosine", "blocks": [1]},
        {"select": "bottom_k"},
        {"select": "not_top_k"},
    )
}
EVERYTHING = {"dense": {"kind": "dense"}} | OPTIONS | FACTORIZED | GROUPS


@pytest.mark.parametrize("options", EVERYTHING.values(), ids=EVERYTHING)
def test_nothing_depends_on_later_tokens(small_config, random_ids, options):
    model = gated_model(small_config, **options)
    for last in (0, 7, 14):
        assert_causal(model, random_ids(2, 16), last)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_experts_do_depend_on_tokens(small_config, random_ids, options):
    # Otherwise the gate would have nothing to see: several experts, and others for other tokens.
    model = gated_model(small_config, **options)
    ids = random_ids(2, 16)
    _, experts = logits_and_experts(model, ids)
    _, others = logits_and_experts(model, (ids + 1) % 61)
    assert len(experts) == (1 if options.get("placement") == 2 else 3)
    for ours, theirs in zip(experts, others, strict=True):
        assert len(ours[..., 0].unique()) > 2
        assert (ours[..., 0] != theirs[..., 0]).double().mean() > 0.1


@pytest.mark.parametrize("options", FACTORIZED.values(), ids=FACTORIZED)
def test_coefficients_do_depend_on_tokens(small_config, random_ids, options):
    # As above: gates that have left their zero, whose coefficients differ from token to token.
    model = gated_model(small_config, **options)
    _, gates = logits_and_experts(model, random_ids(2, 16))
    assert len(gates) == 3 * len(options["num_experts"])
    for coefficients in gates:
        assert coefficients.std((0, 1)).max() > 0.05


def test_a_graph_of_a_long_sequence_is_causal(small_config, random_ids):
    model = gated_model(lambda **kw: small_config(sequence_length=300, **kw), graph="similarity")
    assert_causal(model, random_ids(1, 300), 200)


class Unmasked(SimilarityGraph):
    """Leaks: mixes over all tokens, as the paper may have."""

    def __init__(self, config, context):
        super().__init__(config, dataclasses.replace(context, causal=False))


class UnmaskedAttention(AttentionGraph):
    """Leaks in the same way."""

    def __init__(self, config, context):
        super().__init__(config, dataclasses.replace(context, causal=False))


class OwnEntropies(AttentionGraph):
    """Leaks, a little: takes the head of least entropy in the batch at hand."""

    def forward(self, scores_BTE, u_BTD, given):
        self.head_entropy.copy_(head_entropies(given.attention, self.context.causal))
        return super().forward(scores_BTE, u_BTD, given)


def assert_causal_everywhere(model, ids):
    for last in range(15):  # the order of the heads' own entropies changes somewhere
        assert_causal(model, ids, last)


LEAKS = {
    "unmasked": (Unmasked, {}),
    "unmasked cosine": (Unmasked, {"similarity": "cosine", "tau": 0.5}),
    "unmasked attention": (UnmaskedAttention, {"sigma": 5.0}),
    "own entropies": (OwnEntropies, {}),
}


@pytest.mark.parametrize(("leaky", "options"), LEAKS.values(), ids=LEAKS)
def test_the_gate_stops_a_graph_that_leaks(small_config, random_ids, monkeypatch, leaky, options):
    monkeypatch.setitem(GRAPHS, "leaky", leaky)
    model = gated_model(small_config, {"graph": "leaky"}, **options)
    assert isinstance(model.blocks[0].feed_forward.router.graph, leaky)
    with pytest.raises(AssertionError):
        assert_causal_everywhere(model, random_ids(2, 16))


@pytest.mark.parametrize("kind", ["smoe", "emoe"])
def test_the_gate_stops_a_capacity(small_config, random_ids, kind):
    model = gated_model(small_config, {"capacity_factor": 0.5}, kind=kind)
    with pytest.raises(AssertionError):
        assert_causal(model, random_ids(2, 16), 7)


def pooled(small_config, pool):
    sizes = {"pool_least": 3, "pool_most": 3}
    return gated_model(small_config, {"pool": pool}, **{"pool": "prefix"} | sizes)


def test_the_gate_stops_pools_of_whole_documents_in_training_alone(small_config, random_ids):
    ids_BT = random_ids(2, 16)
    model = pooled(small_config, "document")
    assert model.training
    with pytest.raises(AssertionError):
        assert_causal(model, ids_BT, 7)
    assert_causal(model.eval(), ids_BT, 7)
    assert_causal(pooled(small_config, "prefix"), ids_BT, 7)


def test_pools_of_drawn_sizes_see_no_later_token(small_config, random_ids):
    # Sequences of equal length, and the same random numbers.
    model = gated_model(small_config, pool="prefix")
    ids_BT = torch.arange(32).view(2, 16) + 25
    ids_BT[:, [3, 8, 14]] = END
    changed_BT = ids_BT.clone()
    changed_BT[:, 13] = 1

    def experts(ids_BT):
        torch.manual_seed(3)
        return logits_and_experts(model, ids_BT)[1]

    for ours, theirs in zip(experts(ids_BT), experts(changed_BT), strict=True):
        assert torch.equal(ours[:, :13], theirs[:, :13])


def test_the_gate_stops_a_norm_over_the_batch(small_config, random_ids):
    model = gated_model(small_config, {"gate_norm": "batch"}, kind="mumoe")
    with pytest.raises(AssertionError):
        assert_causal(model, random_ids(2, 16), 7)
    # In evaluation it reads what training left.
    assert_causal(model.eval(), random_ids(2, 16), 7)
