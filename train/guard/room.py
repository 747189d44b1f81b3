"""Room on the disk for a run's checkpoints: better said before training than when it is full."""

import math
import os
import shutil
import sys
from pathlib import Path

from torch import nn

from model.build import count_parameters
from parallel.checkpoint.checkpoint import Checkpoint
from parallel.checkpoint.commit import complete_checkpoints
from train.config.run import RunConfig
from train.errors import ConfigError
from train.loop.optimizer import num_state_tensors


def check_room(config: RunConfig, model: nn.Module, resume: Checkpoint | None) -> None:
    """Checks that the next checkpoints fit: as many as `checkpoint.keep_last` holds at once.

    Without that key the next one has to fit; if all that follow do not, rank 0 says so.

    Args:
        config: the run's.
        model: its model, on any device.
        resume: what it goes on from, which tells how large a checkpoint is.

    Raises:
        ConfigError: they do not fit.
    """
    size = resume.manifest.total_bytes if resume else _estimate(config, model)
    step = resume.training_step if resume else 0
    every = config.checkpoint.every or config.train.steps
    coming = math.ceil(config.train.steps / every) - step // every
    if coming <= 0:
        return
    folder = Path(config.run.folder)
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    keep, there = config.checkpoint.keep_last, len(complete_checkpoints(folder / "checkpoints"))
    # One more than stay: the new one is written before an old one goes.
    needed = 1 if keep is None else min(coming, max(keep + 1 - there, 1))
    if needed * size > free:
        some = "the next checkpoint" if needed == 1 else f"{needed} more checkpoints"
        advice = "" if keep in (None, 1) else "lower checkpoint.keep_last, "
        raise ConfigError(
            f"run.folder: {folder}: {some} of {_gigabytes(size)} must fit, {place} has "
            f"{_gigabytes(free)} free; {advice}make room or take another folder"
        )
    if keep is None and coming * size > free and os.environ.get("RANK", "0") == "0":
        print(
            f"polyad: warning: {coming} checkpoints of {_gigabytes(size)} are to come and "
            f"{_gigabytes(free)} are free; checkpoint.keep_last deletes old ones",
            file=sys.stderr,
            flush=True,
        )


def _estimate(config: RunConfig, model: nn.Module) -> int:
    return 4 * count_parameters(model) * (1 + num_state_tensors(config.optimizer))


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"
