"""Experts over processes compute what one process computes."""

import itertools

import pytest
import torch

from polyad.train.loop.losses import LossConfig
from tests.helpers.breaks import breaks_of_a_step
from tests.helpers.everyday import everyday
from tests.helpers.experts import (
    PATTERNS,
    dispatch_against_one_process,
    drops_of_experts,
    exchange_of_one_layer,
    logits_and_ids,
)
from tests.helpers.pairwise import pairwise
from tests.helpers.parity import assert_near_state, assert_same_course, assert_same_routing, near
from tests.helpers.training import MODEL, Case, moe_model, train, train_one_expert

pytestmark = pytest.mark.distributed

# (processes, tensor-parallel ones, expert-parallel ones)
LAYOUTS = [(1, 1, 1), (2, 1, 2), (4, 1, 2), (4, 1, 4), (4, 2, 2), (2, 1, 1), (2, 2, 1)]
SCORES = ["linear", "cosine", "random"]
GRAPHS = ["none", "similarity", "attention"]
EVERYDAY = [
    ((4, 2, 2), 2, "random", "similarity", 0.5),
    ((4, 2, 2), 1, "linear", "attention", 0.5),
    ((4, 1, 4), 1, "cosine", "attention", 0.5),
    ((2, 1, 2), 1, "linear", "none", 0.5),
    ((4, 2, 2), 3, "cosine", "attention", 0.5),
]
CASES = pairwise(itertools.product(LAYOUTS, [1, 2, 3], SCORES, GRAPHS, [0.5, 0.0]), EVERYDAY)
LOSSES = LossConfig(load_balance=0.01, router_z=0.001)


def name(layout):
    processes, tensor, expert = layout
    return f"{processes} processes, TP {tensor}, EP {expert}"


def model(score, graph, **others):
    # With state of every kind: a balancing bias, head entropies, a frozen score.
    section = {"score": score, "graph": graph, "similarity": "cosine", "balancing_rate": 0.01}
    return moe_model(**section | others)


@everyday(("layout", "stage", "score", "graph", "clip"), CASES, EVERYDAY)
def test_sgd_gives_equal_losses_norms_routing_and_weights(
    workers, whole_runs, tmp_path, layout, stage, score, graph, clip
):
    case = Case(
        optimizer="sgd", learning_rate=0.1, clip=clip, model=model(score, graph), losses=LOSSES
    )
    expected, saved = whole_runs(case)
    assert all(norm > 0.5 for norm in expected["norms"])  # so that a clip of 0.5 is active
    processes, tensor, expert = layout
    case = case.but(stage=stage, tensor=tensor, expert=expert, save_to=str(tmp_path))
    results = workers(processes).run(train, case)
    assert all(result == results[0] for result in results)
    assert_same_course(results[0], expected)
    assert_same_routing(results[0], expected)
    assert_near_state(tmp_path / "step-00000004", saved)


@everyday(
    "section",
    [
        {"graph": "attention"},
        {"graph": "similarity", "tau": 0.5},
        {"graph": "similarity", "similarity": "dot", "tau": 6.0},
        {"graph": "attention", "sigma": 0.3, "score": "cosine", "score_width": 3},
        {"graph": "attention", "attention_head": 3, "sigma": 3.0},  # of the second process
        {"graph": "attention", "attention_head": 0, "head_mean": False},
        {"combine": "softmax"},
        {"router_bias": False},
        {"placement": 2},
        {"top_k": 1},
        {"top_k": 4},
        {"num_experts": 8, "top_k": 3},
        {"score": "random", "top_k": 1, "final_top_k": 4},
        {"experts": "loop"},
    ],
    keep=[{"graph": "similarity", "tau": 0.5}, {"combine": "softmax"}],
    ids=str,
)  # fmt: skip
def test_every_option_gives_equal_results(workers, whole_runs, section):
    losses = LossConfig(load_balance=0.01, router_z=0.001, importance=0.05)
    case = Case(
        optimizer="sgd", learning_rate=0.1, clip=0.5, model=moe_model(**section), losses=losses,
        total_steps=4,
    )  # fmt: skip
    expected, _ = whole_runs(case)
    result = workers(4).run(train, case.but(stage=1, tensor=2, expert=2))[0]
    assert_same_course(result, expected)
    assert_same_routing(result, expected)
    if section.get("graph") == "attention":
        key = "routing/blocks.1.feed_forward/attention_head"
        assert all(key in record for record in result["routing"])
        if "attention_head" in section:
            heads = {record[key] for record in result["routing"] if key in record}
            assert heads == {section["attention_head"]}


