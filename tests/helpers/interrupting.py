"""Slows down parts of a run, so that a signal can be sent during them."""

import os
import time
from pathlib import Path

from polyad.parallel.checkpoint.save import Saver
from polyad.train.loop import loop


def slow_saves(folder: Path, rank: int) -> None:
    """Makes every save take a second longer; a file `saving` marks its start."""
    _slow_down(Saver, "save", folder / "saving")


def slow_steps(folder: Path, rank: int) -> None:
    """Makes every step take a second longer; a file `step` marks its start."""
    _slow_down(loop, "issue_step", folder / "step")


def _slow_down(owner: object, name: str, mark: Path) -> None:
    call = getattr(owner, name)

    def slow(*arguments, **named):
        mark.touch()
        time.sleep(1.0)
        return call(*arguments, **named)

    setattr(owner, name, slow)


def leave_the_shell(folder: Path, rank: int) -> None:
    """Makes the run's parent exit once the run takes steps, as with `polyad train &`."""
    metrics = folder / "run" / "metrics.jsonl"
    child = os.fork()
    if child == 0:
        (folder / "process").write_text(f"{os.getpid()}")
        return
    while not (metrics.exists() and metrics.read_text()):
        time.sleep(0.005)
    os._exit(0)
