"""Pools of experts, and balance with the counts of all processes: several processes compute what
one computes."""

import pytest

from polyad.train.loop.losses import LossConfig
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_near_state, assert_same_course, assert_same_routing
from tests.helpers.training import Case, moe_model, train

pytestmark = pytest.mark.distributed

END = 7
LOSSES = LossConfig(load_balance=0.5, router_z=0.001)
ALL = LOSSES.model_copy(update={"load_balance_counts": "all"})


def pooled(pool="prefix", d=3, **options):
    """Documents of some tokens, as the tokens are random ones below 20."""
    section = {"pool": pool, "pool_least": d, "pool_most": d}
    model = moe_model(num_experts=8, **section | options)
    return model.model_copy(update={"vocab_size": 20, "end_of_text_id": END})


def sgd(model, losses=LOSSES, **options):
    return Case(optimizer="sgd", learning_rate=0.1, model=model, losses=losses, **options)


def assert_same(result, expected, folder, saved):
    assert_same_course(result, expected)
    assert_same_routing(result, expected)
    assert_near_state(folder / "step-00000004", saved)


LAYOUTS = {
    "TP 2": (2, {"tensor": 2}),
    "TP 2, tokens shared": (2, {"tensor": 2, "sequence": True}),
    "EP 2": (2, {"expert": 2, "stage": 1}),
    "ZeRO 3": (2, {"stage": 3}),
    "TP 2, EP 2, ZeRO 2": (4, {"tensor": 2, "expert": 2, "stage": 2}),
}


@everyday("layout", LAYOUTS, keep=["TP 2", "EP 2", "ZeRO 3"])
def test_pools_of_one_size_are_those_of_one_process(workers, whole_runs, tmp_path, layout):
    case = sgd(pooled(balancing_rate=0.01))
    expected, saved = whole_runs(case)
    free, _ = whole_runs(case.but(model=pooled("none", None, balancing_rate=0.01)))
    assert abs(expected["losses"][-1] - free["losses"][-1]) > 1e-4
    processes, changes = LAYOUTS[layout]
    results = workers(processes).run(train, case.but(save_to=str(tmp_path), **changes))
    assert all(result == results[0] for result in results)
    assert_same(results[0], expected, tmp_path, saved)


@pytest.mark.slow
def test_tensor_parallel_processes_draw_the_same_sizes(workers, whole_runs, tmp_path):
    # Of one data-parallel process the numbers are drawn as without others.
    model = pooled("prefix").model_copy(
        update={"feed_forward": pooled("prefix").feed_forward.model_copy(
            update={"pool_least": 2, "pool_most": 8})}
    )  # fmt: skip
    case = sgd(model)
    expected, saved = whole_runs(case)
    changes = {"tensor": 2, "save_to": str(tmp_path)}
    recomputed = model.model_copy(update={"recompute": "block"})
    for changed in (case, case.but(model=recomputed)):
        result = workers(2).run(train, changed.but(**changes))[0]
        assert_same(result, expected, tmp_path, saved)


COUNTED = {
    "2 processes": (2, 4, {}),
    "EP 2": (2, 4, {"expert": 2, "stage": 1}),
    "4 processes, TP 2, EP 2": (4, 4, {"tensor": 2, "expert": 2, "stage": 1}),
    "4 processes, EP 2": (4, 8, {"expert": 2, "stage": 2}),
}


def of_balance(result):
    """Records without the losses that are each micro-batch's own."""
    return [
        {k: v for k, v in record.items() if not k.endswith("importance_loss")}
        for record in result["routing"]
    ]


@everyday("over", ["layer", "model"], keep=["layer"])
@everyday("layout", COUNTED, keep=["2 processes", "EP 2"])
def test_counts_of_all_processes_are_those_of_one_larger_micro_batch(
    workers, whole_runs, tmp_path, layout, over
):
    processes, together, changes = COUNTED[layout]
    losses = ALL.model_copy(update={"load_balance_over": over})
    case = sgd(pooled("prefix"), losses)
    # One process that has all those micro-batches in one, with counts of its own.
    own = losses.model_copy(update={"load_balance_counts": "process"})
    expected, saved = whole_runs(case.but(micro_batch=together, losses=own))
    result = workers(processes).run(train, case.but(save_to=str(tmp_path), **changes))[0]
    assert_same_course(result, expected)
    assert_near_state(tmp_path / "step-00000004", saved)
    assert_same_routing(*({"routing": of_balance(each)} for each in (result, expected)))
    # With counts of each process it is another loss.
    other = workers(processes).run(train, case.but(losses=own, **changes))[0]
    with pytest.raises(AssertionError):
        assert_same_course(other, expected)


def test_one_process_has_all_counts(whole_runs):
    case = sgd(pooled("prefix"))
    expected, _ = whole_runs(case)
    result, _ = whole_runs(case.but(losses=ALL))
    assert_same_course(result, expected)
    assert_same_routing(result, expected)
