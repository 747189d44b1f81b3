"""The checkpoints of a run: their names, which of them stay, and what a crash has left.

Imports no torch.
"""

import re
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polyad.parallel.checkpoint.format import MANIFEST_FILE, CheckpointError
from polyad.parallel.checkpoint.storage import (
    discard,
    reason_of,
    remove_file,
    remove_tree,
    rename,
    replace_file,
)
from polyad.parallel.checkpoint.verification import read_contents

STEP_FOLDER = re.compile(r"step-(\d{8,})")
LATEST_FILE, BEST_FILE = "latest", "best"
LEFT_BY_CRASHES = (".step-*.partial", ".step-*.deleted", ".step-*.replaced")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept when a new one is written."""

    last: int | None = None
    """How many of the newest good checkpoints are kept; None keeps all."""
    every: int = 0
    """Checkpoints whose step is a multiple of this are always kept; 0: none."""
    best: int | None = None
    """The step of the best one, which is always kept, and named in `best`; None: there is none."""
    judged: bool = True
    """Whether no validation of the new one's weights is due; else it may turn out not to be good,
    and takes the place of none."""


def step_folder(step: int) -> str:
    """The name of a checkpoint."""
    return f"step-{step:08d}"


def staging_folder(folder: Path, step: int) -> Path:
    """A new name for a folder that is not a checkpoint yet.

    Each name is used once: what a process writes that outlives its run is never read.
    """
    return folder / f".{step_folder(step)}.{secrets.token_hex(4)}.partial"


def step_folders(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint in a run's `checkpoints` folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if STEP_FOLDER.fullmatch(p.name)), key=_step)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Folders that have a manifest: every checkpoint that was committed has one."""
    return [path for path in step_folders(folder) if (path / MANIFEST_FILE).is_file()]


def prune(folder: Path, step: int, keep: Retention) -> None:
    """Removes the checkpoints that are not to be kept.

    That of `step` was just written and always stays. It is good once it is judged, so the last good
    one is never removed. Others count as good if their manifest, the sizes of their files and their
    small files are, and if they are judged; a later one than `step` is of a run that went back, and
    is left alone.
    """
    if keep.last is None:
        return
    before = [path for path in complete_checkpoints(folder) if _step(path) < step]
    newest: list[Path] = []
    for path in reversed(before):
        if len(newest) < keep.last - keep.judged and _is_good(path):
            newest.append(path)
    for path in before:
        for_ever = (keep.every and _step(path) % keep.every == 0) or _step(path) == keep.best
        if path not in newest and not for_ever:
            remove_or_warn(path, discard)


def point_at_newest(folder: Path) -> None:
    """Points `latest` at the newest complete checkpoint, or removes it if there is none."""
    found = complete_checkpoints(folder)
    if found:
        replace_file(folder / LATEST_FILE, f"{found[-1].name}\n".encode())
    else:
        remove_file(folder / LATEST_FILE)


def put_back(folder: Path) -> None:
    """Gives checkpoints their names again whose replacement a crash has cut short."""
    for path in replaced_checkpoints(folder):
        final = folder / path.name.removeprefix(".").removesuffix(".replaced")
        if not final.exists():
            rename(path, final)


def replaced_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that stepped aside for another one of the same step, and were not removed."""
    return sorted(folder.glob(".step-*.replaced"))


def remove_leftovers(folder: Path) -> None:
    """Removes what a crash left of checkpoints that were never committed, or half removed."""
    put_back(folder)
    for pattern in LEFT_BY_CRASHES:
        for path in folder.glob(pattern):
            remove_or_warn(path, remove_tree)


def remove_or_warn(path: Path, way: Callable[[Path], None]) -> None:
    """Removes what is not needed any more; if that fails, a run does not end for it."""
    try:
        way(path)
    except OSError as error:
        print(
            f"polyad: warning: {path}: could not be removed: {reason_of(error)}; the next start "
            f"of the run will try again",
            file=sys.stderr,
        )


def _step(path: Path) -> int:
    match = STEP_FOLDER.fullmatch(path.name)
    assert match
    return int(match[1])


def _is_good(path: Path) -> bool:
    try:
        return read_contents(path).is_judged
    except CheckpointError:
        return False
