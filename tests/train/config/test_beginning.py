"""What a start says first: where a run stands, and how its learning rate goes."""

from pathlib import Path
from typing import Any

import pytest

from polyad.train.config.beginning import change_of_rate, schedule_line, schedule_notes
from polyad.train.guard.run_folder import LOCK_FILE
from tests.helpers.everyday import everyday
from tests.helpers.runs import records, run_and_listen, write_config
from tests.train.test_describe import small

pytestmark = pytest.mark.distributed


@pytest.fixture
def config(tmp_path, prepared_path):
    return write_config(
        tmp_path / "config.yaml", prepared_path, train__steps=2, evaluation__every=0,
        checkpoint__every=0, log__trackers=[],
    )  # fmt: skip


@pytest.fixture
def with_weights_of_another(workers, config, tmp_path):
    """The first line of a run that begins with the weights of one with another feed-forward."""

    def first(section, folder, *overrides):
        options = [f"model.feed_forward={section}", f"run.folder={tmp_path / folder}", *overrides]
        ((steps, said),) = workers(1).run(run_and_listen, config, *options)
        assert steps == 2
        return said.splitlines()[0]

    def both(before, after):
        first(before, "a")
        return first(after, "b", f"checkpoint.init_from={tmp_path / 'a'}")

    return both


def times_of(folder: Path) -> dict[Path, int]:
    """When files were written last, but for that of the lock, which every start writes to."""
    files = (path for path in folder.rglob("*") if path.name != LOCK_FILE)
    return {path: path.stat().st_mtime_ns for path in files}


def test_a_start_says_first_where_the_run_stands(workers, config, tmp_path):
    def lines(*overrides):
        (_, main), (_, other) = workers(2).run(run_and_listen, config, *overrides)
        assert not any(word in other for word in ("anew", "continues", "nothing left"))
        return main.splitlines()

    folder = tmp_path / "run"
    second = folder / "checkpoints" / "step-00000002"
    assert lines()[0] == f"new run: 2 steps, in {folder}"
    written = times_of(folder)
    finished = f"nothing left to do: all 2 steps are done; the last checkpoint is {second}"
    assert lines() == [finished]
    assert times_of(folder) == written
    assert lines("train.steps=5")[0] == f"continues from step 2 of 5 (3 left), from {second}"


def test_a_start_says_first_how_the_learning_rate_jumps(workers, config, tmp_path):
    def lines(*overrides):
        ((_, said),) = workers(1).run(run_and_listen, config, "schedule.kind=linear", *overrides)
        return said.splitlines()

    lines("train.steps=4", "schedule.final_ratio=0")
    # After 4 of 8 steps a line from 0.01 to 0 is at half; it was at its end.
    place = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert lines("train.steps=8", "schedule.final_ratio=0")[0] == (
        f"continues from step 4 of 8 (4 left), from {place}; the learning rate of step 5 is 0.005 "
        f"instead of 0 (train.steps: 4 before, 8 now, with schedule.decay_steps: null)"
    )
    rates = [line["learning_rate"] for line in records(tmp_path / "run")]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025, 0.005, 0.00375, 0.0025, 0.00125])
    assert "the learning rate" not in lines("train.steps=8", "schedule.final_ratio=0")[0]
    warned = lines("train.steps=9", "schedule={kind: constant, warmup_steps: 30}")
    assert "(schedule.kind: linear before, constant now, schedule.warmup_steps: 0" in warned[0]
    assert "polyad: warning: train.steps: 9 ends the run before its warm-up" in warned[1]


@pytest.mark.slow
def test_a_start_says_whose_weights_it_takes(workers, finished, exported, config, tmp_path):
    def first(source, folder, *overrides):
        options = [f"checkpoint.init_from={source}", f"run.folder={tmp_path / folder}", *overrides]
        ((_, said),) = workers(1).run(run_and_listen, config, *options)
        return said.splitlines()[0]

    source = finished / "checkpoints" / "step-00000006"
    new = f"new run: 2 steps, in {tmp_path}"
    assert first(finished, "a") == f"{new}/a, from the weights of step 6, {source}"
    assert first(exported, "b") == f"{new}/b, from the weights of {exported}"
    place = tmp_path / "a" / "checkpoints" / "step-00000002"
    assert first(finished, "a", "train.steps=3") == (
        f"continues from step 2 of 3 (1 left), from {place}; "
        f"checkpoint.init_from: {finished} is ignored, as it is for new runs only"
    )


