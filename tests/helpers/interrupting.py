"""Slows down parts of a run, so that a signal can be sent during them."""

import os
import time
from pathlib import Path

from polyad.parallel.checkpoint.save import Saver
from polyad.train.loop import loop


def slow_saves(folder: Path, rank: int) -> None:
    """Makes every save take a second longer; a file `saving` marks its start."""
    save = Saver.save

    def slow(self, *arguments, **named):
        (folder / "saving").touch()
        time.sleep(1.0)
        save(self, *arguments, **named)

    Saver.save = slow  # type: ignore[method-assign]


def slow_steps(folder: Path, rank: int) -> None:
    """Makes every step take a second longer; a file `step` marks its start."""
    step = loop.issue_step

    def slow(*arguments, **named):
        (folder / "step").touch()
        time.sleep(1.0)
        return step(*arguments, **named)

    loop.issue_step = slow


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
