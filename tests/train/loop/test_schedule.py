"""Learning rates by hand."""

import pytest
import torch

from polyad.train.loop.schedule import ScheduleConfig, learning_rate


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


def test_mlp_mixers_line_falls_from_the_end_of_warmup_to_zero():
    config = ScheduleConfig(kind="linear", warmup_steps=4, final_ratio=0.0)
    rates = [learning_rate(config, 1.0, step, 12) for step in (3, 4, 6, 8, 11, 12, 20)]
    # Steps 4 .. 12: an eighth less each.
    assert rates == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.125, 0.0, 0.0])


def test_v_moes_line_ends_at_its_last_rate():
    # 3e-3 to 1e-5 over 56,000 steps, of which 10,000 warm up.
    config = ScheduleConfig(kind="linear", warmup_steps=10_000, final_ratio=1e-5 / 3e-3)
    assert learning_rate(config, 3e-3, 4_999, 56_000) == pytest.approx(1.5e-3)
    assert learning_rate(config, 3e-3, 33_000, 56_000) == pytest.approx((3e-3 + 1e-5) / 2)
    assert learning_rate(config, 3e-3, 56_000, 56_000) == pytest.approx(1e-5)
    torch_rates = [group["lr"] for group in stepped(config, 3e-3, 56)]
    ours = [learning_rate(config.model_copy(update={"warmup_steps": 10}), 3e-3, s, 56)
            for s in range(10, 56)]  # fmt: skip
    assert ours == pytest.approx(torch_rates)


def stepped(config, peak, steps):
    """The groups of an optimizer that torch's LinearLR steps, after 10 steps of warm-up."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, config.final_ratio, steps - 10)
    for _ in range(steps - 10):
        yield dict(optimizer.param_groups[0])
        optimizer.step()
        schedule.step()