@everyday(
    ("layout", "stage"),
    itertools.product(LAYOUTS[1:], [1, 2, 3]),
    keep=[((4, 2, 2), 1), ((4, 1, 4), 2)],
    ids=lambda case: f"{name(case[0])}-{case[1]}",
)
def test_adamw_gives_equal_losses(workers, whole_runs, layout, stage):
    case = Case(learning_rate=1e-3, model=model("linear", "similarity"))
    expected, _ = whole_runs(case)
    processes, tensor, expert = layout
    case = case.but(stage=stage, tensor=tensor, expert=expert)
    assert near(workers(processes).run(train, case)[0]["losses"], expected["losses"])


@everyday("stage", [1, 2, 3], keep=[2])
@everyday("layout", [(2, 1, 2), (4, 2, 2)], keep=[(4, 2, 2)], ids=name)
def test_bf16_stays_near_fp32(workers, whole_runs, layout, stage):
    # Widths that are multiples of 8, which the grouped product takes in bf16.
    case = Case(
        learning_rate=1e-3,
        model=model("linear", "none").model_copy(update={"hidden_size": 32}),
    )
    expected, _ = whole_runs(case)
    processes, tensor, expert = layout
    case = case.but(stage=stage, tensor=tensor, expert=expert, precision="bf16")
    losses = workers(processes).run(train, case)[0]["losses"]
    assert near(losses, expected["losses"], 3e-3)


@everyday("change", [{"recompute": "block"}, {"compile": True}], [{"recompute": "block"}], ids=str)
@everyday("graph", GRAPHS, keep=["attention"])
def test_recomputation_and_compilation_change_nothing(workers, whole_runs, change, graph):
    case = Case(optimizer="sgd", learning_rate=0.1, clip=0.5, model=model("linear", graph))
    expected, _ = whole_runs(case)
    changed = case.model.model_copy(update=change)
    result = workers(2).run(train, case.but(stage=1, expert=2, model=changed))[0]
    assert_same_course(result, expected)
    assert_same_routing(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_compiler_traces_exchanging_experts_whole(workers, graph):
    case = Case(stage=1, expert=2, model=model("linear", graph))
    assert workers(2).run(breaks_of_a_step, case) == [[], []]


@pytest.mark.parametrize(("parts", "processes"), [(2, 2), (2, 4), (4, 4)])
def test_the_exchange_sends_each_row_once_each_way(workers, parts, processes):
    # Even routing: a process keeps 1/EP of its K T rows, and nothing but all-to-all is called.
    tokens, config = 32, moe_model()
    away = 2 * tokens * (parts - 1) // parts
    for forward, backward in workers(processes).run(exchange_of_one_layer, config, parts, tokens):
        for way in (forward, backward):
            assert way["sent"] == [away, away]
            assert way["numbers"] == 2 * away * config.hidden_size
            assert way["others"] == []


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("parts", "processes"), [(2, 2), (4, 4)])
def test_any_load_gives_what_one_process_gives(workers, parts, processes, pattern):
    for bias in (True, False):
        config = moe_model().model_copy(update={"bias": bias})
        results = workers(processes).run(dispatch_against_one_process, config, parts, pattern)
        assert all(max(result.values()) < 1e-5 for result in results)


@everyday("stage", [1, 3], keep=[3])
def test_processes_whose_experts_get_no_row_keep_in_step(workers, tmp_path, stage):
    case = Case(optimizer="sgd", learning_rate=0.1, clip=0.5, model=moe_model(top_k=1))
    expected = workers(1).run(train_one_expert, case.but(save_to=str(tmp_path / "one")))[0]
    loads = [record["routing/blocks.0.feed_forward/load"] for record in expected["routing"]]
    assert loads == [[1.0, 0.0, 0.0, 0.0]] * 4
    case = case.but(stage=stage, expert=2, save_to=str(tmp_path))
    for result in workers(4).run(train_one_expert, case):
        assert_same_course(result, expected)
    assert_near_state(tmp_path / "step-00000004", tmp_path / "one" / "step-00000004")


