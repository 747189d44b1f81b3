"""Graphs of tokens: against their definitions with materialized matrices, and without any.

Shapes: B batch, T tokens in a sequence, D width, E experts, A heads, H width of one head.
"""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from polyad.model.attention import SelfAttention
from polyad.model.feedforward import BlockInput
from polyad.model.smoe.graph import GRAPHS, AttentionGraph, Features, head_entropies
from tests.helpers.allocated import Observed
from tests.helpers.routing import (
    assert_same_with_gradients,
    make,
    make_config,
    make_context,
    make_trace,
    scatter,
)


def asked_for(trace, head):
    """The trace of an attention that was asked for another head."""
    return trace._replace(of_head_BT3H=trace.qkv_BT3AH.select(3, head))


def seen_by(length, causal):
    """[T, T]: whether token i may know of token j."""
    whole = torch.ones(length, length, dtype=torch.bool)
    return whole.tril() if causal else whole


def similarity_matrix(u_BTD, config, causal):
    """S of the similarity graph, by its definition."""
    if config.similarity == "cosine":
        u_BTD = u_BTD / u_BTD.norm(dim=-1, keepdim=True)
    logits_BTT = u_BTD @ u_BTD.transpose(1, 2) / config.tau
    seen_TT = seen_by(u_BTD.shape[1], causal)
    return logits_BTT.masked_fill(~seen_TT, -torch.inf).softmax(-1)


def attention_matrix(trace, head, causal):
    """The attention of one head."""
    q_BTH, k_BTH, _ = trace.qkv_BT3AH[..., head, :].unbind(2)
    logits_BTT = q_BTH @ k_BTH.transpose(1, 2) / q_BTH.shape[-1] ** 0.5
    return logits_BTT.masked_fill(~seen_by(q_BTH.shape[1], causal), -torch.inf).softmax(-1)


def posterior_matrix(trace, head, config, causal):
    """S of the attention-aware graph, by its definition: prior times likelihood, normalized."""
    heads, size = trace.qkv_BT3AH.shape[3:]
    weight_DH = trace.output_weight_DM[:, head * size : (head + 1) * size]
    m_BTD = trace.qkv_BT3AH[:, :, 2, head] @ weight_DH.T
    if config.head_mean:
        m_BTD = heads * m_BTD
    o_BTD = trace.output_BTD
    if trace.output_bias_D is not None:
        o_BTD = o_BTD - trace.output_bias_D
    distance_BTT = torch.cdist(o_BTD, m_BTD, compute_mode="donot_use_mm_for_euclid_dist")
    likelihood_BTT = torch.exp(-(distance_BTT**2) / (2 * config.sigma**2))
    joint_BTT = attention_matrix(trace, head, causal) * likelihood_BTT
    return joint_BTT / joint_BTT.sum(-1, keepdim=True)


def entropy_of(weights):
    """Entropy over the last dimension, in nats."""
    return -(weights * (weights + (weights == 0)).log()).sum(-1)


class Watch(Observed):
    """Sees the sizes of what every operation gives, those of the backward pass too."""

    def __init__(self):
        super().__init__(self.see)
        self.largest = 0

    def see(self, func, args, kwargs, result):
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *sizes])


def leaves(batch, length, width=12, experts=6, dtype=torch.float64):
    """Scores r and tokens u that ask for their gradients."""
    r_BTE = (2 * torch.randn(batch, length, experts, dtype=torch.float64)).softmax(-1)
    u_BTD = torch.randn(batch, length, width, dtype=torch.float64)
    return tuple(x.to(dtype).requires_grad_() for x in (r_BTE, u_BTD))


both_masks = pytest.mark.parametrize("causal", [True, False])
every_mixing_graph = pytest.mark.parametrize("name", [name for name in GRAPHS if name != "none"])


OPTIONS = [
    {"graph": "similarity"},
    {"graph": "similarity", "tau": 2.5},
    {"graph": "similarity", "similarity": "cosine", "tau": 0.3},
    *(
        {"graph": "attention"} | options
        for options in (
            *({}, {"sigma": 2.5}, {"head_mean": False}, {"head_mean": False, "sigma": 0.4}),
            {"attention_head": 1},
        )
    ),
]


