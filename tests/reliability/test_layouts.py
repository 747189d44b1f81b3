"""One reference into every layout and out again: bitwise; and training goes on alike there."""

import pytest
import torch

from polyad.parallel.checkpoint.load import Checkpoint
from tests.helpers.emergent import emoe_model
from tests.helpers.everyday import everyday
from tests.helpers.pairwise import pairwise
from tests.helpers.training import MODEL, Case, moe_model, mumoe_model, resave, tensors, train

pytestmark = pytest.mark.distributed

# Processes, tensor-parallel ones, expert-parallel ones.
SHAPES = {
    "1": (1, 1, 1), "DP 2": (2, 1, 1), "TP 2": (2, 2, 1), "EP 2": (2, 1, 2),
    "TP 2 x DP 2": (4, 2, 1), "EP 2 x DP 2": (4, 1, 2), "EP 2 x TP 2": (4, 2, 2),
    "EP 4": (4, 1, 4),
}  # fmt: skip
MODELS = {
    "dense": MODEL,
    "mumoe-cp": mumoe_model(factorization="cp", rank=8),
    "mumoe-tr": mumoe_model(factorization="tr", num_experts=[4, 3]),
    # State of every kind in buffers: a balancing bias, head entropies, a frozen score, a K.
    "smoe": moe_model(score="random", graph="attention", balancing_rate=0.01, final_top_k=4),
    "emoe": emoe_model(blocks=[1]),
}
TOLERANCE = {"dense": 1e-5, "mumoe-cp": 1e-5, "mumoe-tr": 1e-5, "smoe": 1e-3, "emoe": 1e-3}
WITH_BUFFERS = {"smoe", "emoe"}


def allowed(kind, shape, stage):
    """Whole experts alone are spread, and not at stage 3."""
    is_spread = SHAPES[shape][2] > 1
    if kind == "emoe":
        return stage < 3 or not is_spread
    return stage < 3 if kind == "smoe" else not is_spread


EVERY = [
    (kind, shape, stage)
    for kind in MODELS
    for shape in SHAPES
    for stage in (1, 2, 3)
    if allowed(kind, shape, stage)
]
# Rows in which every pair of kind, shape and stage stands together, of what is allowed.
WHOLE_LAYERS = pairwise(row for row in EVERY if row[0] not in WITH_BUFFERS)
TRAINED = [*WHOLE_LAYERS, *(row for row in EVERY if row[0] in WITH_BUFFERS)]


def on(kind, shape, stage, **others):
    _, tensor, expert = SHAPES[shape]
    case = Case(model=MODELS[kind], tensor=tensor, expert=expert, stage=stage, total_steps=12)
    return case.but(first_step=3, **others)


@pytest.fixture(scope="module")
def reference(workers, tmp_path_factory):
    """A checkpoint of three steps in one process, and the losses of the next three."""
    made = {}

    def make(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp("reference")
            pool, case = workers(1), on(kind, "1", 1)
            pool.run(train, case.but(first_step=0, last_step=3, save_to=str(folder)))
            path = folder / "step-00000003"
            losses = pool.run(train, case.but(resume=str(path), last_step=6))[0]["losses"]
            made[kind] = path, losses
        return made[kind]

    return make


def counters(path):
    """Optimizer steps of every chunk by tensor and field."""
    return {
        (name, field): {chunk.step for chunk in about.chunks}
        for name, fields in Checkpoint(path).tensors.items()
        for field, about in fields.items()
        if field != "random"
    }


@everyday(
    ("kind", "shape", "stage"),
    EVERY,
    keep=[("smoe", "EP 2", 2)],
)
def test_what_is_loaded_is_saved_again_bitwise(workers, reference, tmp_path, kind, shape, stage):
    path, _ = reference(kind)
    case = on(kind, shape, stage, resume=str(path), save_to=str(tmp_path))
    workers(SHAPES[shape][0]).run(resave, case)
    before, after = tensors(path), tensors(tmp_path / "step-00000003")
    assert before.keys() == after.keys()
    fields = {field for _, field in before}
    assert {"master", "exp_avg", "exp_avg_sq"} <= fields
    assert ("buffer" in fields) == (kind in WITH_BUFFERS)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert counters(path) == counters(tmp_path / "step-00000003")
    steps = {step for key, each in counters(path).items() if key[1] != "buffer" for step in each}
    assert steps == {3.0}


@everyday(
    ("before", "after"),
    [(a, b) for a in ("1", "DP 2", "TP 2", "TP 2 x DP 2") for b in ("DP 2", "TP 2", "TP 2 x DP 2")],
    keep=[("DP 2", "TP 2")],
)
def test_processes_that_share_layers_drop_the_same_on_any_layout(workers, tmp_path, before, after):
    wanted = {"dropout": 0.2, "report_randomness": True}
    case = on("dense", before, 1).but(first_step=0, last_step=2, save_to=str(tmp_path), **wanted)
    saved = workers(SHAPES[before][0]).run(train, case)
    path = str(tmp_path / "step-00000002")
    case = on("dense", after, 1).but(first_step=2, last_step=5, resume=path, **wanted)
    found = workers(SHAPES[after][0]).run(train, case)
    assert len({each["norm_weight"].numpy().tobytes() for each in found}) == 1
    draws = {each["rank"]: each["next_draw"] for each in found}
    for (_, data), draw in draws.items():
        assert draw == draws[0, data]
        assert all(draw != draws[0, other] for _, other in draws if other != data)
    loaded = workers(SHAPES[after][0]).run(train, case.but(last_step=2))
    goes_on = [each["next_draw"] for each in saved] == [each["next_draw"] for each in loaded]
    assert goes_on == (before == after)


@everyday(("kind", "shape", "stage"), TRAINED, keep=[("emoe", "TP 2", 3)])
def test_training_goes_on_alike(workers, reference, kind, shape, stage):
    path, expected = reference(kind)
    case = on(kind, shape, stage, resume=str(path), last_step=6)
    actual = workers(SHAPES[shape][0]).run(train, case)[0]["losses"]
    close = torch.allclose(
        torch.tensor(actual), torch.tensor(expected), rtol=TOLERANCE[kind], atol=0
    )
    assert close, (actual, expected)