@pytest.mark.slow
def test_recomputation_at_stage_3_changes_nothing(workers, whole_runs):
    case = Case(optimizer="sgd", learning_rate=0.1, clip=0.5, model=model("cosine", "attention"))
    expected, _ = whole_runs(case)
    changed = case.model.model_copy(update={"recompute": "block"})
    case = case.but(stage=3, expert=2, model=changed)
    assert_same_course(workers(4).run(train, case)[0], expected)


@pytest.mark.parametrize("graph", GRAPHS)
@everyday("score", SCORES, keep=["cosine"])
def test_spread_experts_see_no_future(workers, score, graph):
    config = model(score, graph)
    assert config.vocab_size is not None
    ids_BT = torch.randint(config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(3))
    (before, chosen), (same, _) = workers(2).run(logits_and_ids, config, 2, ids_BT)
    torch.testing.assert_close(same, before, atol=1e-10, rtol=0)
    for last in (0, 7, 14):
        changed_BT = ids_BT.clone()
        changed_BT[:, last + 1 :] = (changed_BT[:, last + 1 :] + 1) % config.vocab_size
        after, chosen_after = workers(2).run(logits_and_ids, config, 2, changed_BT)[0]
        seen = slice(None, last + 1)
        torch.testing.assert_close(after[:, seen], before[:, seen], atol=1e-10, rtol=0)
        for a, b in zip(chosen, chosen_after, strict=True):
            assert torch.equal(a.view(2, 16, -1)[:, seen], b.view(2, 16, -1)[:, seen])
        assert not torch.allclose(after, before, atol=1e-10, rtol=0)
        prefix, _ = workers(2).run(logits_and_ids, config, 2, ids_BT[:, seen])[0]
        torch.testing.assert_close(prefix, before[:, seen], atol=1e-10, rtol=0)


def test_one_process_and_two_choose_the_same_experts(workers):
    config = model("linear", "attention")
    ids_BT = torch.randint(MODEL.vocab_size or 0, (2, 16))
    one, one_ids = workers(1).run(logits_and_ids, config, 1, ids_BT)[0]
    two, two_ids = workers(2).run(logits_and_ids, config, 2, ids_BT)[0]
    torch.testing.assert_close(two, one, atol=1e-10, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(one_ids, two_ids, strict=True))


# Noise and dropout


def test_tensor_parallel_processes_draw_the_noise_of_one_process(workers, whole_runs):
    losses = LossConfig(importance=0.05, load=0.05)
    case = Case(
        optimizer="sgd", learning_rate=0.1, losses=losses, model=moe_model(router_noise=2.0)
    )
    expected, _ = whole_runs(case)
    result = workers(2).run(train, case.but(stage=1, tensor=2))[0]
    assert_same_course(result, expected)
    assert_same_routing(result, expected)
    assert all(record["routing/load_loss"] > 0 for record in result["routing"])


def test_tensor_parallel_processes_drop_other_inner_units_and_go_on_alike(workers):
    case = Case(tensor=2, model=moe_model(expert_dropout=0.5))
    first, second = workers(2).run(drops_of_experts, case)
    assert first["inner"] != second["inner"]
    assert 0.4 < first["inner"].count(0.0) / 1000 < 0.6
    assert first["after"] == second["after"]
    noisy = moe_model(expert_dropout=0.5, router_noise=1.0)
    recomputing = noisy.model_copy(update={"recompute": "block"})
    plain, again = (
        workers(2).run(train, case.but(model=model, stage=1, last_step=2))
        for model in (noisy, recomputing)
    )
    for results in (plain, again):
        assert results[0] == results[1]
    assert near(again[0]["losses"], plain[0]["losses"])
    assert near(again[0]["norms"], plain[0]["norms"])


def test_spread_experts_drop_units_in_bf16_too(workers):
    model = moe_model(expert_dropout=0.5, router_noise=1.0)
    case = Case(expert=2, stage=2, precision="bf16", last_step=2, model=model)
    results = workers(2).run(train, case)
    assert results[0] == results[1]
    assert results[0]["applied"] == [True, True]
