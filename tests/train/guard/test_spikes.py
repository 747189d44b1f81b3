"""Spikes: what counts as one, by hand; runs that warn and skip."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from polyad.model import heads
from polyad.train.guard.spikes import NO_LIMITS, MonitorConfig, limits_of, remember
from polyad.train.start import find_start, open_plan
from polyad.train.state import TrainState
from polyad.train.tasks.distillation import cross_entropy
from tests.helpers.everyday import everyday
from tests.helpers.runs import records, run, run_and_listen, run_expecting_error
from tests.helpers.training import tensors

pytestmark = pytest.mark.distributed


def with_bad_batches(
    train: Callable[..., Any], config: Path, what: str, bad: tuple[int, ...], *overrides: str
) -> Any:
    """Trains where some global batches are bad: the samples of these are known by their targets.

    Args:
        train: a function that trains, whose result this is.
        config: of the run.
        what: `loss`: 6 times as high, its gradient too; `gradient`: 400 times, at the same loss.
        bad: the batches.
        overrides: `key=value`.
    """
    plan = find_start(open_plan(config, ["run.folder=" + str(config.parent / "no-such-run")], 1))
    size, samples = plan.config.train.global_batch_size, plan.task.samples
    rows = torch.stack([samples[b * size + i].target_ids_BT for b in bad for i in range(size)])
    usual = heads.linear_cross_entropy

    def loss(
        x: torch.Tensor, weight: torch.Tensor, flat: torch.Tensor, part: object, bias: None = None
    ) -> torch.Tensor:
        targets = flat.view(-1, rows.shape[1])
        hit = (targets[:, None] == rows[None].to(targets.device)).all(-1).any(-1)[:, None]
        if not hit.any():
            return usual(x, weight, flat, part, bias)  # type: ignore[arg-type]
        plain = cross_entropy(x @ weight.t(), flat).view_as(targets)
        factor = torch.where(hit, 6.0 if what == "loss" else 400.0, 1.0)
        if what == "loss":
            return (plain * factor).mean()
        return (plain + (factor - 1) * (plain - plain.detach())).mean()

    with mock.patch.object(heads, "linear_cross_entropy", loss):
        return train(config, *overrides)


STEPS, BAD = 16, 11  # global batch 11 is that of step 12, judged by 11 steps before it
RUN_CHANGES = {
    "monitor": {"spike_warmup": 8, "spike_window": 16}, "train__steps": STEPS, "train__ema": 0.9,
    "checkpoint__every": 5, "evaluation__every": 0, "model__dropout": 0.1,
}  # fmt: skip


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


def test_equal_values_have_room_around_them_and_old_ones_leave_the_window():
    config, state = state_of([9.0] * 20 + [2.0] * 6 + [500.0] * 2, [3.0] * 28)
    assert state.recent_losses == [2.0] * 6 + [500.0] * 2  # which do not move the median
    limits = limits_of(config, state)
    assert limits.loss == pytest.approx(2.0 + 10 * 0.01 * 2.0)
    assert limits.grad_norm == pytest.approx(3.0 * math.e)
    found = [(2.21, 1.0), (2.0, 8.2), (0.1, 0.0), (math.nan, 1e9), (2.0, math.inf)]
    # Lower is no spike; what is not finite is skipped for another reason.
    assert [limits.exceeded(*each) for each in found] == [True, True, False, False, False]


def spikes(folder):
    return [record["spike"] for record in records(folder) if "spike" in record]


def same(one, other):
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.slow
def test_a_warning_changes_nothing_and_names_documents(workers, config, tmp_path):
    (steps, said), _ = workers(2).run(with_bad_batches, run_and_listen, config, "loss", (BAD,))
    assert steps == STEPS
    (event,) = spikes(tmp_path / "run")
    assert (event["step"], event["batch"], event["action"]) == (BAD + 1, BAD, "warn")
    assert event["loss"] > event["loss_limit"]
    assert list(event["documents"].values()) != [[]]
    assert not records(tmp_path / "run")[BAD]["skipped"]
    assert f"step {BAD + 1}: spike: loss " in said
    words = (f"run.folder={tmp_path / 'silent'}", "monitor.spike_action=none")
    workers(2).run(with_bad_batches, run, config, "loss", (BAD,), *words)
    assert not spikes(tmp_path / "silent")
    last = f"checkpoints/step-{STEPS:08d}"
    assert same(tmp_path / "run" / last, tmp_path / "silent" / last)


@everyday(
    ("stage", "precision", "what"),
    itertools.product((1, 2, 3), ("fp32", "bf16"), ("loss", "gradient")),
    keep=[(1, "bf16", "gradient")],
)
def test_a_skipped_spike_leaves_the_weights_as_they_were(
    workers, config, tmp_path, stage, precision, what
):
    options = ("monitor.spike_action=skip", f"parallel.zero_stage={stage}", "checkpoint.every=1")
    for steps in (BAD + 1, BAD + 2):  # a skipped step is saved where it is the last
        words = (*options, f"train.precision={precision}", f"train.steps={steps}")
        workers(2).run(with_bad_batches, run, config, what, (BAD,), *words)
    folder = tmp_path / "run"
    event = next(event for event in spikes(folder) if event["batch"] == BAD)
    assert event["action"] == "skip"
    assert (event["loss"] > event["loss_limit"]) == (what == "loss")
    # A loss 6 times as high has a gradient 6 times as long, which may be too long as well.
    assert event["grad_norm"] > event["grad_norm_limit"] or what == "loss"
    lines = records(folder)
    assert lines[BAD]["skipped"]
    assert sum(line["skipped"] for line in lines) == len(spikes(folder)) < 3
    assert lines[-1]["skipped_steps"] == 0  # those are the ones that were not finite
    steps = [folder / "checkpoints" / f"step-{BAD + k:08d}" for k in range(3)]
    assert same(steps[0], steps[1])
    assert not same(steps[1], steps[2])


@pytest.mark.slow
def test_too_many_spikes_end_the_run(workers, config, tmp_path):
    bad = tuple(range(BAD, BAD + 4))
    options = ("monitor.spike_action=skip", "monitor.max_skips=2")
    given = (run_expecting_error, config, "loss", bad, *options)
    name, text, status = workers(2).run(with_bad_batches, *given)[0]
    assert (name, status) == ("RunError", 1)
    assert "monitor.max_skips: 2" in text
    assert [event["batch"] for event in spikes(tmp_path / "run")][:2] == [BAD, BAD + 1]


@pytest.mark.slow
def test_the_estimate_goes_on_where_it_was(workers, config, tmp_path):
    """A spike right after a resumption is judged by the steps before the stop, and alike."""
    whole, halves = (f"run.folder={tmp_path / n}" for n in ("whole", "halves"))
    workers(2).run(with_bad_batches, run, config, "loss", (BAD,), whole)
    workers(2).run(run, config, halves, f"train.steps={BAD}")
    workers(2).run(with_bad_batches, run, config, "loss", (BAD,), halves)
    assert spikes(tmp_path / "whole") == spikes(tmp_path / "halves") != []
