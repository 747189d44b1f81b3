"""Groups of units over processes: as in one process, with whole groups or parts of each."""

import itertools

import pytest
import torch

from polyad.train.loop.losses import LossConfig
from tests.helpers.emergent import emoe_model
from tests.helpers.everyday import everyday
from tests.helpers.training import Case, relative, tensors, train

pytestmark = pytest.mark.distributed

SGD = Case(optimizer="sgd", learning_rate=0.1, clip=0.5, last_step=3)
LOSSES = LossConfig(load_balance=0.1, importance=0.1)
MODELS = {
    "avg_k": {},
    "apart": {"experts": "grouped"},
    "cosine": {"score": "cosine", "blocks": [1]},
    "capacity": {"capacity_factor": 1.0, "capacity_order": "priority", "allow_leak": True},
}
# Processes, tensor-parallel ones, expert-parallel ones, ZeRO stage.
LAYOUTS = [
    *((2, 1, 1, stage) for stage in range(4)),
    *((2, 2, 1, stage) for stage in (0, 3)),
    *((2, 1, 2, stage) for stage in (0, 2)),
    (4, 2, 2, 1),
]


@pytest.fixture(scope="module")
def reference(workers, tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            case = SGD.but(model=emoe_model(**MODELS[name]), losses=LOSSES, save_to=str(folder))
            result = workers(1).run(train, case)[0]
            made[name] = case, result, tensors(folder / "step-00000003")
        return made[name]

    return make


@everyday(
    ("name", "layout"),
    itertools.product(MODELS, LAYOUTS),
    keep=[("avg_k", (2, 1, 2, 0)), ("capacity", (2, 2, 1, 3))],
)
def test_any_layout_trains_as_one_process(workers, reference, tmp_path, name, layout):
    case, expected, weights = reference(name)
    size, tensor, expert, stage = layout
    # A balance loss is of a micro-batch of one process, which is the same everywhere.
    case = case.but(tensor=tensor, expert=expert, stage=stage, save_to=str(tmp_path))
    results = workers(size).run(train, case)
    assert all(result["losses"] == results[0]["losses"] for result in results)
    for measure in ("losses", "norms"):
        ours, theirs = (torch.tensor(each[measure]) for each in (results[0], expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    ours = tensors(tmp_path / "step-00000003")
    assert ours.keys() == weights.keys()
    assert all(relative(ours[key].double(), weights[key].double()) < 1e-5 for key in weights)
    for key, value in results[0]["routing"][-1].items():
        if key.endswith("/load"):
            assert value == pytest.approx(expected["routing"][-1][key], abs=1e-6), key


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"tensor": 2, "sequence": True}, {"expert": 2, "overlap": True}]
)
def test_what_layouts_do_besides_changes_nothing(workers, reference, options):
    case, expected, _ = reference("avg_k")
    result = workers(2).run(train, case.but(save_to=None, **options))[0]
    ours, theirs = (torch.tensor(each["losses"]) for each in (result, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_bf16_and_recomputation_train_on_every_kind_of_layout(workers):
    model = emoe_model().model_copy(update={"recompute": "block"})
    case = SGD.but(model=model, precision="bf16", optimizer="adamw", learning_rate=1e-3)
    expected = workers(1).run(train, case)[0]["losses"]
    for size, tensor, expert, stage in ((2, 1, 1, 3), (2, 2, 1, 1), (2, 1, 2, 1)):
        layout = case.but(tensor=tensor, expert=expert, stage=stage)
        losses = workers(size).run(train, layout)[0]["losses"]
        assert losses == pytest.approx(expected, rel=2e-2)
