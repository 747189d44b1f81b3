"""A checkpoint that no run could go on from never takes the place of one that it could."""

import math
import signal
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from polyad.parallel import comm
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.parallel.zero import fragments
from polyad.train.loop.loop import TrainLoop
from tests.helpers.everyday import everyday
from tests.helpers.runs import ended, run


def run_with_bad_validations(
    config: Path, bad: Sequence[int], *overrides: str, stop_at: int | None = None
) -> tuple[str, str]:
    """`polyad train` where some validations give NaN, counted from 0.

    Args:
        config: of the run.
        bad: the validations.
        overrides: `key=value`.
        stop_at: the validation in which a signal comes.

    Returns:
        How it ended, and what it said.
    """
    count = iter(range(1000))
    real = TrainLoop._validate

    def validate(self: TrainLoop) -> dict[str, float]:
        number = next(count)
        if number == stop_at and comm.rank() == comm.size() - 1:
            self.stop.number = signal.SIGTERM
        scores = real(self)
        return scores | {"validation_loss": math.nan} if number in bad else scores

    with mock.patch.object(TrainLoop, "_validate", validate):
        return ended(config, *overrides)


def run_with_bad_weights(config: Path, name: str, step: int, *overrides: str) -> tuple[str, str]:
    """`polyad train` where an element of a buffer or weight is NaN before a step's checkpoint."""
    save = TrainLoop._save

    def spoiled(self: TrainLoop) -> None:
        values = dict(self.engine.module.named_buffers())
        masters = fragments(self.engine)  # of this process
        values |= {each: fragment.values["master"] for each, fragment in masters.items()}
        if self.state.step == step and name in values:
            with torch.no_grad():
                values[name].view(-1)[-1] = math.nan
        save(self)

    with mock.patch.object(TrainLoop, "_save", spoiled):
        return ended(config, *overrides)


def steps_kept(run: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return [int(path.name[5:]) for path in complete_checkpoints(run / "checkpoints")]


pytestmark = pytest.mark.distributed
RUN_CHANGES = {"checkpoint__every": 2, "checkpoint__keep_last": 1, "evaluation__every": 2}


@everyday(("every", "kept"), [(0, []), (2, [2]), (3, [3])], keep=[(2, [2])])
def test_a_bad_validation_ends_a_run_and_leaves_the_last_good_checkpoint(
    workers, config, tmp_path, every, kept
):
    # With checkpoints every 3 steps, that of step 3 is of weights whose last validation was finite.
    ends = workers(2).run(
        run_with_bad_validations, config, (1,), f"checkpoint.every={every}", "train.steps=6"
    )
    last = f"the last checkpoint is of step {kept[0]}" if kept else "there is no checkpoint yet"
    for end, _ in ends:
        assert end.startswith("RunError 1: step 4: validation_loss is nan")
        assert end.endswith(last)
    assert steps_kept(tmp_path / "run") == kept


@pytest.mark.slow
def test_a_checkpoint_of_a_validation_cut_short_takes_no_place(workers, config, tmp_path):
    # A signal in the second validation: step 4 is saved, and nobody knows what it is worth.
    ends = workers(2).run(run_with_bad_validations, config, (), "train.steps=8", stop_at=1)
    assert all(end.startswith("Stopped 143: stopped by SIGTERM") for end, _ in ends)
    assert steps_kept(tmp_path / "run") == [2, 4]
    # The next start validates it: it is bad, so that of step 2 stays.
    ends = workers(2).run(run_with_bad_validations, config, (0,), "train.steps=8")
    assert all(end.startswith("RunError 1: step 4: validation_loss is nan") for end, _ in ends)
    assert steps_kept(tmp_path / "run") == [2, 4]
    assert workers(2).run(run, config, "train.steps=8") == [8, 8]
    assert steps_kept(tmp_path / "run") == [8]


@everyday("asynchronous", ["false", "true"], keep=["true"])
def test_weights_that_are_not_finite_are_found_without_a_validation(
    workers, config, tmp_path, asynchronous
):
    words = ("evaluation.every=0", f"checkpoint.asynchronous={asynchronous}")
    ends = workers(2).run(run_with_bad_weights, config, "final_norm.bias", 4, *words)
    assert all(end.startswith("RunError 1: step 4 could not be saved: rank ") for end, _ in ends)
    assert "final_norm.bias (master) has numbers that are not finite" in ends[0][0]
    assert ends[0][0].endswith(f"continue from {tmp_path}/run/checkpoints/step-00000002")
    assert steps_kept(tmp_path / "run") == [2]
    assert [p.name for p in (tmp_path / "run/checkpoints").glob(".*")] == []  # nothing half written
    assert workers(2).run(run, config) == [6, 6]
    assert steps_kept(tmp_path / "run") == [6]
