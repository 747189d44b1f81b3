"""What a start says first: where a run stands, and how its learning rate goes."""

import pytest

from polyad.train.guard.run_folder import LOCK_FILE
from tests.helpers.everyday import everyday
from tests.helpers.runs import QUIET, records, run_and_listen

pytestmark = pytest.mark.distributed


RUN_CHANGES = QUIET | {"train__steps": 2}


def test_a_start_says_first_where_the_run_stands(workers, config, tmp_path):
    def lines(*overrides):
        (_, main), (_, other) = workers(2).run(run_and_listen, config, *overrides)
        assert not any(word in other for word in ("anew", "continues", "nothing left"))
        return main.splitlines()

    def times():
        """When files were written last, but for that of the lock, which every start writes to."""
        files = (path for path in folder.rglob("*") if path.name != LOCK_FILE)
        return {path: path.stat().st_mtime_ns for path in files}

    folder = tmp_path / "run"
    second = folder / "checkpoints" / "step-00000002"
    assert lines()[0] == f"new run: 2 steps, in {folder}"
    written = times()
    finished = f"nothing left to do: all 2 steps are done; the last checkpoint is {second}"
    assert lines() == [finished]
    assert times() == written
    assert lines("train.steps=5")[0] == f"continues from step 2 of 5 (3 left), from {second}"


def test_a_start_says_first_how_the_learning_rate_jumps(workers, config, tmp_path):
    def lines(*overrides):
        ((_, said),) = workers(1).run(run_and_listen, config, "schedule.kind=linear", *overrides)
        return said.splitlines()

    lines("train.steps=4", "schedule.final_ratio=0")
    # After 4 of 8 steps a line from 0.01 to 0 is at half; it was at its end.
    place = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert lines("train.steps=8", "schedule.final_ratio=0")[0] == (
        f"continues from step 4 of 8 (4 left), from {place}; the learning rate of step 5 is "
        f"0.005, it was 0"
    )
    rates = [line["learning_rate"] for line in records(tmp_path / "run")]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025, 0.005, 0.00375, 0.0025, 0.00125])
    assert "the learning rate" not in lines("train.steps=8", "schedule.final_ratio=0")[0]


@pytest.mark.slow
def test_a_start_says_whose_weights_it_takes(workers, finished, exported, config, tmp_path):
    def first(source, folder):
        options = [f"checkpoint.init_from={source}", f"run.folder={tmp_path / folder}"]
        return workers(1).run(run_and_listen, config, *options)[0][1].splitlines()[0]

    source, new = finished / "checkpoints" / "step-00000006", f"new run: 2 steps, in {tmp_path}"
    assert first(finished, "a") == f"{new}/a, from the weights of step 6, {source}"
    assert first(exported, "b") == f"{new}/b, from the weights of {exported}"


@everyday(
    ("before", "after"),
    [("none", "attention"), ("attention", "none")],
    keep=[("none", "attention")],
)
def test_a_graph_of_tokens_may_come_or_go_with_the_weights_of_another_run(
    workers, config, tmp_path, before, after
):
    said, start = "", []
    for graph in (before, after):
        section = f"{{kind: smoe, num_experts: 4, expert_hidden_size: 16, graph: {graph}}}"
        words = [f"model.feed_forward={section}", f"run.folder={tmp_path / graph}", *start]
        ((_, said),) = workers(1).run(run_and_listen, config, *words)
        start = [f"checkpoint.init_from={tmp_path / graph}"]
    new = [f"blocks.{block}.feed_forward.router.graph.head_entropy*" for block in range(2)]
    expected = f"; initialized from the seed: {', '.join(new)}" if after == "attention" else ""
    assert said.splitlines()[0].partition("step-00000002")[2] == expected
