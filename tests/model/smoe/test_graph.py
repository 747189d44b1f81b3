"""Graphs of tokens: against their definitions with materialized matrices, and without any.

Shapes: B batch, T tokens in a sequence, D width, E experts, A heads, H width of one head.
"""

import pytest
import torch

from polyad.model.attention import AttentionTrace, SelfAttention
from polyad.model.feedforward import BlockInput
from polyad.model.smoe.graph import (
    GRAPHS,
    AttentionGraph,
    Features,
    SimilarityGraph,
    head_entropies,
)
from tests.helpers.routing import (
    Watch,
    asked_for,
    assert_same_with_gradients,
    attention_matrix,
    entropy_of,
    leaves,
    leaves_of,
    make,
    make_config,
    make_context,
    make_trace,
    posterior_matrix,
    scatter,
    similarity_matrix,
)

both_masks = pytest.mark.parametrize("causal", [True, False])
every_mixing_graph = pytest.mark.parametrize("name", [name for name in GRAPHS if name != "none"])


def test_no_graph_leaves_scores_as_they_are():
    r_BTE, u_BTD = leaves(2, 5)
    mixed = make(GRAPHS["none"])(r_BTE, u_BTD)
    assert mixed.scores_BTE is r_BTE
    assert mixed.measures.get("effective_neighbours") is None
    assert mixed.measures.get("head_entropy_A") is None


def test_similarity_equals_numbers_worked_out_by_hand():
    # u = (0, ln 3), tau = 1, no mask. Row 0: exponents 0, 0: half of each. Row 1: 0 and
    # (ln 3)^2 = 1.2069490, whose exp is 3.3432698: 1 / 4.3432698 = 0.2302413 of token 0.
    graph = make(SimilarityGraph, make_config(num_experts=2), make_context(causal=False))
    u_BTD = torch.tensor([[[0.0], [3.0]]], dtype=torch.float64)
    u_BTD[0, 1] = u_BTD[0, 1].log()
    r_BTE = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    mixed = graph(r_BTE, u_BTD)
    expected = torch.tensor([[[0.5, 0.5], [0.2302413, 0.7697587]]], dtype=torch.float64)
    torch.testing.assert_close(mixed.scores_BTE, expected, atol=1e-7, rtol=0)
    # Entropies: ln 2, and 0.2302413 x 1.4686275 + 0.7697587 x 0.2616783 = 0.5395681;
    # (2 + exp(0.5395681)) / 2 = (2 + 1.7152658) / 2.
    torch.testing.assert_close(
        mixed.measures["effective_neighbours"].item(), 1.8576329, atol=1e-5, rtol=0
    )
    graph = make(SimilarityGraph, make_config(num_experts=2), make_context(causal=True))
    expected[0, 0] = torch.tensor([1.0, 0.0])
    torch.testing.assert_close(graph(r_BTE, u_BTD).scores_BTE, expected, atol=1e-7, rtol=0)


@both_masks
@pytest.mark.parametrize("length", [1, 20, 300])
@pytest.mark.parametrize(
    "options",
    [{}, {"tau": 2.5}, {"similarity": "cosine", "tau": 0.3}],
    ids=str,
)
def test_similarity_equals_its_definition(causal, length, options):
    config = make_config(graph="similarity", **options)
    r_BTE, u_BTD = leaves(2, length)
    mixed = make(SimilarityGraph, config, make_context(causal=causal))(r_BTE, u_BTD)
    s_BTT = similarity_matrix(u_BTD, config, causal)
    assert_same_with_gradients(
        mixed.scores_BTE, s_BTT @ r_BTE, (r_BTE, u_BTD) if length > 1 else (r_BTE,)
    )


