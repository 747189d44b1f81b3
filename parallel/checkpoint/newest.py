"""Reads a checkpoint beside a run that deletes old ones: the newest again, if it vanished."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypeVar

from polyad.parallel import comm
from polyad.parallel.checkpoint.commit import complete_checkpoints
from polyad.parallel.meeting import told_by_first

T = TypeVar("T")
Choose: TypeAlias = Callable[[Path], Path]
"""Gives the checkpoint that a path means, as `newest_of` and `best_checkpoint`."""


def newest_of(path: Path) -> Path:
    """The newest checkpoint of a run's folder, or of its `checkpoints`; any other path itself."""
    found = complete_checkpoints(path / "checkpoints") or complete_checkpoints(path)
    return found[-1] if found else path


def read_newest(path: Path, read: Callable[[Path], T], choose: Choose = newest_of) -> T:
    """Reads the checkpoint that a path means; if it is deleted meanwhile, the one it means then.

    Args:
        path: a run, or whatever else `read` knows.
        read: is given what was chosen.
        choose: of the path.

    Raises:
        Exception: whatever `read` raises of a folder that is still there.
    """
    while True:
        chosen = choose(path)
        before = _identity(chosen)
        try:
            return read(chosen)
        except (ValueError, OSError):
            if before is None or _identity(chosen) == before or choose(path) == path:
                raise
            print(
                f"polyad: {chosen} was deleted while it was read, by its run or by hand; what "
                f"{path} has now is read",
                file=sys.stderr,
                flush=True,
            )


def chosen_by_main(name: str, path: Path, choose: Choose) -> Path:
    """The checkpoint that a path means to the first process, on all, which have not met yet: a run
    may write another one before the others look.

    Args:
        name: of the path, the same on all.
        path: as in `read_newest`.
        choose: of the path.
    """
    chosen = f"{choose(path)}" if comm.environment_rank() == 0 else None
    return Path(told_by_first(name, chosen))


def _identity(folder: Path) -> int | None:
    """What differs once another folder has the name of this one; None: nothing has it."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None
