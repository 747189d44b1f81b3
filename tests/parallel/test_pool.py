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
@everyday("layout", COUNTED, keep=["EP 2"])
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
