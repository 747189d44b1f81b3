"""The score of sparsity over processes: routing reads all experts' weights, and teaches them."""

import itertools

import pytest

from polyad.model.lora import LoRAConfig
from polyad.train.loop.losses import LossConfig
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_near_state, assert_same_course, assert_same_routing
from tests.helpers.training import Case, moe_model, train

pytestmark = pytest.mark.distributed

MOE_X = {"score": "sparsity", "activation": "relu", "combine": "normalized"}
SGD = Case(
    optimizer="sgd", learning_rate=0.1, clip=0.5, last_step=3, model=moe_model(**MOE_X),
    losses=LossConfig(load_balance=0.1, router_z=0.01),
)  # fmt: skip
# Processes, tensor-parallel ones, expert-parallel ones.
LAYOUTS = [(2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2)]


@everyday(
    ("layout", "stage"),
    itertools.product(LAYOUTS, range(4)),
    keep=[((2, 1, 1), 3), ((2, 1, 2), 3), ((2, 2, 1), 1), ((4, 2, 2), 1)],
    ids=str,
)
def test_any_layout_trains_as_one_process(workers, whole_runs, tmp_path, layout, stage):
    expected, folder = whole_runs(SGD)
    size, tensor, expert = layout
    case = SGD.but(tensor=tensor, expert=expert, stage=stage, save_to=str(tmp_path))
    results = workers(size).run(train, case)
    assert all(result == results[0] for result in results)
    assert_same_course(results[0], expected)
    assert_same_routing(results[0], expected)
    assert_near_state(tmp_path / "step-00000003", folder)
    for step in (0, -1):
        ours, theirs = (each["routing"][step] for each in (results[0], expected))
        key = "routing/expected_active"
        assert ours[key] == pytest.approx(theirs[key], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_tokens_that_are_cut_change_nothing(workers, whole_runs, sequence):
    case = SGD.but(model=SGD.model.model_copy(update={"sequence_length": 16}))
    expected, _ = whole_runs(case)
    result = workers(2).run(train, case.but(stage=1, tensor=2, sequence=sequence))[0]
    assert_same_course(result, expected)


@everyday("layout", LAYOUTS[1:], keep=[(4, 2, 2)], ids=str)
def test_adapters_beside_experts_train_as_in_one_process(workers, whole_runs, layout):
    lora = LoRAConfig(rank=4, targets=(), experts=True)
    case = SGD.but(lora=lora, learning_rate=1.0, clip=1.0)
    expected, _ = whole_runs(case)
    size, tensor, expert = layout
    result = workers(size).run(train, case.but(stage=1, tensor=tensor, expert=expert))[0]
    assert_same_course(result, expected)
    assert_same_routing(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "tensor", "expert"),
    [({"recompute": "block"}, 2, 2), ({"compile": True}, 2, 1), ({"compile": True}, 1, 2)],
    ids=str,
)
def test_recomputation_and_compilation_change_nothing(workers, whole_runs, change, tensor, expert):
    expected, _ = whole_runs(SGD)
    model = SGD.model.model_copy(update=change)
    changed = SGD.but(model=model, stage=1, tensor=tensor, expert=expert)
    result = workers(tensor * expert).run(train, changed)[0]
    assert_same_course(result, expected)
