"""Which checkpoint a run goes on from: the newest one whose every byte is verified."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from polyad.data.progress import Progress
from polyad.parallel import comm
from polyad.parallel.checkpoint.checkpoint import Checkpoint
from polyad.parallel.checkpoint.commit import step_folders
from polyad.parallel.checkpoint.manifest import (
    PATIENCE,
    Block,
    CheckpointError,
    DamagedCheckpoint,
    Manifest,
    share_of,
)


def newest_that_opens(folder: Path) -> Checkpoint | None:
    """The newest checkpoint whose manifest, sizes and small files are right, or None if none is.

    Nothing else is read, so every process may do it for itself, before there is a process group.
    Those that are damaged are named in a warning.

    Args:
        folder: the run's `checkpoints` folder.

    Raises:
        CheckpointError: there are some, and none opens; or one is newer than this program.
    """
    reasons = []
    for path in reversed(step_folders(folder)):
        try:
            checkpoint = Checkpoint(path)
        except DamagedCheckpoint as error:
            reasons.append(str(error))
            continue
        _warn(reasons, path)
        return checkpoint
    if reasons:
        raise DamagedCheckpoint(_none_is_good(folder, reasons))
    return None


def shared(checkpoint: Checkpoint | None) -> Checkpoint | None:
    """The checkpoint that rank 0 has opened, on every process.

    Manifest, index, state and headers are read by rank 0 alone: 1,024 processes that each ask for
    the sizes of 1,024 files would be a million requests to a server.

    Args:
        checkpoint: what rank 0 has; of the others it is not looked at.
    """
    contents = comm.from_main(None if checkpoint is None else checkpoint.contents)
    if contents is None or comm.rank() == 0:
        return checkpoint if comm.rank() == 0 else None
    return Checkpoint(contents.manifest.folder, contents)


def newest_verified(checkpoint: Checkpoint | None, folder: Path) -> Checkpoint | None:
    """The checkpoint to go on from, with every byte verified; all processes share the reading.

    Args:
        checkpoint: what `newest_that_opens` gave on rank 0.
        folder: the run's `checkpoints` folder.

    Returns:
        That one, or the next older one that is good, the same on every process; those that are
        damaged are named in a warning.

    Raises:
        CheckpointError: on every process: there are some, and none is good.
    """
    newest = comm.from_main(None if checkpoint is None else checkpoint.folder)
    if newest is None:
        return None
    found = step_folders(folder) if comm.rank() == 0 else []
    older = found[: found.index(newest)][::-1] if newest in found else found[::-1]
    reasons: list[str] = []
    for path in comm.from_main([newest, *older]) or []:
        opened, reason = _opened(path, checkpoint)
        if opened is not None:
            reason = _verify_together(opened.manifest)
            if reason is None:
                _warn(reasons, path)
                opened.is_verified = True
                return opened
        reasons.append(reason or "")
    raise DamagedCheckpoint(_none_is_good(folder, reasons))


def _opened(path: Path, newest: Checkpoint | None) -> tuple[Checkpoint | None, str | None]:
    """What rank 0 finds at a path, on every process: a checkpoint, or why it is none."""
    checkpoint, reason = None, None
    if comm.rank() == 0:
        try:
            known = newest is not None and newest.folder == path
            checkpoint = newest if known else Checkpoint(path)
        except CheckpointError as error:
            reason = str(error)
    return shared(checkpoint), comm.from_main(reason)


def _verify_together(manifest: Manifest) -> str | None:
    """Reads every byte once, each on one process; None if all is well, else the first reason."""
    reason = None
    share = share_of(manifest.blocks(), comm.rank(), comm.size())
    try:
        with progress_of(manifest, share, quiet=comm.rank() > 0) as report:
            manifest.verify(share, report, patience=PATIENCE if comm.rank() else 0.0)
    except CheckpointError as error:
        reason = str(error)
    if not comm.any_rank(reason is not None):
        return None
    return next(text for text in comm.from_all(reason) if text is not None)


@contextmanager
def progress_of(
    manifest: Manifest, blocks: Sequence[Block], *, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes verified so far, and prints rate and time left.

    Args:
        manifest: what is verified.
        blocks: of it.
        quiet: print nothing.
    """
    progress = Progress(report=(lambda line: None) if quiet else None)
    progress.start(f"verify {manifest.folder.name}", sum(block.size for block in blocks))
    try:
        yield progress.update
    finally:
        progress.close()


def _none_is_good(folder: Path, reasons: Sequence[str]) -> str:
    return (
        f"{'; '.join(reasons)}; no good checkpoint is left in {folder}: move the folder away to "
        f"begin at step 0, or put a good copy back"
    )


def _warn(reasons: Sequence[str], path: Path) -> None:
    if os.environ.get("RANK", "0") == "0":
        for reason in reasons:
            line = f"polyad: warning: {reason}; the run goes on from {path.name}"
            print(line, file=sys.stderr, flush=True)
