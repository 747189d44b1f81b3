"""Runs whose validations are not finite, and whose weights are not; called in workers."""

import contextlib
import io
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from polyad.parallel import comm
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.parallel.zero import fragments
from polyad.train.errors import Stopped
from polyad.train.loop.loop import TrainLoop
from polyad.train.train import main


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


def ended(config: Path, *overrides: str) -> tuple[str, str]:
    """How `polyad train` ends, and what it says."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            end = f"step {main(config, overrides).step}"
        except (Exception, Stopped) as error:
            end = f"{type(error).__name__} {getattr(error, 'exit_status', '-')}: {error}"
    return end, said.getvalue()


def steps_kept(run: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return [int(path.name[5:]) for path in complete_checkpoints(run / "checkpoints")]
