"""n processes compute what one process computes: losses, gradients (SGD), weights."""

import pytest

from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_near_state, assert_same_course, near
from tests.helpers.training import Case, describe, relative, tensors, train

pytestmark = pytest.mark.distributed

SGD = Case(optimizer="sgd", learning_rate=0.1)
# (processes, tensor-parallel ones, ZeRO stage); the first, one process, is the reference
LAYOUTS = [
    (world_size, tensor, stage)
    for world_size, tensor in ((1, 1), (2, 1), (2, 2), (4, 2))
    for stage in (1, 2, 3)
][1:]


@everyday(("world_size", "tensor", "stage"), LAYOUTS, keep=[(4, 2, 3), (4, 2, 1), (2, 1, 2)])
@everyday("clip", [0.5, 0.0, 100.0], keep=[0.5], ids=["clips", "no clipping", "clip not met"])
def test_sgd_gives_equal_losses_norms_and_weights(
    workers, whole_runs, tmp_path, world_size, tensor, stage, clip
):
    case = SGD.but(clip=clip)
    expected, saved = whole_runs(case)
    assert all(norm > 0.5 for norm in expected["norms"])  # so that a clip of 0.5 is active
    case = case.but(stage=stage, tensor=tensor, save_to=str(tmp_path))
    results = workers(world_size).run(train, case)
    assert all(result == results[0] for result in results)
    assert_same_course(results[0], expected)
    assert_near_state(tmp_path / "step-00000004", saved)


@everyday(
    ("world_size", "tensor", "stage"),
    [(2, 1, 3), (2, 2, 1), (2, 2, 3), (4, 2, 1)],
    keep=[(2, 2, 3)],
)
def test_a_head_of_its_own_is_cut_and_sharded(
    workers, whole_runs, tmp_path, world_size, tensor, stage
):
    model = SGD.model.model_copy(update={"tied_embeddings": False})
    case = SGD.but(clip=0.5, model=model)
    expected, saved = whole_runs(case)
    case = case.but(stage=stage, tensor=tensor, save_to=str(tmp_path))
    result = workers(world_size).run(train, case)[0]
    assert_same_course(result, expected)
    assert ("head.weight", "master") in tensors(saved)
    assert_near_state(tmp_path / "step-00000004", saved)


def test_clipping_changes_the_weights(whole_runs):
    clipped, free = (tensors(whole_runs(SGD.but(clip=clip))[1]) for clip in (0.5, 0.0))
    assert max(relative(clipped[key], free[key]) for key in free) > 1e-3


@everyday(("world_size", "tensor", "stage"), LAYOUTS, keep=[(4, 2, 3), (2, 1, 1)])
def test_adamw_gives_equal_losses(workers, whole_runs, world_size, tensor, stage):
    expected, _ = whole_runs(Case(learning_rate=1e-3))
    case = Case(learning_rate=1e-3, stage=stage, tensor=tensor)
    result = workers(world_size).run(train, case)[0]
    assert near(result["losses"], expected["losses"])


@everyday("stage", [1, 2, 3], keep=[1, 3])
def test_bf16_stays_near_fp32(workers, whole_runs, stage):
    expected, _ = whole_runs(Case(learning_rate=1e-3))
    result = workers(2).run(train, Case(learning_rate=1e-3, stage=stage, precision="bf16"))[0]
    assert near(result["losses"], expected["losses"], 2e-3)


@everyday(
    ("change", "stage"),
    [*(("recompute", stage) for stage in (1, 2, 3)), *(("compile", stage) for stage in (1, 2))],
    keep=[("recompute", 3)],
)
def test_recomputation_and_compilation_change_nothing_under_the_engine(
    workers, whole_runs, change, stage
):
    expected, _ = whole_runs(SGD.but(clip=0.5))
    update = {"recompute": "block"} if change == "recompute" else {"compile": True}
    model = SGD.model.model_copy(update=update)
    assert_same_course(
        workers(2).run(train, SGD.but(clip=0.5, stage=stage, model=model))[0], expected
    )


def test_momentum_is_part_of_the_state(workers, whole_runs, tmp_path):
    case = SGD.but(momentum=0.9, learning_rate=0.01)
    expected, saved = whole_runs(case)
    result = workers(2).run(train, case.but(stage=2, save_to=str(tmp_path)))[0]
    assert near(result["losses"], expected["losses"])
    assert {field for _, field in tensors(saved)} == {"master", "momentum_buffer"}
    assert_near_state(tmp_path / "step-00000004", saved)


def test_ids_name_what_differs():
    assert describe(Case(stage=2, clip=0.5)) == "stage=2,clip=0.5"
