"""What of a graph changes in training: the head of the attention graph, and whether it is on.

Shapes: B batch, T tokens in a sequence, D width, E experts, A heads.
"""

import pytest
import torch

from polyad.model.build import materialize, place
from polyad.model.feedforward import BlockInput
from polyad.model.smoe.graph import GRAPHS, AttentionGraph, SimilarityGraph, head_entropies
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
    graph.update(torch.tensor([2.0, 1.0, 3.0]), 0.5)
    torch.testing.assert_close(graph.head_entropy, torch.tensor([0.02, 0.01, 0.03]))
    assert_head(1)
    graph.update(torch.tensor([0.5, 1.0, 3.0]), 0.5)
    torch.testing.assert_close(graph.head_entropy, torch.tensor([0.0248, 0.0199, 0.0597]))
    assert_head(1)  # one step's entropies alone decide nothing
    for _ in range(2):
        graph.update(torch.tensor([0.5, 2.0, 3.0]), 0.5)
    # 0.0248 -> 0.029552 -> 0.0342565; 0.0199 -> 0.039701 -> 0.0593040.
    assert_head(0)
    graph.update(None, 0.5)  # a step that measured nothing
    torch.testing.assert_close(graph.head_entropy[0].item(), 0.0342565, atol=1e-6, rtol=0)


def test_a_model_learns_its_head_from_the_statistics(small_model, random_ids):
    model = small_model(
        dtype=torch.float64, feed_forward={"kind": "smoe", "graph": "attention", "experts": "loop"}
    )
    layer = model.blocks[0].feed_forward
    with torch.no_grad():  # the queries of head 2 make its attention sharp
        model.blocks[0].attention.qkv.weight[16:24] *= 1000
    ids = random_ids(2, 16)
    first = model(ids)
    stats = first.routing[0]
    assert stats.head_entropy_A.argmin() == 2
    layer.update(stats, progress=0.1)
    torch.testing.assert_close(layer.router.graph.head_entropy, 0.01 * stats.head_entropy_A.float())
    second = model(ids)
    assert second.routing[0].effective_neighbours != stats.effective_neighbours
    assert not torch.equal(first.logits, second.logits)
    # The entropies themselves are of the same attention as before.
    assert torch.equal(second.routing[0].head_entropy_A, stats.head_entropy_A)


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
    assert mixed.head_entropy_A is None
    assert mixed.attention_head.item() == head
    graph.update(None, 0.5)
    assert graph.attention_head().tolist() == [head]


def test_the_statistics_name_the_head_that_made_the_mixture():
    graph = make(AttentionGraph, make_config(graph="attention"))
    r_BTE, u_BTD = leaves(2, 20)
    trace = make_trace(2, 20, heads=3, size=4, width=12)
    for head in (0, 2, 1):
        graph.head_entropy[head] = graph.head_entropy.min() - 1.0
        mixed = graph(r_BTE, u_BTD, BlockInput(attention=asked_for(trace, head)))
        assert (mixed.attention_head.shape, mixed.attention_head.item()) == ((), head)


def test_all_heads_start_alike():
    with torch.device("meta"):
        graph = AttentionGraph(make_config(graph="attention"), make_context())
    materialize(graph, seed=0, dtype=torch.bfloat16)
    assert torch.equal(graph.head_entropy, torch.zeros(3))


# A graph that begins later


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in GRAPHS if name != "none"), ("attention", {"attention_head": 1})],
    ids=str,
)
def test_a_graph_that_is_off_mixes_nothing_until_its_share_of_the_steps(name, options):
    config = make_config(graph=name, graph_from=0.5, **options)
    graph, always = (make(GRAPHS[name], c) for c in (config, make_config(graph=name, **options)))
    r_BTE, u_BTD = leaves(2, 20)
    trace = asked_for(
        make_trace(2, 20, heads=3, size=4, width=12), options.get("attention_head", 0)
    )
    measured = name == "attention" and not options
    entropies = head_entropies(trace, causal=True) if measured else None

    def mixes():
        mixed = graph(r_BTE, u_BTD, BlockInput(attention=trace))
        if not measured:
            assert mixed.head_entropy_A is None
        else:  # to know the head when the graph begins
            torch.testing.assert_close(mixed.head_entropy_A, entropies)
        if mixed.scores_BTE is r_BTE:
            assert mixed.effective_neighbours is mixed.attention_head is None
            return False
        expected = always(r_BTE, u_BTD, BlockInput(attention=trace))
        assert torch.equal(mixed.scores_BTE, expected.scores_BTE)
        assert torch.equal(mixed.effective_neighbours, expected.effective_neighbours)
        return True

    # Four steps: two without, and two with the graph. It stays on if the run is made longer.
    for progress, expected in ((0.0, False), (0.25, False), (0.5, True), (0.75, True), (0.3, True)):
        graph.update(None, progress)
        assert mixes() == expected, progress
        assert graph.started.item() == expected


def test_a_graph_begins_at_the_step_that_it_should_in_spite_of_rounding():
    for steps in (7, 22, 49):
        for first in range(1, steps):
            config = make_config(graph="similarity", graph_from=first / steps)
            graph, off = make(SimilarityGraph, config), 0
            for step in range(1, steps + 1):
                off += not graph.is_on
                graph.update(None, step / steps)
            assert off == first


def test_the_head_is_chosen_while_the_graph_is_off():
    graph = make(AttentionGraph, make_config(graph="attention", graph_from=0.5))
    graph.update(torch.tensor([2.0, 1.0, 3.0]), 0.1)
    assert not graph.is_on
    assert graph.attention_head().tolist() == [1]
    fixed = make(AttentionGraph, make_config(graph="attention", graph_from=0.5, attention_head=1))
    assert fixed.attention_head() is None  # attention keeps nothing for it
    fixed.update(None, 0.5)
    assert fixed.attention_head().tolist() == [1]


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "none"])
def test_whether_a_graph_is_on_is_read_from_the_buffer_when_it_was_loaded(
    small_model, random_ids, name
):
    section = {"kind": "smoe", "num_experts": 8, "experts": "loop"}

    def made(**options):
        return small_model(dtype=torch.float64, feed_forward=section | options)

    late, ids = made(graph=name, graph_from=0.5, tau=4.0, sigma=2.0), random_ids(2, 16)
    plain, always = made(), made(graph=name, tau=4.0, sigma=2.0)
    with torch.no_grad():
        assert torch.equal(late(ids).logits, plain(ids).logits)
        stored = [name for name, _ in late.named_buffers() if name.endswith("graph.started")]
        assert len(stored) == 3
        place(late, ((name, torch.tensor(1.0)) for name in stored), dtype=torch.float64)
        assert torch.equal(late(ids).logits, always(ids).logits)
        assert not torch.equal(late(ids).logits, plain(ids).logits)
        place(late, ((name, torch.tensor(0.0)) for name in stored), dtype=torch.float64)
        assert torch.equal(late(ids).logits, plain(ids).logits)
