"""Saving while training goes on: the same bytes, in order, and never without telling."""

import pytest

from tests.helpers.disk import read_tree
from tests.helpers.everyday import everyday
from tests.helpers.snapshots import (
    changes_told,
    close_while_copying,
    close_while_writing,
    save_both_ways,
    save_that_fails,
    second_save_waits,
)
from tests.helpers.training import Case, moe_model, mumoe_model

pytestmark = pytest.mark.distributed

MODELS = {
    "dense": Case().model,
    "smoe": moe_model(graph="attention", balancing_rate=0.1),
    "mumoe": mumoe_model(rank=8),
}
"""The sparse one has state in buffers."""
# Kind, processes, tensor-parallel ones, expert-parallel ones, ZeRO stage.
LAYOUTS = [
    *(("dense", 2, 1, 1, stage) for stage in (1, 2, 3)),
    *(("dense", 2, 2, 1, stage) for stage in (1, 3)),
    ("mumoe", 2, 2, 1, 1),
    ("mumoe", 2, 1, 1, 3),
    *(("smoe", 2, 1, 2, stage) for stage in (1, 2)),
    ("smoe", 4, 2, 2, 1),
]


def assert_same(folder, files):
    trees = [read_tree(folder / way) for way in ("synchronous", "snapshot")]
    assert len(trees[0]) >= files
    assert trees[0] == trees[1]


@everyday(
    ("kind", "processes", "tensor", "expert", "stage", "precision"),
    [(*layout, precision) for layout in LAYOUTS for precision in ("fp32", "bf16")],
    keep=[("dense", 2, 1, 1, 3, "bf16"), ("smoe", 2, 1, 2, 1, "fp32")],
)
def test_a_snapshot_is_the_checkpoint_of_its_moment_to_the_last_byte(
    workers, tmp_path, kind, processes, tensor, expert, stage, precision
):
    # Though the next step begins at once, and nothing is copied before it has to wait.
    case = Case(
        model=MODELS[kind], tensor=tensor, expert=expert, stage=stage, precision=precision,
        average=0.9,
    )  # fmt: skip
    assert workers(processes).run(save_both_ways, case, str(tmp_path)) == [True] * processes
    assert_same(tmp_path, processes + 6)


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (1, "bf16"), (3, "fp32")])
def test_the_engine_tells_once_before_anything_changes(workers, stage, precision):
    case = Case(stage=stage, precision=precision, average=0.9)
    assert workers(1).run(changes_told, case) == [[True]]


@everyday("stage", [1, 2, 3], keep=[1])
def test_without_the_wait_it_would_be_another_one(workers, tmp_path, stage):
    case = Case(stage=stage, precision="bf16")
    assert workers(1).run(save_both_ways, case, str(tmp_path), waits=False) == [False]
    trees = [read_tree(tmp_path / way) for way in ("synchronous", "snapshot")]
    (tensors,) = (name for name in trees[0] if name.endswith(".safetensors"))
    assert len(trees[0][tensors]) == len(trees[1][tensors])
    assert trees[0][tensors] != trees[1][tensors]


@pytest.mark.parametrize(("then", "waited"), [("fill", True), ("finish", False)])
def test_what_comes_instead_of_a_step_waits_too(workers, tmp_path, then, waited):
    assert workers(1).run(save_both_ways, Case(stage=1), str(tmp_path), then) == [waited]
    assert_same(tmp_path, 7)


def test_closing_waits_for_the_copy_and_commits_nothing(workers, tmp_path):
    assert workers(2).run(close_while_copying, Case(), str(tmp_path)) == [[], []]


def test_closing_ends_a_file_that_is_being_written(workers, tmp_path):
    for seconds, names in workers(2).run(close_while_writing, Case(), str(tmp_path)):
        assert seconds < 0.5  # a file has a hundred boxes and more
        assert names == []


@pytest.mark.slow
def test_a_second_save_waits_for_the_first(workers, tmp_path):
    for waited, *names in workers(2).run(second_save_waits, Case(), str(tmp_path)):
        assert waited == "True"
        assert names == ["|", "step-00000001", "|", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("what", ["copy_tensor", "write_tensors"])
def test_a_failure_beside_the_run_ends_it_with_the_reason(workers, tmp_path, what):
    ours, theirs = workers(2).run(save_that_fails, Case(), str(tmp_path), what)
    assert ours == theirs
    for line in ours:
        assert line == "step 1 could not be saved: rank 1: RuntimeError: the device is lost"
    assert [path.name for path in tmp_path.iterdir()] == []
