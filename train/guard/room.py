"""Checks before training that the disk has room for the run's checkpoints."""

import math
import os
import shutil
import sys
from pathlib import Path

from polyad.parallel.checkpoint.keeping import complete_checkpoints
from polyad.parallel.config import CheckpointConfig
from polyad.train.console import in_bytes
from polyad.train.errors import ConfigError


def check_room(
    folder: Path, checkpoint: CheckpointConfig, *, step: int, steps: int, size: int
) -> None:
    """Checks that the next checkpoints fit: as many as `checkpoint.keep_last` holds at once.

    Without that key the next one has to fit; if all that follow do not, or those that
    `checkpoint.keep_every` keeps, rank 0 says so.

    Args:
        folder: the run's.
        checkpoint: how often one is written, and how many stay.
        step: the step that the run goes on from.
        steps: of the whole run.
        size: of a checkpoint, in bytes.

    Raises:
        ConfigError: they do not fit.
    """
    every = checkpoint.every or steps
    coming = math.ceil(steps / every) - step // every
    if coming <= 0 or step >= steps:
        return
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    keep, present = checkpoint.keep_last, len(complete_checkpoints(folder / "checkpoints"))
    best = int(checkpoint.keep_best)  # perhaps none of the newest
    # One more than stay: a new checkpoint is written before an old one is removed.
    needed = 1 if keep is None else min(coming + best, max(keep + best + 1 - present, 1))
    if needed * size > free:
        some = "the next checkpoint" if needed == 1 else f"{needed} more checkpoints"
        advice = "" if keep in (None, 1) else "lower checkpoint.keep_last, "
        raise ConfigError(
            f"run.folder: {folder}: {some} of {in_bytes(size)} must fit, {place} has "
            f"{in_bytes(free)} free; {advice}make room or take another folder"
        )
    if keep is not None and checkpoint.keep_every:  # those that stay for ever
        often = math.lcm(every, checkpoint.keep_every)
        staying = steps // often - step // often
        advice = "a higher checkpoint.keep_every keeps fewer"
    else:
        staying = coming if keep is None else 0
        advice = "checkpoint.keep_last deletes old ones"
    if staying * size > free and os.environ.get("RANK", "0") == "0":
        print(
            f"polyad: warning: {staying} checkpoints of {in_bytes(size)} are to come and "
            f"{in_bytes(free)} are free; {advice}",
            file=sys.stderr,
            flush=True,
        )


def last_checkpoint(checkpoints: Path) -> str:
    """Says which checkpoint is the last.

    Args:
        checkpoints: the folder of a run's.
    """
    if found := complete_checkpoints(checkpoints):
        return f"the last checkpoint is of step {int(found[-1].name.removeprefix('step-'))}"
    return "there is no checkpoint yet"
