"""Finds the checkpoint for a path, and the one from which a run resumes.

A path means the newest complete checkpoint of a run; reading is retried if the run deletes it
meanwhile. A run resumes from the newest checkpoint of which every byte is verified.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias, TypeVar

from polyad.data.progress import Progress
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import (
    INDEX_FILE,
    MANIFEST_FILE,
    CheckpointError,
    DamagedCheckpoint,
)
from polyad.parallel.checkpoint.keeping import (
    BEST_FILE,
    STEP_FOLDER,
    complete_checkpoints,
    step_folders,
)
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.checkpoint.verification import PATIENCE, Block, Manifest, share_of
from polyad.parallel.families import is_huggingface_folder
from polyad.parallel.meeting import told_by_first
from polyad.parallel.plain_weights import is_plain_folder

T = TypeVar("T")
Choose: TypeAlias = Callable[[Path], Path]
"""Returns the checkpoint for a path, like `newest_of` and `best_checkpoint`."""


def best_checkpoint(path: Path) -> Path:
    """Returns the checkpoint of a run's best validation.

    Args:
        path: the run's folder.

    Raises:
        CheckpointError: none is marked, or it does not exist.
    """
    marked = path / "checkpoints" / BEST_FILE
    if not marked.is_file():
        raise CheckpointError(
            f"{path}: no checkpoint is marked as the best; a run with checkpoint.keep_best: true "
            f"and a validation split marks one"
        )
    name = marked.read_text(errors="replace").strip()
    if not STEP_FOLDER.fullmatch(name) or not (marked.parent / name / MANIFEST_FILE).is_file():
        raise CheckpointError(
            f"{marked}: names {name!r:.60}, but there is no such checkpoint in the same folder"
        )
    return marked.parent / name


def find_checkpoint(path: Path) -> Path:
    """Returns the checkpoint for a path: the path itself, or the newest in a run folder.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST_FILE).is_file() and (path / INDEX_FILE).is_file():
        return path
    for folder in (path / "checkpoints", path):
        if found := complete_checkpoints(folder):
            return found[-1]
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such folder")
    if path.is_file():
        raise CheckpointError(
            f"{path}: is a file; a checkpoint is a folder step-NNNNNNNN, and a run has several. "
            "Pickles (.pt, .bin) are not read, because they could run code"
        )
    if is_huggingface_folder(path) or is_plain_folder(path):
        kind = "a Hugging Face folder" if is_huggingface_folder(path) else "a folder of weights"
        raise CheckpointError(
            f"{path}: is {kind}; convert it to a checkpoint with `polyad convert {path} "
            "DESTINATION --to polyad`"
        )
    raise CheckpointError(f"{path}: holds no complete checkpoint (a run folder or a step-* folder)")


def newest_of(path: Path) -> Path:
    """Returns the newest checkpoint of a run or its `checkpoints` folder; other paths unchanged."""
    found = complete_checkpoints(path / "checkpoints") or complete_checkpoints(path)
    return found[-1] if found else path


def read_newest(path: Path, read: Callable[[Path], T], choose: Choose = newest_of) -> T:
    """Reads the checkpoint for a path; if it is deleted meanwhile, reads the one chosen then.

    Args:
        path: a run, or anything else that `read` accepts.
        read: called with the chosen path.
        choose: chooses the checkpoint for the path.

    Raises:
        Exception: any exception of `read` for a folder that still exists.
    """
    if choose is newest_of:
        _say_if_another_is_best(path)
    while True:
        chosen = choose(path)
        before = _identity(chosen)
        try:
            return read(chosen)
        except (ValueError, OSError):
            if before is None or _identity(chosen) == before or choose(path) == path:
                raise
            print(
                f"polyad: {chosen} was deleted while it was being read; reading what {path} "
                f"has now",
                file=sys.stderr,
                flush=True,
            )


def _say_if_another_is_best(run: Path) -> None:
    if not (run / "checkpoints" / BEST_FILE).is_file():
        return
    with suppress(CheckpointError):
        best, newest = best_checkpoint(run), newest_of(run)
        if best != newest:
            print(
                f"polyad: reading the newest checkpoint of {run}, {newest.name}; its best "
                f"validation was that of {best}, which --best, or this path, reads",
                file=sys.stderr,
                flush=True,
            )


def chosen_by_main(name: str, path: Path, choose: Choose) -> Path:
    """Returns rank 0's choice for a path on all ranks, before they have met: a run may write
    another checkpoint before the others look.

    Args:
        name: a name for the path, the same on all.
        path: as in `read_newest`.
        choose: chooses the checkpoint for the path.
    """
    chosen = f"{choose(path)}" if comm.environment_rank() == 0 else None
    return Path(told_by_first(name, chosen))


def _identity(folder: Path) -> int | None:
    """Returns a value that changes if another folder takes this name; None if there is none."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def newest_that_opens(folder: Path) -> Checkpoint | None:
    """Returns the newest checkpoint with a valid manifest, sizes and small files, or None.

    Nothing else is read, so every process may call it separately, before there is a process group.
    Damaged checkpoints are named in a warning.

    Args:
        folder: the run's `checkpoints` folder.

    Raises:
        CheckpointError: there are some, but none can be opened; or one has another version.
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
    """Broadcasts the checkpoint that rank 0 has opened.

    Only rank 0 reads manifest, index, state and headers: if 1,024 processes each requested the
    sizes of 1,024 files, a server would get a million requests.

    Args:
        checkpoint: the checkpoint on rank 0; ignored on the others.
    """
    contents = comm.from_main(None if checkpoint is None else checkpoint.contents)
    if contents is None or comm.rank() == 0:
        return checkpoint if comm.rank() == 0 else None
    return Checkpoint(contents.manifest.folder, contents)


def newest_verified(checkpoint: Checkpoint | None, folder: Path) -> Checkpoint | None:
    """Returns the checkpoint to resume from, with every byte verified; all ranks share the reading.

    Args:
        checkpoint: the result of `newest_that_opens` on rank 0.
        folder: the run's `checkpoints` folder.

    Returns:
        This one, or the next older one that is good, the same on every rank; damaged ones are named
        in a warning.

    Raises:
        CheckpointError: on every rank: there are some, but none is good.
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
    """Opens a path on rank 0, and returns on every rank the checkpoint, or why it is none."""
    checkpoint, reason = None, None
    if comm.rank() == 0:
        try:
            known = newest is not None and newest.folder == path
            checkpoint = newest if known else Checkpoint(path)
        except CheckpointError as error:
            reason = str(error)
    return shared(checkpoint), comm.from_main(reason)


def _verify_together(manifest: Manifest) -> str | None:
    """Reads every byte once, each on one rank; None if all are correct, else the first reason."""
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
    """Yields a function that takes the bytes verified so far, and prints rate and remaining time.

    Args:
        manifest: the manifest that is verified.
        blocks: its blocks to verify.
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
            line = f"polyad: warning: {reason}; the run continues from {path.name}"
            print(line, file=sys.stderr, flush=True)
