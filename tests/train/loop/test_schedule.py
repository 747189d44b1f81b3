"""Learning rates by hand."""

import pytest

from train.loop.schedule import ScheduleConfig, learning_rate


def test_warmup_rises_linearly_to_the_peak():
    config = ScheduleConfig(warmup_steps=4)
    rates = [learning_rate(config, 1.0, step, 100) for step in range(5)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_ends_at_the_final_ratio_and_is_halfway_in_the_middle():
    config = ScheduleConfig(warmup_steps=10, final_ratio=0.1)
    # Steps 10 .. 110: in the middle, at 60, the mean of 1 and 0.1.
    assert learning_rate(config, 6e-4, 60, 110) == pytest.approx(6e-4 * 0.55)
    assert learning_rate(config, 6e-4, 110, 110) == pytest.approx(6e-5)
    assert learning_rate(config, 6e-4, 500, 110) == pytest.approx(6e-5)


def test_decay_steps_do_not_depend_on_the_length_of_the_run():
    config = ScheduleConfig(decay_steps=50)
    assert learning_rate(config, 1.0, 20, 60) == learning_rate(config, 1.0, 20, 600)


def test_constant_stays():
    assert learning_rate(ScheduleConfig(kind="constant"), 0.3, 999, 10) == 0.3
