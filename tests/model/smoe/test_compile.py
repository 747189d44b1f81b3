"""Layers of sparse experts under torch.compile: the same numbers, and no break in the graph."""

import pytest
import torch
from torch import _dynamo

from polyad.model.build import compile_model
from polyad.model.output import ask_for_statistics
from polyad.model.smoe.router import SCORES
from tests.helpers.everyday import everyday
from tests.helpers.routed_models import (
    GRAPH_OPTIONS,
    assert_compiles,
    assert_same_step,
    every_graph,
    routed,
    step,
)


@pytest.mark.slow
def test_noise_and_dropout_of_experts_are_traced_whole(small_model, random_ids):
    options = {"router_noise": 1.0, "expert_dropout": 0.2}
    model, ids = routed(small_model, options), random_ids(2, 16)
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    for value in step(model, ids).values():
        assert value.isfinite().all()
    assert not _dynamo.utils.counters["graph_break"]


def both(small_model, options, recompute="none"):
    return routed(small_model, options), routed(small_model, options, recompute=recompute)


@everyday(
    ("graph", "recompute"),
    [("similarity", "none"), ("attention", "block"), ("one head's own values", "none")],
    keep=[("attention", "block")],
)
def test_graphs_are_traced_whole(small_model, random_ids, graph, recompute):
    # All of torch.compile but the code generator, which takes half a minute for each of these.
    models = both(small_model, GRAPH_OPTIONS[graph], recompute)
    assert_compiles(*models, random_ids(2, 16), backend="aot_eager")


@pytest.mark.slow
def test_steps_without_a_record_take_a_second_program_and_no_more(small_model, random_ids):
    model, ids = routed(small_model, GRAPH_OPTIONS["similarity"]), random_ids(2, 16)
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    compile_model(model, backend="eager")
    asked, steps = frozenset({"balance_loss"}), []
    for is_due in (False, True, False, False, True):
        model.zero_grad()
        ask_for_statistics(model, losses=asked, samples=False, record_is_due=is_due)
        loss, routing = model(ids, target_ids_BT=ids.roll(-1, 1))
        (loss + sum(0.01 * each.losses["balance_loss"] for each in routing)).backward()
        steps.append({name: p.grad for name, p in model.named_parameters()} | {"loss": loss})
        assert all((each.measures.get("entropy") is not None) == is_due for each in routing)
        assert all((each.losses.get("z_loss") is not None) == is_due for each in routing)
    for other in steps[1:]:
        assert_same_step(other, steps[0], tolerance=1e-6)
    # As in any model three; a second one of the blocks.
    assert _dynamo.utils.counters["stats"]["unique_graphs"] == 4
    assert not _dynamo.utils.counters["graph_break"]


def test_bf16_is_traced_whole(small_model, random_ids):
    ids, options = random_ids(2, 16), {"graph": "attention", "top_k": 6}
    model = routed(small_model, options, dtype=torch.bfloat16)
    expected = step(model, ids)["logits"]
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    torch.testing.assert_close(step(model, ids)["logits"], expected, atol=0.02, rtol=0.02)
    assert not _dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@every_graph
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_any_graph_compiles(small_model, random_ids, options, recompute):
    models = both(small_model, options | {"balancing_rate": 0.1}, recompute)
    assert_compiles(*models, random_ids(2, 16))


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
def test_any_score_compiles(small_model, random_ids, score):
    models = both(small_model, {"score": score, "final_top_k": 4})
    assert_compiles(*models, random_ids(2, 16))


@pytest.mark.slow
def test_a_growing_k_is_followed_by_compiled_blocks(small_model, random_ids):
    ids, options = random_ids(2, 16), {"top_k": 1, "final_top_k": 3}
    _dynamo.reset()
    compiled, plain = (routed(small_model, options) for _ in range(2))
    compile_model(compiled)
    for progress in (0.0, 0.4, 0.7):
        for model in (compiled, plain):
            for block, stats in zip(model.blocks, model(ids).routing, strict=True):
                block.feed_forward.update(stats, progress)
        torch.testing.assert_close(compiled(ids).logits, plain(ids).logits, atol=2e-5, rtol=2e-5)
    assert compiled.blocks[0].feed_forward.router.selection.top_k == 3
