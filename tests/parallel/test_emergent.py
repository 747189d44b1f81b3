"""Groups of units over processes: as in one process, with whole groups or parts of each."""

import itertools

import pytest

from polyad.train.loop.losses import LossConfig
from tests.helpers.emergent import emoe_model
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_near_state, assert_same_course, near
from tests.helpers.training import Case, train

pytestmark = pytest.mark.distributed

SGD = Case(optimizer="sgd", learning_rate=0.1, clip=0.5, last_step=3)
LOSSES = LossConfig(load_balance=0.1, importance=0.1)
MODELS = {
    "avg_k": {},
    "apart": {"experts": "grouped"},
    "cosine": {"score": "cosine", "blocks": [1]},
}
# Processes, tensor-parallel ones, expert-parallel ones, ZeRO stage.
LAYOUTS = [
    *((2, 1, 1, stage) for stage in (1, 2, 3)),
    *((2, 2, 1, stage) for stage in (1, 3)),
    *((2, 1, 2, stage) for stage in (1, 2, 3)),
    (4, 2, 2, 1),
]


def case_of(name):
    return SGD.but(model=emoe_model(**MODELS[name]), losses=LOSSES)


@everyday(
    ("name", "layout"),
    itertools.product(MODELS, LAYOUTS),
    keep=[("avg_k", (2, 1, 2, 1)), ("cosine", (2, 2, 1, 3))],
)
def test_any_layout_trains_as_one_process(workers, whole_runs, tmp_path, name, layout):
    case = case_of(name)
    expected, saved = whole_runs(case)
    size, tensor, expert, stage = layout
    # A balance loss is of a micro-batch of one process, which is the same everywhere.
    case = case.but(tensor=tensor, expert=expert, stage=stage, save_to=str(tmp_path))
    results = workers(size).run(train, case)
    assert all(result["losses"] == results[0]["losses"] for result in results)
    assert_same_course(results[0], expected)
    assert_near_state(tmp_path / "step-00000003", saved)
    for key, value in results[0]["routing"][-1].items():
        if key.endswith("/load"):
            assert value == pytest.approx(expected["routing"][-1][key], abs=1e-6), key


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tensor": 2, "sequence": True}, {"expert": 2}])
def test_what_layouts_do_besides_changes_nothing(workers, whole_runs, options):
    case = case_of("avg_k")
    expected, _ = whole_runs(case)
    assert near(workers(2).run(train, case.but(**options))[0]["losses"], expected["losses"])


@pytest.mark.slow
def test_bf16_and_recomputation_train_on_every_kind_of_layout(workers):
    model = emoe_model().model_copy(update={"recompute": "block"})
    case = SGD.but(model=model, precision="bf16", optimizer="adamw", learning_rate=1e-3)
    expected = workers(1).run(train, case)[0]["losses"]
    for size, tensor, expert, stage in ((2, 1, 1, 3), (2, 2, 1, 1), (2, 1, 2, 1)):
        layout = case.but(tensor=tensor, expert=expert, stage=stage)
        losses = workers(size).run(train, layout)[0]["losses"]
        assert losses == pytest.approx(expected, rel=2e-2)