@both_masks
@pytest.mark.parametrize("length", [1, 20, 300])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sigma": 2.5},
        {"head_mean": False},
        {"head_mean": False, "sigma": 0.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("head", [0, 2])
def test_posterior_equals_its_definition(causal, length, options, head):
    config = make_config(graph="attention", **options)
    graph = make(AttentionGraph, config, make_context(causal=causal))
    graph.head_entropy[head] = -1.0
    r_BTE, u_BTD = leaves(2, length)
    trace = make_trace(2, length, heads=3, size=4, width=12)
    mixed = graph(r_BTE, u_BTD, BlockInput(attention=asked_for(trace, head)))
    s_BTT = posterior_matrix(trace, head, config, causal)
    inputs = (r_BTE, *leaves_of(trace)) if length > 1 else (r_BTE,)
    assert_same_with_gradients(mixed.scores_BTE, s_BTT @ r_BTE, inputs)


def attend(bias=True):
    """An attention with scattered weights, its input and its output."""
    attention = SelfAttention(make_context(hidden_size=12, bias=bias)).double()
    scatter(attention, 0.5)
    x_BTD = torch.randn(2, 20, 12, dtype=torch.float64, requires_grad=True)
    return attention, x_BTD, *attention(x_BTD, traced_head=torch.tensor([0]))


def test_output_bias_is_no_part_of_the_posterior():
    attention, x_BTD, y_BTD, trace = attend()
    config = make_config(graph="attention")
    r_BTE, u_BTD = leaves(2, 20)
    # o_i is what the heads add up to: (1 / A) sum_h A W_h (A_h v_h).
    heads_BTD = sum(
        attention_matrix(trace, head, causal=True)
        @ trace.v_BATH[:, head]
        @ attention.projection.weight[:, 4 * head : 4 * head + 4].T
        for head in range(3)
    )
    without = trace._replace(output_BTD=heads_BTD, output_bias_D=None)
    expected = posterior_matrix(without, 0, config, True) @ r_BTE
    given = BlockInput(attention=trace)
    mixed = make(AttentionGraph, config)(r_BTE, u_BTD, given).scores_BTE
    torch.testing.assert_close(mixed, expected)
    with_bias = posterior_matrix(without._replace(output_BTD=y_BTD), 0, config, True) @ r_BTE
    assert (with_bias - expected).abs().max() > 0.05
    # The gradient reaches all weights but the two biases that cancel: the projection's, and the
    # keys' in a softmax over keys (which also shifts nothing else here).
    mixed[..., 0].sum().backward()
    assert x_BTD.grad.abs().max() > 1e-3
    assert attention.qkv.weight.grad.abs().min() > 0
    assert attention.projection.weight.grad.abs().max() > 1e-3
    assert attention.projection.bias.grad.abs().max() < 1e-12


@both_masks
@pytest.mark.parametrize("length", [1, 7, 32, 300])
def test_head_entropies_are_the_mean_over_measured_rows(causal, length):
    trace = make_trace(2, length, heads=3, size=4, width=12)
    if length <= 32:
        rows = list(range(length))
    else:  # the last of each 32nd part of 300 tokens: 9.375, 18.75, 28.125, ...
        rows = [int(300 * part / 32) - 1 for part in range(1, 33)]
        assert rows[:3] == [8, 17, 27]
        assert rows[-1] == 299
    entropies = head_entropies(trace, causal)
    for head in range(3):
        rows_BR = entropy_of(attention_matrix(trace, head, causal))[:, rows]
        torch.testing.assert_close(entropies[head], rows_BR.mean())
    assert not entropies.requires_grad


@both_masks
@every_mixing_graph
@pytest.mark.parametrize("length", [20, 300])
def test_effective_neighbours_equal_those_of_the_matrix(causal, name, length):
    config = make_config(graph=name, tau=3.0, sigma=2.0)
    graph = make(GRAPHS[name], config, make_context(causal=causal))
    r_BTE, u_BTD = leaves(2, length)
    trace = make_trace(2, length, heads=3, size=4, width=12)
    mixed = graph(r_BTE, u_BTD, BlockInput(attention=trace))
    if name == "similarity":
        s_BTT = similarity_matrix(u_BTD, config, causal)
    else:
        s_BTT = posterior_matrix(trace, 0, config, causal)
    rows = [length * part // min(length, 32) - 1 for part in range(1, min(length, 32) + 1)]
    neighbours = entropy_of(s_BTT)[:, rows].exp()
    torch.testing.assert_close(mixed.measures["effective_neighbours"], neighbours.mean().detach())
    assert not mixed.measures["effective_neighbours"].requires_grad


# The mixture by fused attention


@both_masks
@pytest.mark.parametrize("experts", [5, 40])  # fewer and more than features
@pytest.mark.parametrize("new", [1, 13, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_mixture_of_the_last_tokens_is_the_definition(causal, experts, new, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, new, 6), (2, 50, 6), (2, 50, experts))
    query, key, value = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    inputs = [query.requires_grad_(), key.requires_grad_(), value.softmax(-1).requires_grad_()]
    seen_BS = None if causal else torch.arange(50) < torch.tensor([[50], [31]])
    options = {"scale": 0.7, "causal": causal, "seen_BS": seen_BS}
    exact = Features(query, key, **options).matrix() @ inputs[2]
    ours = Features(*(x.to(dtype) for x in inputs[:2]), **options).mix(inputs[2].to(dtype))
    assert ours.dtype == dtype
    weights = torch.randn(exact.shape, generator=generator, dtype=torch.float64)
    tolerance = {"atol": 1e-12 if dtype == torch.float64 else 1e-5, "rtol": 0}
    torch.testing.assert_close(ours.double(), exact, **tolerance)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((exact * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, **tolerance)


def test_sharp_rows_are_finite_and_nan_reaches_no_earlier_token():
    query_BTF, key_BTF = 1e3 * torch.randn(2, 2, 20, 6).requires_grad_()
    value_BTE = torch.randn(2, 20, 5).softmax(-1).requires_grad_()
    mixed_BTE = Features(query_BTF, key_BTF, 0.7).mix(value_BTE)
    gradients = torch.autograd.grad(mixed_BTE.square().sum(), (query_BTF, key_BTF, value_BTE))
    assert all(x.isfinite().all() for x in (mixed_BTE, *gradients))
    key_BTF = key_BTF.detach().clone()
    key_BTF[:, 10] = torch.nan
    mixed_BTE = Features(query_BTF, key_BTF, 0.7).mix(value_BTE)
    assert mixed_BTE[:, :10].isfinite().all()
    assert mixed_BTE[:, 10:].isnan().all()


# Precision, kernels and memory


@every_mixing_graph
def test_bf16_tokens_are_mixed_in_fp32(name):
    config = make_config(graph=name)
    graph = make(GRAPHS[name], config)
    r_BTE, u_BTD = leaves(2, 40, dtype=torch.bfloat16)
    trace = make_trace(2, 40, heads=3, size=4, width=12, dtype=torch.bfloat16)
    mixed = graph(r_BTE.float(), u_BTD, BlockInput(attention=trace))
    assert mixed.scores_BTE.dtype == torch.float32
    exact = graph(
        r_BTE.double(),
        u_BTD.double(),
        BlockInput(attention=AttentionTrace(*(x.double() for x in trace))),
    )
    assert exact.scores_BTE.dtype == torch.float64
    # The same bf16 numbers; exponents of up to 100 or so, and fp32 keeps 1e-7 of them.
    torch.testing.assert_close(mixed.scores_BTE.double(), exact.scores_BTE, atol=1e-4, rtol=0)


def long_model(small_model, length, **options):
    return small_model(
        num_layers=1,
        sequence_length=length,
        feed_forward={"kind": "smoe", "num_experts": 8, "expert_hidden_size": 8} | options,
    )


@every_mixing_graph
def test_no_matrix_of_tokens_by_tokens_in_forward_and_backward(small_model, random_ids, name):
    model = long_model(small_model, 512, graph=name)
    with Watch() as watch:
        output = model(random_ids(2, 512))
        (output.logits.square().sum() + output.routing[0].losses["balance_loss"]).backward()
    # The largest that there may be are 128 query rows, and 32 measured rows of four heads: B 128 T.
    assert watch.largest <= 2 * 128 * 512
    with Watch() as watch:  # and the watch would see one
        similarity_matrix(torch.randn(2, 512, 32), make_config(), causal=True)
    assert watch.largest == 2 * 512 * 512


def saved_bytes(model, ids):
    """Bytes that the forward pass keeps for the backward pass, every storage once."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # held: no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(ids)
    del output
    return sum(size for size, _ in storages.values())


@every_mixing_graph
def test_memory_for_the_backward_pass_grows_linearly(small_model, random_ids, name):
    sizes = []
    for length in (256, 1024):
        model = long_model(small_model, length, graph=name)
        sizes.append(saved_bytes(model, random_ids(1, length)))
    assert sizes[0] > 256 * 32 * 4  # more than one activation was seen
    assert sizes[1] < 4.1 * sizes[0]
