"""Mixing in tiles of bf16: against its definition in float64, for shapes that are no whole tiles.

Shapes: B batch, T tokens in a sequence, F width of the features, E experts.
"""

import pytest
import torch
from torch.nn.functional import normalize

from model.attention import AttentionTrace
from model.smoe import measures, mixing_rows, mixing_tiles
from model.smoe.features import Features, Mixing, measured_rows
from model.smoe.graph import GRAPHS, AttentionGraph
from tests.helpers.routing import (
    asked_for,
    entropy_of,
    leaves_of,
    make,
    make_config,
    make_context,
    make_trace,
    posterior_matrix,
    similarity_matrix,
)

pytestmark = pytest.mark.skipif(
    not mixing_tiles.is_there(),
    reason="this processor has no tiles of bf16, or no C compiler was there at installation",
)
both_masks = pytest.mark.parametrize("causal", [True, False])


def relative(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()


def make_mixing(shape, experts, *, one, normalized, causal, restricted):
    """Features in bf16, and exponents of 4 or so: a token mixes a few others."""
    width = shape[-1]
    features = Features(
        torch.randn(shape).bfloat16(),
        None if one else torch.randn(shape).bfloat16(),
        4.0 if normalized else 4 / width if one else 2 / width**0.5,
        normalized,
    )
    value_BTE = (2 * torch.randn(*shape[:2], experts)).softmax(-1)
    entropy_BT = torch.rand(shape[:2]) if restricted else None
    return Mixing(features, value_BTE, causal, entropy_BT)


def definition(mixing):
    """The mixture, all rows' logarithms of sums and neighbours, and leaves of the gradients."""
    query, key, scale, normalized = mixing.features
    query = query.double().requires_grad_()
    key = query if key is None else key.double().requires_grad_()
    value = mixing.value_BTE.double().requires_grad_()
    a, b = (normalize(x, dim=-1) if normalized else x for x in (query, key))
    logits = scale * (a @ b.mT)
    if mixing.causal:
        logits = logits.masked_fill(torch.ones(logits.shape[1:]).triu(1).bool(), -torch.inf)
    if mixing.entropy_BT is not None:
        more = mixing.entropy_BT[:, None, :] > mixing.entropy_BT[:, :, None]
        logits = logits.masked_fill(more, -torch.inf)
    s_BTT = logits.softmax(-1)
    leaves = [query, value] if key is query else [query, key, value]
    return s_BTT @ value, logits.logsumexp(-1), entropy_of(s_BTT).exp(), leaves


@pytest.mark.parametrize("shape", [(1, 16, 32), (2, 45, 40), (3, 257, 64), (1, 530, 96)], ids=str)
@pytest.mark.parametrize("experts", [2, 9, 16, 40])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("restricted", [False, True])
@both_masks
def test_it_equals_its_definition(shape, experts, normalized, one, restricted, causal):
    mixing = make_mixing(
        shape, experts, one=one, normalized=normalized, causal=causal, restricted=restricted
    )
    assert mixing_tiles.takes(mixing)
    mixed_BTE, log_sum_BT, neighbours_BM = mixing_tiles.mix(mixing)
    exact_BTE, exact_BT, exact_neighbours_BT, leaves = definition(mixing)
    if not restricted:
        rows_M = measured_rows(shape[1], torch.device("cpu"))
        exact_neighbours_BT = exact_neighbours_BT[:, rows_M]
    # Nothing is lost to bf16 here.
    assert relative(mixed_BTE, exact_BTE.detach()) < 2e-6
    torch.testing.assert_close(log_sum_BT.double(), exact_BT.detach(), atol=1e-5, rtol=2e-6)
    torch.testing.assert_close(
        neighbours_BM.double(), exact_neighbours_BT.detach(), atol=1e-5, rtol=2e-5
    )
    gradient_BTE = torch.randn(mixed_BTE.shape)
    ours = mixing_tiles.differentiate(mixing, gradient_BTE, mixed_BTE, log_sum_BT)
    exact = torch.autograd.grad(exact_BTE, leaves, gradient_BTE.double())
    *features, for_value_BTE = [x for x in ours if x is not None]
    assert relative(for_value_BTE, exact[-1]) < 2e-6
    for mine, other in zip(features, exact[:-1], strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative(mine, other) < 0.006  # two roundings to 8 bits


@pytest.fixture
def set_threads():
    """Sets how many threads PyTorch computes with; afterwards they are as before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("one", [True, False])
def test_any_number_of_threads_gives_the_same_numbers(one, set_threads):
    mixing = make_mixing((2, 300, 64), 6, one=one, normalized=True, causal=True, restricted=False)
    gradient_BTE = torch.randn(2, 300, 6)

    def compute(number):
        set_threads(number)
        mixed_BTE, log_sum_BT, neighbours_BM = mixing_tiles.mix(mixing)
        gradients = mixing_tiles.differentiate(mixing, gradient_BTE, mixed_BTE, log_sum_BT)
        return [mixed_BTE, log_sum_BT, neighbours_BM, *(x for x in gradients if x is not None)]

    first = compute(1)
    for number in (2, 3, 7):
        assert all(torch.equal(a, b) for a, b in zip(first, compute(number), strict=True))


@both_masks
def test_sharp_rows_and_rows_of_zeros_are_what_rows_in_fp32_are(causal):
    # Exponents of up to a thousand, as of tokens after a LayerNorm with tau 1; equal tokens; none.
    features_BTF = 6 * torch.randn(2, 70, 32)
    features_BTF[0, 5] = features_BTF[0, 50]
    features_BTF[1, 7] = 0
    value_BTE = torch.randn(2, 70, 5).softmax(-1)
    gradient_BTE = torch.randn(2, 70, 5)
    for normalized in (False, True):
        features = Features(features_BTF.bfloat16(), None, 1.0, normalized)
        mixing = Mixing(features, value_BTE, causal)
        ours, theirs = mixing_tiles.mix(mixing), mixing_rows.mix(mixing)
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
        ours = mixing_tiles.differentiate(mixing, gradient_BTE, *ours[:2])
        theirs = mixing_rows.differentiate(mixing, gradient_BTE, *theirs[:2])
        scale = theirs[0].double().norm()
        assert (ours[0].double() - theirs[0].double()).norm() < 0.01 * scale
        torch.testing.assert_close(ours[2], theirs[2], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_lost_and_reaches_no_earlier_token(wrong):
    mixing = make_mixing((1, 70, 32), 4, one=True, normalized=False, causal=True, restricted=False)
    mixing.features.query_BTF[0, 40, 3] = wrong
    mixed_BTE = mixing_tiles.mix(mixing)[0]
    assert mixed_BTE[0, :40].isfinite().all()
    assert mixed_BTE[0, 40].isnan().all()


@pytest.mark.parametrize("count", [15, 16])
def test_shorter_sequences_than_a_tile_go_by_rows(count):
    mixing = make_mixing(
        (2, count, 32), 4, one=True, normalized=False, causal=True, restricted=False
    )
    assert mixing_tiles.takes(mixing) is (count == 16)


@pytest.mark.parametrize("tokens", [16, 50, 300])
@pytest.mark.parametrize("width", [32, 96])
@pytest.mark.parametrize("count", [1, 33, 64])
def test_products_are_not_rounded_to_bf16(tokens, width, count):
    features_NF = torch.randn(tokens, width).bfloat16()
    directions_FP = torch.randn(count, width).bfloat16().T  # no order in memory is asked for
    ours_NP = mixing_tiles.product(features_NF, directions_FP)
    assert relative(ours_NP, features_NF.double() @ directions_FP.double()) < 1e-6


@both_masks
@pytest.mark.parametrize("length", [16, 31, 300])
def test_head_entropies_are_those_of_other_precisions(causal, length):
    trace = make_trace(3, length, heads=2, size=32, width=64, dtype=torch.bfloat16)
    assert mixing_tiles.takes_heads(trace.q_BATH, trace.k_BATH)
    ours_A = measures.head_entropies(trace, causal)
    exact_A = measures.head_entropies(AttentionTrace(*(x.double() for x in trace)), causal)
    torch.testing.assert_close(ours_A.double(), exact_A, atol=1e-5, rtol=1e-5)
    assert not ours_A.requires_grad


@both_masks
@pytest.mark.parametrize("name", ["dot", "cosine", "attention"])
def test_graphs_in_bf16_equal_their_definitions(name, causal):
    keys = {"dot": {"tau": 20.0}, "cosine": {"tau": 0.2}, "attention": {"sigma": 4.0}}[name]
    if name == "attention":
        config = make_config(graph="attention", **keys)
    else:
        config = make_config(graph="similarity", similarity=name, **keys)
    graph = make(
        GRAPHS[config.graph], config, make_context(causal=causal, hidden_size=64, num_heads=2)
    )
    r_BTE = (2 * torch.randn(2, 90, 6)).softmax(-1).requires_grad_()
    u_BTD = torch.randn(2, 90, 64).bfloat16().requires_grad_()
    trace = make_trace(2, 90, heads=2, size=32, width=64, dtype=torch.bfloat16)
    sources = leaves_of(trace) if name == "attention" else [u_BTD]
    mixed_BTE = graph(r_BTE, u_BTD, trace).scores_BTE
    wide = [x.detach().double().requires_grad_() for x in (r_BTE, *sources)]
    if name == "attention":
        qkv, output, weight, bias = wide[1:]
        exact = asked_for(AttentionTrace(qkv, qkv, output, weight, bias), 0)
        s_BTT = posterior_matrix(exact, 0, config, causal)
    else:
        s_BTT = similarity_matrix(wide[1], config, causal)
    assert 1.5 < entropy_of(s_BTT).exp().mean() < 60  # neither the identity nor even
    exact_BTE = s_BTT @ wide[0]
    assert relative(mixed_BTE, exact_BTE.detach()) < 2e-5
    gradient_BTE = torch.randn(mixed_BTE.shape)
    ours = torch.autograd.grad(mixed_BTE, [r_BTE, *sources], gradient_BTE)
    theirs = torch.autograd.grad(exact_BTE, wide, gradient_BTE.double())
    assert relative(ours[0], theirs[0]) < 2e-5
    for mine, other in zip(ours[1:-1], theirs[1:-1], strict=True):
        assert relative(mine, other) < 0.02
    if name == "attention":  # a difference of sums, which nearly cancels
        assert (ours[-1].double() - theirs[-1]).norm() < 0.02 * theirs[-1].norm() + 0.1
    else:
        assert relative(ours[-1], theirs[-1]) < 0.01


def test_without_tiles_a_graph_in_bf16_is_the_same(monkeypatch):
    graph = make(AttentionGraph, make_config(graph="attention", sigma=4.0))
    r_BTE, u_BTD = torch.randn(2, 40, 6).softmax(-1), torch.randn(2, 40, 12).bfloat16()
    trace = make_trace(2, 40, heads=3, size=4, width=12, dtype=torch.bfloat16)

    def compute():
        mixed = graph(r_BTE, u_BTD, trace)
        gradients = torch.autograd.grad(mixed.scores_BTE.square().sum(), leaves_of(trace)[:3])
        return mixed, gradients

    ours, for_ours = compute()
    monkeypatch.setattr(mixing_tiles, "is_there", lambda: False)
    theirs, for_theirs = compute()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    for mine, other in zip(for_ours, for_theirs, strict=True):
        assert relative(mine, other.double()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("name", ["similarity", "attention"])
def test_a_compiled_model_in_bf16_computes_the_same(small_model, random_ids, name):
    model = small_model(
        dtype=torch.bfloat16,
        hidden_size=64,
        num_heads=2,
        sequence_length=32,
        # Every expert for every token: a rounding elsewhere cannot choose others.
        feed_forward={"kind": "smoe", "num_experts": 3, "top_k": 3}
        | {"graph": name, "tau": 8.0, "sigma": 4.0},
    )
    ids = random_ids(2, 32)
    compiled = torch.compile(model)

    def gradients(function):
        model.zero_grad()
        output = function(ids)
        output.logits.float().square().mean().backward()
        return [output.logits, *(parameter.grad for parameter in model.parameters())]

    for mine, other in zip(gradients(compiled), gradients(model), strict=True):
        if other is not None:
            assert relative(mine, other.double()) < 0.1
