"""The router: any score with any graph, and what it must not do."""

import pytest
import torch

from polyad.model.build import build_model
from polyad.model.feedforward import BlockInput
from polyad.model.smoe.graph import GRAPHS
from polyad.model.smoe.router import SCORES, make_router
from tests.helpers.definitions import by_definition
from tests.helpers.routing import make, make_config, make_context, make_trace

every_score = pytest.mark.parametrize("score", SCORES)
every_graph = pytest.mark.parametrize("graph", GRAPHS)


@every_score
@every_graph
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_any_score_goes_with_any_graph(score, graph, top_k):
    config = make_config(score=score, graph=graph, top_k=top_k)
    router = make(make_router, config)
    u_BTD = torch.randn(2, 9, 12, dtype=torch.float64)
    trace = make_trace(2, 9, heads=3, size=4, width=12)
    (weights_NK, expert_ids_NK, *_), stats = router(u_BTD, BlockInput(attention=trace))
    # The parts, one after the other.
    r_BTE = router.score(u_BTD.flatten(0, 1)).softmax(-1).unflatten(0, (2, 9))
    p_NE = router.graph(r_BTE, u_BTD, BlockInput(attention=trace)).scores_BTE.flatten(0, 1)
    torch.testing.assert_close(p_NE.sum(-1), torch.ones(18, dtype=torch.float64))
    highest = p_NE.topk(top_k)
    assert torch.equal(expert_ids_NK, highest.indices)
    total = highest.values.sum(-1, keepdim=True) if top_k > 1 else 1.0
    torch.testing.assert_close(weights_NK, highest.values / total)
    assert stats.name == ""
    assert (stats.measures.get("effective_neighbours") is None) == (graph == "none")
    assert (stats.measures.get("head_entropy_A") is None) == (graph != "attention")
    assert (stats.measures.get("attention_head") is None) == (graph != "attention")


@every_score
@every_graph
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_output_teaches_the_router_for_any_k(small_model, random_ids, score, graph, top_k):
    options = {"kind": "smoe", "score": score, "graph": graph, "top_k": top_k}
    model = small_model(dtype=torch.float64, feed_forward=options)
    ids = random_ids(2, 16)
    model(ids).logits.logsumexp(-1).sum().backward()
    # A frozen score passes its gradient on to the tokens only, as everything here does.
    learned = dict(model.blocks[0].feed_forward.router.named_parameters())
    assert (learned == {}) == (score == "random")
    for name, parameter in learned.items():
        assert parameter.grad.abs().max() > 1e-9, name


@every_graph
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_routing_is_fp32_in_a_bf16_model_and_float64_in_a_float64_one(graph, dtype):
    router = make(make_router, make_config(graph=graph, balancing_rate=0.1), dtype=dtype)
    expected = torch.promote_types(dtype, torch.float32)
    trace = make_trace(2, 9, heads=3, size=4, width=12, dtype=dtype)
    selected, stats = router(torch.randn(2, 9, 12, dtype=dtype), BlockInput(attention=trace))
    assert selected.weights_NK.dtype == expected
    for name, value in stats.tensors().items():
        assert value.dtype == (torch.int64 if name == "attention_head" else expected), name


@every_graph
def test_update_reaches_the_balancing_bias_k_and_the_head(graph):
    config = make_config(graph=graph, balancing_rate=0.1, top_k=1, final_top_k=4)
    router = make(make_router, config, dtype=torch.float32)
    trace = make_trace(2, 9, heads=3, size=4, width=12, dtype=torch.float32)
    u_BTD = torch.randn(2, 9, 12)
    before = {name: buffer.clone() for name, buffer in router.named_buffers()}
    _, stats = router(u_BTD, BlockInput(attention=trace))
    for name, buffer in router.named_buffers():
        assert torch.equal(buffer, before[name]), name
    router.update(stats, progress=0.5)
    for name, buffer in router.named_buffers():
        assert not torch.equal(buffer, before[name]), name
    selected, _ = router(u_BTD, BlockInput(attention=trace))
    assert selected.expert_ids_NK.shape == (18, 3)


@every_graph
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_reads_no_number_from_the_device(small_config, graph, dtype):
    # Tensors on the meta device have no numbers: whatever would wait for one fails.
    options = {"graph": graph, "kind": "smoe", "balancing_rate": 0.1, "final_top_k": 4}
    model = build_model(small_config(feed_forward=options)).to(dtype)
    output = model(torch.zeros(2, 16, dtype=torch.int64, device="meta"))
    losses = sum(stats.losses["balance_loss"] + stats.losses["z_loss"] for stats in output.routing)
    (output.logits.sum() + losses).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    for stats in output.routing:
        assert stats.load_E.is_meta


def test_the_loop_does_read_numbers(small_config):
    model = build_model(small_config(feed_forward={"kind": "smoe"}))
    with by_definition(), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        model(torch.zeros(2, 16, dtype=torch.int64, device="meta"))


def test_a_context_without_heads_serves_every_other_graph():
    for graph in ("none", "similarity"):
        make(make_router, make_config(graph=graph), make_context(num_heads=None))
