"""Spikes: what counts as one, by hand; runs that warn and skip."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from polyad.train.guard.spikes import (
    NO_LIMITS,
    Limits,
    MonitorConfig,
    limits_of,
    remember,
    spike_line,
)
from polyad.train.state import TrainState
from tests.helpers.everyday import everyday
from tests.helpers.runs import records, run, write_config
from tests.helpers.spikes import (
    console_with_bad_batches,
    error_with_bad_batches,
    run_with_bad_batches,
)
from tests.helpers.training import tensors

MONITOR = {"monitor__spike_warmup": 8, "monitor__spike_window": 16}
STEPS, BAD = 16, 11  # global batch 11 is that of step 12, judged by 11 steps before it


def state_of(losses, norms):
    config, state = MonitorConfig(spike_warmup=8, spike_window=8), TrainState()
    for loss, norm in zip(losses, norms, strict=True):
        remember(config, state, loss, norm)
    return config, state


def test_limits_by_hand():
    # Losses 1..8: median 4.5, distances .5 .5 1.5 1.5 2.5 2.5 3.5 3.5 with median 2.
    # Norms e^0 .. e^7: the logarithms have median 3.5 and the same distances.
    config, state = state_of(range(1, 9), [math.exp(k) for k in range(8)])
    limits = limits_of(config, state)
    assert limits.loss == pytest.approx(4.5 + 10 * 1.4826 * 2)
    assert limits.grad_norm == pytest.approx(math.exp(3.5 + 10 * 1.4826 * 2))
    assert limits_of(config, state_of(range(1, 8), [1.0] * 7)[1]) == NO_LIMITS  # still warming up
    silent = MonitorConfig(spike_action="none", spike_warmup=8, spike_window=8)
    assert limits_of(silent, state) == NO_LIMITS


def test_equal_values_have_room_around_them():
    config, state = state_of([2.0] * 8, [3.0] * 8)
    limits = limits_of(config, state)
    assert limits.loss == pytest.approx(2.0 + 10 * 0.01 * 2.0)
    assert limits.grad_norm == pytest.approx(3.0 * math.e)
    assert limits.exceeded(2.21, 1.0)
    assert limits.exceeded(2.0, 8.2)
    assert not limits.exceeded(0.1, 0.0)  # lower is no spike
    assert not limits.exceeded(math.nan, 1e9)  # skipped for another reason
    assert not limits.exceeded(2.0, math.inf)


def test_the_window_moves_and_wild_values_do_not_move_the_median():
    config, state = state_of([9.0] * 20 + [2.0] * 6 + [500.0] * 2, [1.0] * 28)
    assert state.recent_losses == [2.0] * 6 + [500.0] * 2
    assert limits_of(config, state).loss == pytest.approx(2.2)


def test_normal_numbers_are_hardly_ever_spikes_and_outliers_are():
    # Ten standard deviations: the estimate over 128 numbers is good to some 10%.
    generator = np.random.default_rng(0)
    config, state = MonitorConfig(), TrainState()
    seen = 0
    for _ in range(3000):
        loss, norm = (
            3.0 + 0.05 * generator.standard_normal(),
            math.exp(0.3 * generator.standard_normal()),
        )
        limits = limits_of(config, state)
        seen += limits.exceeded(loss, norm)
        if limits != NO_LIMITS:
            assert limits.exceeded(3.0 + 0.05 * 16, norm)
            assert limits.exceeded(loss, math.exp(0.3 * 18))
        remember(config, state, loss, norm)
    assert seen == 0


def test_a_line_names_the_limits():
    event = {
        "step": 7, "action": "skip", "loss": 9.5, "loss_limit": 3.25,
        "grad_norm": 1.0, "grad_norm_limit": math.inf,
    }  # fmt: skip
    assert spike_line(event) == (
        "step 7: spike: loss 9.5000 (limit 3.2500), norm 1.00 (limit inf); the step was skipped"
    )


def spikes(folder):
    return [record["spike"] for record in records(folder) if "spike" in record]


def same(one, other):
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.fixture
def config(tmp_path, prepared_path):
    return write_config(
        tmp_path / "config.yaml", prepared_path, **MONITOR,
        train__steps=STEPS, train__ema=0.9, checkpoint__every=5, evaluation__every=0,
        model__dropout=0.1,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.distributed
def test_a_warning_changes_nothing_and_names_documents(workers, config, tmp_path):
    results = workers(2).run(console_with_bad_batches, config, "loss", (BAD,))
    assert [outcome for outcome, _ in results] == [STEPS] * 2
    (event,) = spikes(tmp_path / "run")
    assert (event["step"], event["batch"], event["action"]) == (BAD + 1, BAD, "warn")
    assert event["loss"] > event["loss_limit"]
    (documents,) = event["documents"].values()
    assert documents
    assert not records(tmp_path / "run")[BAD]["skipped"]
    (line,) = [line for _, said in results for line in said.splitlines() if "spike" in line]
    assert line.startswith(f"step {BAD + 1}: spike: loss ")
    silent = f"run.folder={tmp_path / 'silent'}"
    workers(2).run(
        run_with_bad_batches, config, "loss", (BAD,), silent, "monitor.spike_action=none"
    )
    assert not spikes(tmp_path / "silent")
    last = f"checkpoints/step-{STEPS:08d}"
    assert same(tmp_path / "run" / last, tmp_path / "silent" / last)


@pytest.mark.distributed
@everyday(
    ("stage", "precision", "what"),
    itertools.product((1, 2, 3), ("fp32", "bf16"), ("loss", "gradient")),
    keep=[(1, "bf16", "gradient")],
)
def test_a_skipped_spike_leaves_the_weights_as_they_were(
    workers, config, tmp_path, stage, precision, what
):
    options = ("monitor.spike_action=skip", f"parallel.zero_stage={stage}", "checkpoint.every=1")
    options += (f"train.precision={precision}",)
    for steps in (BAD + 1, BAD + 2):  # a skipped step is saved where it is the last
        words = (*options, f"train.steps={steps}")
        workers(2).run(run_with_bad_batches, config, what, (BAD,), *words)
    folder = tmp_path / "run"
    event = next(event for event in spikes(folder) if event["batch"] == BAD)
    exceeded = Limits(event["loss_limit"], event["grad_norm_limit"])
    assert (event["action"], event["batch"]) == ("skip", BAD)
    assert (event["loss"] > exceeded.loss) == (what == "loss")
    # A loss 6 times as high has a gradient 6 times as long, which may be too long as well.
    assert event["grad_norm"] > exceeded.grad_norm or what == "loss"
    lines = records(folder)
    assert lines[BAD]["skipped"]
    assert sum(line["skipped"] for line in lines) == len(spikes(folder)) < 3
    assert lines[-1]["skipped_steps"] == 0  # those are the ones that were not finite
    steps = [folder / "checkpoints" / f"step-{BAD + k:08d}" for k in range(3)]
    assert same(steps[0], steps[1])
    assert not same(steps[1], steps[2])


@pytest.mark.distributed
@pytest.mark.slow
def test_too_many_spikes_end_the_run(workers, config, tmp_path):
    bad = tuple(range(BAD, BAD + 4))
    options = ("monitor.spike_action=skip", "monitor.max_skips=2")
    name, text, status = workers(2).run(error_with_bad_batches, config, "loss", bad, *options)[0]
    assert (name, status) == ("RunError", 1)
    assert "monitor.max_skips: 2" in text
    assert [event["batch"] for event in spikes(tmp_path / "run")][:2] == [BAD, BAD + 1]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_estimate_goes_on_where_it_was(workers, config, tmp_path):
    """A spike right after a resumption is judged by the steps before the stop, and alike."""
    whole, halves = (f"run.folder={tmp_path / n}" for n in ("whole", "halves"))
    workers(2).run(run_with_bad_batches, config, "loss", (BAD,), whole)
    workers(2).run(run, config, halves, f"train.steps={BAD}")
    workers(2).run(run_with_bad_batches, config, "loss", (BAD,), halves)
    assert spikes(tmp_path / "whole") == spikes(tmp_path / "halves")
    states = [
        json.loads((tmp_path / n / f"checkpoints/step-{STEPS:08d}/state.json").read_text())
        for n in ("whole", "halves")
    ]
    for key in ("recent_losses", "recent_grad_norms", "spikes"):
        assert states[0][key] == states[1][key]
    assert len(states[0]["recent_losses"]) == STEPS
