"""What of a graph changes in training: the head of the attention graph, and whether it is on.

Shapes: B batch, T tokens in a sequence, D width, E experts, A heads.
"""

import pytest
import torch

from polyad.model.build import materialize
from polyad.model.feedforward import BlockInput
from polyad.model.smoe.graph import AttentionGraph
from tests.helpers.routing import (
    asked_for,
    assert_same_with_gradients,
    leaves,
    leaves_of,
    make,
    make_config,
    make_context,
    make_trace,
    posterior_matrix,
)

# The head


def test_the_head_is_the_one_of_least_running_entropy_and_changes_with_it():
    config = make_config(graph="attention")
    graph = make(AttentionGraph, config)
    r_BTE, u_BTD = leaves(2, 20)
    trace = make_trace(2, 20, heads=3, size=4, width=12)
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


def test_a_model_learns_its_head_from_the_statistics(small_model, random_ids):
    model = small_model(dtype=torch.float64, feed_forward={"kind": "smoe", "graph": "attention"})
    layer = model.blocks[0].feed_forward
    with torch.no_grad():  # the queries of head 2 make its attention sharp
        model.blocks[0].attention.qkv.weight[16:24] *= 1000
    ids = random_ids(2, 16)
    first = model(ids)
    stats = first.routing[0]
    assert stats.measures["head_entropy_A"].argmin() == 2
    layer.update(stats, progress=0.1)
    torch.testing.assert_close(
        layer.router.graph.head_entropy, 0.01 * stats.measures["head_entropy_A"].float()
    )
    second = model(ids)
    assert (
        second.routing[0].measures["effective_neighbours"] != stats.measures["effective_neighbours"]
    )
    assert not torch.equal(first.logits, second.logits)
    # The entropies themselves are of the same attention as before.
    assert torch.equal(
        second.routing[0].measures["head_entropy_A"], stats.measures["head_entropy_A"]
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head", [0, 2])
def test_a_fixed_head_is_the_one_of_its_number(causal, head):
    config = make_config(graph="attention", attention_head=head)
    graph = make(AttentionGraph, config, make_context(causal=causal))
    assert graph.state_dict() == {}  # no running mean, and nothing that a checkpoint has
    assert graph.attention_head().tolist() == [head]
    r_BTE, u_BTD = leaves(2, 20)
    trace = make_trace(2, 20, heads=3, size=4, width=12)
    mixed = graph(r_BTE, u_BTD, BlockInput(attention=asked_for(trace, head)))
    s_BTT = posterior_matrix(trace, head, config, causal)
    assert_same_with_gradients(mixed.scores_BTE, s_BTT @ r_BTE, (r_BTE, *leaves_of(trace)))
    assert mixed.measures.get("head_entropy_A") is None
    assert mixed.measures["attention_head"].item() == head
    graph.update({})
    assert graph.attention_head().tolist() == [head]


def test_the_statistics_name_the_head_that_made_the_mixture():
    graph = make(AttentionGraph, make_config(graph="attention"))
    r_BTE, u_BTD = leaves(2, 20)
    trace = make_trace(2, 20, heads=3, size=4, width=12)
    for head in (0, 2, 1):
        graph.head_entropy[head] = graph.head_entropy.min() - 1.0
        mixed = graph(r_BTE, u_BTD, BlockInput(attention=asked_for(trace, head)))
        assert (
            mixed.measures["attention_head"].shape,
            mixed.measures["attention_head"].item(),
        ) == ((), head)


def test_all_heads_start_alike():
    with torch.device("meta"):
        graph = AttentionGraph(make_config(graph="attention"), make_context())
    materialize(graph, seed=0, dtype=torch.bfloat16)
    assert torch.equal(graph.head_entropy, torch.zeros(3))
