"""The start of a process, the duration of a step and its wait for data, by the clock."""

import pytest

from polyad.train.loop import profiling
from polyad.train.loop.profiling import StepTimer
from tests.helpers.runs import records, run_with_slow_records


def test_a_step_ends_where_the_next_begins_and_scores_are_set_aside(monkeypatch):
    now = 100.0
    monkeypatch.setattr(profiling.time, "monotonic", lambda: now)
    timer = StepTimer()
    now = 103.0
    assert timer.step() == 3.0
    now = 104.0
    with timer.paused():  # 1 second after the step, 5 seconds of scores, 2 seconds of step
        now = 109.0
    now = 111.0
    assert timer.step() == 3.0


@pytest.mark.distributed
def test_the_throughput_of_a_step_pays_for_the_record_before(workers, config, tmp_path):
    workers(1).run(run_with_slow_records, config, 0.5, "train.steps=4")
    for line in records(tmp_path / "run")[2:]:  # the record of a step is written during the next
        assert line["step_seconds"] > 0.5
        assert line["tokens_per_second"] < 2 * 8 * 32  # tokens of a step in half a second