@both_masks
@pytest.mark.parametrize("length", [1, 20, 300])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_graph_is_its_definition(causal, length, options):
    config = make_config(**options)
    graph = make(GRAPHS[config.graph], config, make_context(causal=causal))
    r_BTE, u_BTD = leaves(2, length)
    if config.graph == "similarity":
        trace, s_BTT, inputs = None, similarity_matrix(u_BTD, config, causal), (u_BTD,)
    else:
        head = options.get("attention_head", 2)
        if "attention_head" in options:  # there is no running mean
            assert graph.state_dict() == {}
        else:
            graph.head_entropy[head] = -1.0
        assert graph.attention_head().tolist() == [head]
        trace = asked_for(make_trace(length), head)
        s_BTT = posterior_matrix(trace, head, config, causal)
        inputs = [x for x in trace if x.is_leaf]
    mixed = graph(r_BTE, u_BTD, BlockInput(attention=trace))
    inputs = (r_BTE, *inputs) if length > 1 else (r_BTE,)
    assert_same_with_gradients(mixed.scores_BTE, s_BTT @ r_BTE, inputs)
    rows = [length * part // min(length, 32) - 1 for part in range(1, min(length, 32) + 1)]
    neighbours = mixed.measures["effective_neighbours"]
    torch.testing.assert_close(neighbours, entropy_of(s_BTT)[:, rows].exp().mean().detach())
    assert not neighbours.requires_grad
    if trace is not None:
        assert mixed.measures["attention_head"].item() == head


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
        @ trace.qkv_BT3AH[:, :, 2, head]
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
    trace = make_trace(length)
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


@every_mixing_graph
def test_no_matrix_of_tokens_by_tokens_in_forward_and_backward(small_model, random_ids, name):
    section = {"kind": "smoe", "num_experts": 8, "expert_hidden_size": 8, "graph": name}
    model = small_model(num_layers=1, sequence_length=512, feed_forward=section)
    with Watch() as watch:
        output = model(random_ids(2, 512))
        (output.logits.square().sum() + output.routing[0].losses["balance_loss"]).backward()
    # The largest that there may be are 128 query rows, and 32 measured rows of four heads: B 128 T.
    assert watch.largest <= 2 * 128 * 512
    with Watch() as watch:  # and the watch would see one
        similarity_matrix(torch.randn(2, 512, 32), make_config(), causal=True)
    assert watch.largest == 2 * 512 * 512


def test_the_head_is_the_one_of_least_running_entropy_and_changes_with_it():
    config = make_config(graph="attention")
    graph = make(AttentionGraph, config)
    r_BTE, u_BTD = leaves(2, 20)
    trace = make_trace(20)
    per_head = [posterior_matrix(trace, head, config, True) @ r_BTE for head in range(3)]
    assert (per_head[1] - per_head[0]).abs().max() > 0.1

    def assert_head(head):
        before = graph.head_entropy.clone()
        assert graph.attention_head().tolist() == [head]
        mixed = graph(r_BTE, u_BTD, BlockInput(attention=asked_for(trace, head)))
        torch.testing.assert_close(mixed.scores_BTE, per_head[head])
        assert torch.equal(graph.head_entropy, before)  # forward only reads

    assert_head(0)
    # A hundredth of each: 0.02, 0.01, 0.03. Then 0.99 x 0.02 + 0.01 x 0.5 = 0.0248 and
    # 0.99 x 0.01 + 0.01 x 1.0 = 0.0199, and so on.
    graph.update({"head_entropy_A": torch.tensor([2.0, 1.0, 3.0])})
    torch.testing.assert_close(graph.head_entropy, torch.tensor([0.02, 0.01, 0.03]))
    assert_head(1)
    graph.update({"head_entropy_A": torch.tensor([0.5, 1.0, 3.0])})
    torch.testing.assert_close(graph.head_entropy, torch.tensor([0.0248, 0.0199, 0.0597]))
    assert_head(1)  # one step's entropies alone decide nothing
    for _ in range(2):
        graph.update({"head_entropy_A": torch.tensor([0.5, 2.0, 3.0])})
    # 0.0248 -> 0.029552 -> 0.0342565; 0.0199 -> 0.039701 -> 0.0593040.
    assert_head(0)
    graph.update({})  # a step that measured nothing
    torch.testing.assert_close(graph.head_entropy[0].item(), 0.0342565, atol=1e-6, rtol=0)
