"""A run's folder belongs to one start of the run at a time."""

import fcntl
import os
from pathlib import Path

from parallel import comm
from train.errors import ConfigError

LOCK_FILE = ".lock"


class RunLock:
    """Held by the main process as long as it lives; the kernel lets go of it when that ends.

    Args:
        folder: the run's; it is made.
        world: this process. All call this together.

    Raises:
        ConfigError: on every process, if another start of the run is still going.
    """

    def __init__(self, folder: Path, world: comm.World) -> None:
        self._descriptor: int | None = None
        taken = False
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                taken = True
                self.release()
        if comm.any_rank(taken):
            raise ConfigError(
                f"run.folder: {folder} is in use by another start of this run, which is still going"
            )

    def release(self) -> None:
        """Lets the next start have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
