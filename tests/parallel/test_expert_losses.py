"""Losses of experts over processes: those of one process, and their gradients."""

import itertools

import pytest

from polyad.model.lora import LoRAConfig
from polyad.train.loop.losses import LossConfig
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_near_state, assert_same_course, assert_same_routing
from tests.helpers.training import Case, moe_model, train

pytestmark = pytest.mark.distributed

LOSSES = {
    "erc": LossConfig(erc=20.0, erc_alpha=0.5, erc_noise=False),
    "orthogonality": LossConfig(orthogonality=0.3),
    "variance": LossConfig(variance=5.0, load_balance=0.01),
}
# Without weights a record has them all the same.
SGD = Case(optimizer="sgd", learning_rate=0.05, clip=2.0, last_step=3)
MODELS = {
    "erc": moe_model(),
    # Directions of outputs that are nearly 0 are rounding: weights start larger.
    "orthogonality": moe_model(
        top_k=3, capacity_factor=1.0, allow_leak=True, activation="swiglu"
    ).model_copy(update={"initializer_range": 0.2}),
    "variance": moe_model(),
}
# Processes, tensor-parallel ones, expert-parallel ones.
LAYOUTS = [(2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2)]


def case_of(name):
    return SGD.but(model=MODELS[name], losses=LOSSES[name])


@everyday(
    ("name", "layout", "stage"),
    itertools.product(LOSSES, LAYOUTS, range(4)),
    keep=[
        ("erc", (4, 2, 2), 1),
        ("erc", (2, 1, 2), 3),
        ("orthogonality", (2, 1, 2), 3),
        ("orthogonality", (4, 2, 2), 1),
        ("variance", (2, 2, 1), 1),
    ],
    ids=str,
)
def test_any_layout_trains_as_one_process(workers, whole_runs, tmp_path, name, layout, stage):
    expected, folder = whole_runs(case_of(name))
    without, _ = whole_runs(case_of(name).but(losses=LossConfig(load_balance=0.01)))
    assert abs(expected["norms"][0] / without["norms"][0] - 1) > 0.01  # the loss has a say
    size, tensor, expert = layout
    case = case_of(name).but(tensor=tensor, expert=expert, stage=stage, save_to=str(tmp_path))
    results = workers(size).run(train, case)
    assert all(result == results[0] for result in results)
    assert_same_course(results[0], expected)
    assert_same_routing(results[0], expected)
    assert_near_state(tmp_path / "step-00000003", folder)
    for key in ("erc_loss", "orthogonality_loss", "variance_loss"):
        assert all(results[0]["routing"][step][f"routing/{key}"] != 0 for step in (0, -1)), key


def test_tensor_parallel_processes_move_rows_as_one_process(workers, whole_runs):
    case = case_of("erc").but(losses=LossConfig(erc=20.0, erc_alpha=0.5))
    expected, _ = whole_runs(case)
    plain, _ = whole_runs(case_of("erc"))
    assert expected["routing"][0]["routing/erc_loss"] != plain["routing"][0]["routing/erc_loss"]
    result = workers(2).run(train, case.but(stage=1, tensor=2))[0]
    assert_same_course(result, expected)
    assert_same_routing(result, expected)


@everyday("layout", LAYOUTS[1:], keep=[(4, 2, 2)], ids=str)
def test_adapters_train_as_in_one_process(workers, whole_runs, layout):
    lora = LoRAConfig(rank=3, targets=("router.score",), experts=True)
    model = moe_model().model_copy(update={"initializer_range": 0.2})
    losses = LossConfig(erc=20.0, erc_alpha=0.5, erc_noise=False, orthogonality=0.3)
    case = SGD.but(model=model, losses=losses, lora=lora, learning_rate=0.5)
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
@pytest.mark.parametrize("name", LOSSES)
def test_recomputation_and_compilation_change_nothing(
    workers, whole_runs, name, change, tensor, expert
):
    case = case_of(name)
    expected, _ = whole_runs(case)
    model = case.model.model_copy(update=change)
    changed = case.but(model=model, stage=1, tensor=tensor, expert=expert)
    result = workers(tensor * expert).run(train, changed)[0]
    assert_same_course(result, expected)
