"""A run's checkpoints folder: names, which checkpoints are kept, and leftovers of a crash.

All writes, renames and removals in that folder go through this module, and each is durable on disk
when it returns, so that a test can record every operation and make any of them fail. Does not
import torch.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyad.data.errors import say
from polyad.data.files import flush_to_disk, named
from polyad.parallel.checkpoint.format import MANIFEST_FILE, CheckpointError, read_contents

STEP_FOLDER = re.compile(r"step-(\d{8,})")
LATEST_FILE, BEST_FILE = "latest", "best"
LEFT_BY_CRASHES = (".step-*.partial", ".step-*.deleted", ".step-*.replaced")


@dataclass(frozen=True)
class Retention:
    """The rule for keeping checkpoints when a new one is written."""

    last: int | None = None
    """Number of newest good checkpoints to keep; None keeps all."""
    every: int = 0
    """Checkpoints whose step is a multiple of this are always kept; 0 for none."""
    best: int | None = None
    """Step of the best checkpoint, which is always kept, and named in `best`; None for none."""
    judged: bool = True
    """Whether no validation of the new checkpoint's weights is pending; otherwise it may turn out
    not to be good, and replaces none."""


def step_folder(step: int) -> str:
    """Returns the name of a checkpoint."""
    return f"step-{step:08d}"


def staging_folder(folder: Path, step: int) -> Path:
    """Returns a new name for a folder that is not a checkpoint yet.

    Each name is used only once: files that a process writes after its run has ended are never read.
    """
    return folder / f".{step_folder(step)}.{secrets.token_hex(4)}.partial"


def step_folders(folder: Path) -> list[Path]:
    """Lists the folders named like checkpoints in a run's `checkpoints` folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if STEP_FOLDER.fullmatch(p.name)), key=_step)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Lists the folders that have a manifest, as every committed checkpoint does."""
    return [path for path in step_folders(folder) if (path / MANIFEST_FILE).is_file()]


def prune(folder: Path, step: int, keep: Retention) -> None:
    """Removes checkpoints that need not be kept.

    The one of `step` has just been written and is always kept. It is good once it is judged, so the
    last good checkpoint is never removed. Others are good if their manifest, file sizes and small
    files are valid, and they are judged; those later than `step` belong to a run that went back,
    and are not touched.
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


def put_back(folder: Path) -> None:
    """Restores the names of checkpoints whose replacement was interrupted by a crash."""
    for path in replaced_checkpoints(folder):
        final = folder / path.name.removeprefix(".").removesuffix(".replaced")
        if not final.exists():
            rename(path, final)


def replaced_checkpoints(folder: Path) -> list[Path]:
    """Lists checkpoints that were renamed for another one of the same step, and not removed."""
    return sorted(folder.glob(".step-*.replaced"))


def remove_leftovers(folder: Path) -> None:
    """Removes leftovers of a crash: checkpoints never committed, or half removed."""
    put_back(folder)
    for pattern in LEFT_BY_CRASHES:
        for path in folder.glob(pattern):
            remove_or_warn(path, remove_tree)


def remove_or_warn(path: Path, way: Callable[[Path], None]) -> None:
    """Removes something that is no longer needed; a failure is only a warning."""
    try:
        way(path)
    except OSError as error:
        say(
            f"warning: {path}: could not be removed: {reason_of(error)}; the next start of the "
            f"run will try again"
        )


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _is_good(path: Path) -> bool:
    """Whether it opens and no validation of its weights was cut off: others may not be finite."""
    try:
        return read_contents(path).state.unfinished is None
    except CheckpointError:
        return False


def reason_of(error: OSError) -> str:
    """Returns the reason of a failed file operation in a few words."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def write_file(path: Path, parts: Iterable[Any], *, replace: bool = False) -> None:
    """Writes a file and waits until its content, but not yet its name, is on disk.

    Args:
        path: the file, which must not exist.
        parts: its content, piece by piece, as bytes or buffers.
        replace: whether it may exist; it is then truncated first.

    Raises:
        OSError: with the name of the file.
    """
    existing = os.O_TRUNC if replace else os.O_EXCL
    with named(path):  # write and fsync report a descriptor
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | existing, 0o644)
        try:
            for part in parts:
                rest = memoryview(part)
                while len(rest):
                    rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(path: Path, above: int = 1) -> None:
    """Creates a folder, durable on disk on return.

    Args:
        path: the folder.
        above: how many of its parent folders may be missing, and are created: a run's folder that
            was removed is not recreated in part.
    """
    if path.is_dir():
        return
    if above:
        make_folder(path.parent, above - 1)
    try:
        os.mkdir(path)
    except FileExistsError:  # another process was faster
        if not path.is_dir():
            raise
    flush_to_disk(path.parent)


def rename(path: Path, target: Path) -> None:
    """Renames a file or folder within its folder, durable on disk on return."""
    os.rename(path, target)
    flush_to_disk(target.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Writes or replaces a file: readers see either the old or the new content."""
    partial = path.with_name(f".{path.name}.partial")
    write_file(partial, [content], replace=True)
    rename(partial, path)


def remove_file(path: Path) -> None:
    """Removes a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Removes a folder with its content. Links are removed, not followed."""
    with os.scandir(path) as entries:
        listed = list(entries)
    for entry in listed:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            os.unlink(entry.path)
    os.rmdir(path)


def set_aside(path: Path, ending: str = "deleted") -> Path:
    """Renames a folder before its removal, so that a half-removed one is never taken for a
    checkpoint.

    Args:
        path: the folder.
        ending: suffix of its new name.
    """
    aside = path.with_name(f".{path.name}.{ending}")
    if aside.exists():
        remove_tree(aside)
    rename(path, aside)
    return aside


def discard(path: Path) -> None:
    """Removes a folder: first renames it durably, then removes its content."""
    remove_tree(set_aside(path))