@everyday(
    ("before", "after"),
    [("none", "attention"), ("attention", "none")],
    keep=[("none", "attention")],
)
def test_a_graph_of_tokens_may_come_or_go_with_the_weights_of_another_run(
    with_weights_of_another, before, after
):
    section = "{{kind: smoe, num_experts: 4, expert_hidden_size: 16, graph: {}}}"
    said = with_weights_of_another(section.format(before), section.format(after))
    new = [f"blocks.{block}.feed_forward.router.graph.head_entropy*" for block in range(2)]
    expected = f"; initialized from the seed: {', '.join(new)}" if after == "attention" else ""
    assert said.partition("step-00000002")[2] == expected


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ({}, "cosine from 0.0006 to 6e-05 at step 10"),
        (
            {"warmup_steps": 2, "decay_steps": 8, "final_ratio": 0.5},
            "up to 0.0006 in 2 steps, cosine from 0.0006 to 0.0003 at step 8",
        ),
        (
            {"kind": "linear", "warmup_steps": 2, "final_ratio": 0.0},
            "up to 0.0006 in 2 steps, linear from 0.0006 to 0 at step 10",
        ),
        ({"kind": "constant"}, "constant 0.0006"),
        ({"kind": "constant", "warmup_steps": 3}, "up to 0.0006 in 3 steps, then constant"),
    ],
)
def test_the_schedule_is_a_line(schedule: dict[str, Any], line: str) -> None:
    assert schedule_line(small(schedule=schedule)) == line


@pytest.mark.parametrize(
    ("schedule", "notes"),
    [
        ({}, []),
        ({"decay_steps": 11}, []),  # within a tenth
        (
            {"decay_steps": 2},
            [
                "schedule.decay_steps: 2 is much less than train.steps: 10: the learning rate "
                "stays at 6e-05 for the last 8 steps; null makes the decay end with the run"
            ],
        ),
        (
            # A line from 6e-4 to 6e-5 over 100 steps has come 9 of them down.
            {"kind": "linear", "decay_steps": 100},
            [
                "schedule.decay_steps: 100 is much more than train.steps: 10: the run ends at a "
                "learning rate of 0.000551; null makes the decay end with the run"
            ],
        ),
        ({"kind": "constant", "decay_steps": 2}, []),
        (
            {"warmup_steps": 30},
            ["train.steps: 10 ends the run before its warm-up (schedule.warmup_steps: 30)"],
        ),
        ({"warmup_steps": 10}, []),
    ],
)
def test_a_schedule_of_another_length_than_the_run_is_named(
    schedule: dict[str, Any], notes: list[str]
) -> None:
    assert schedule_notes(small(schedule=schedule)) == notes


LINE = {"kind": "linear", "final_ratio": 0.0}
# Of a line from 6e-4 to 0 the step after 5 has half the way behind it at 10 steps, a quarter at 20.
TO_20 = "the learning rate of step 6 is 0.00045 instead of 0.0003 ({})"


@pytest.mark.parametrize(
    ("before", "steps", "now", "line"),
    [
        (LINE, 10, LINE, None),
        (LINE, 10, LINE | {"decay_steps": 10}, None),
        (LINE | {"decay_steps": 10}, 20, LINE | {"decay_steps": 10}, None),
        ({"kind": "constant"}, 20, {"kind": "constant", "final_ratio": 0.5}, None),
        (
            LINE, 20, LINE,
            TO_20.format("train.steps: 10 before, 20 now, with schedule.decay_steps: null"),
        ),
        (LINE, 10, LINE | {"decay_steps": 20}, TO_20.format(
            "schedule.decay_steps: null before, 20 now")),
        (
            LINE, 10, LINE | {"kind": "constant"},
            "the learning rate of step 6 is 0.0006 instead of 0.0003 "
            "(schedule.kind: linear before, constant now)",
        ),
        (
            LINE, 10, LINE | {"warmup_steps": 6},
            "the learning rate of step 6 is 0.0006 instead of 0.0003 "
            "(schedule.warmup_steps: 0 before, 6 now)",
        ),
        (
            LINE | {"warmup_steps": 6}, 10, LINE | {"warmup_steps": 6, "final_ratio": 0.5},
            "the learning rate of step 6 is unchanged, but later ones differ "
            "(schedule.final_ratio: 0.0 before, 0.5 now)",
        ),
    ],
)  # fmt: skip
def test_a_rate_that_jumps_on_resume_is_named(
    before: dict[str, Any], steps: int, now: dict[str, Any], line: str | None
) -> None:
    here = small(schedule=now, train={"steps": steps})
    assert change_of_rate(small(schedule=before), here, 5) == line
    assert change_of_rate(small(schedule=before), here, steps) is None  # nothing is left to do
