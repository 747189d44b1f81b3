"""The learning rate in words: its line, what is odd about it, and what changes on resume."""

from typing import Any

import pytest

from polyad.train.config.rate import change_of_rate, schedule_line, schedule_notes
from tests.train.forecast.test_describe import small


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
                "schedule.decay_steps: 2 is long before train.steps: 10: the rate stays at 6e-05 "
                "for the last 8 steps; null ends both together"
            ],
        ),
        (
            # A line from 6e-4 to 6e-5 over 100 steps has come 9 of them down.
            {"kind": "linear", "decay_steps": 100},
            [
                "schedule.decay_steps: 100 is long after train.steps: 10: the run ends at a rate "
                "of 0.000551; null ends both together"
            ],
        ),
        ({"kind": "constant", "decay_steps": 2}, []),
        (
            {"warmup_steps": 30},
            ["train.steps: 10 ends the run in the warm-up of schedule.warmup_steps: 30"],
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
TO_20 = "the learning rate of step 6 is 0.00045, and was to be 0.0003 ({})"


@pytest.mark.parametrize(
    ("before", "steps", "now", "line"),
    [
        (LINE, 10, LINE, None),
        (LINE, 10, LINE | {"decay_steps": 10}, None),
        (LINE | {"decay_steps": 10}, 20, LINE | {"decay_steps": 10}, None),
        ({"kind": "constant"}, 20, {"kind": "constant", "final_ratio": 0.5}, None),
        (
            LINE, 20, LINE,
            TO_20.format("train.steps: 10 there, 20 here, with schedule.decay_steps: null"),
        ),
        (LINE, 10, LINE | {"decay_steps": 20}, TO_20.format(
            "schedule.decay_steps: null there, 20 here")),
        (
            LINE, 10, LINE | {"kind": "constant"},
            "the learning rate of step 6 is 0.0006, and was to be 0.0003 "
            "(schedule.kind: linear there, constant here)",
        ),
        (
            LINE, 10, LINE | {"warmup_steps": 6},
            "the learning rate of step 6 is 0.0006, and was to be 0.0003 "
            "(schedule.warmup_steps: 0 there, 6 here)",
        ),
        (
            LINE | {"warmup_steps": 6}, 10, LINE | {"warmup_steps": 6, "final_ratio": 0.5},
            "the learning rate of step 6 is as before, and changes later on "
            "(schedule.final_ratio: 0.0 there, 0.5 here)",
        ),
    ],
)  # fmt: skip
def test_a_rate_that_jumps_on_resume_is_named(
    before: dict[str, Any], steps: int, now: dict[str, Any], line: str | None
) -> None:
    here = small(schedule=now, train={"steps": steps})
    assert change_of_rate(small(schedule=before), here, 5) == line
    assert change_of_rate(small(schedule=before), here, steps) is None  # nothing is left to do
