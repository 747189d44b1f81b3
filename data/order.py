"""The order of an epoch, computed once per node and stored in files that its processes map.

The order of an epoch of millions of samples takes seconds and hundreds of megabytes. Every rank
and every loader worker of a node needs the same one.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from polyad.data.files import locked, node_folder

Arrays: TypeAlias = dict[str, npt.NDArray[np.integer]]

SMALL = 2**18
"""Samples per epoch up to which each process computes its own order: faster than opening a file."""
UNUSED_DAYS = 7
"""Days without use after which an order is deleted, whichever run made it."""
WHOLE = "arrays.txt"
"""A file that lists the files of an order."""
_EPOCHS_KEPT = 2  # a batch, and what workers fetch ahead, may straddle the end of an epoch


class EpochOrders:
    """Named arrays for each epoch.

    Args:
        build: Computes the arrays of an epoch.
        samples_per_epoch: Number of samples in each epoch.
        identity: Everything that the arrays depend on, except the epoch.
    """

    def __init__(
        self,
        build: Callable[[int], Arrays],
        samples_per_epoch: int,
        identity: object,
    ) -> None:
        self._build = build
        self._samples = samples_per_epoch
        self._key = hashlib.sha256(repr(identity).encode()).hexdigest()[:24]
        self._epochs: dict[int, Arrays] = {}
        self._ahead: threading.Thread | None = None

    def __call__(self, sample: int) -> tuple[Arrays, int]:
        """Locates a sample.

        Returns:
            The arrays of its epoch, and its position in the epoch.
        """
        epoch, place = divmod(sample, self._samples)
        if epoch not in self._epochs:
            self._epochs[epoch] = self._open(epoch)
            for old in sorted(self._epochs)[:-_EPOCHS_KEPT]:
                if old != epoch:
                    del self._epochs[old]
        if 2 * place > self._samples:
            self._prepare(epoch + 1)
        return self._epochs[epoch], place

    def _open(self, epoch: int) -> Arrays:
        if self._samples > SMALL:
            with contextlib.suppress(OSError):  # no room, permission or locks: build in memory
                return _mapped(self._made(epoch, wait=True))
        return self._build(epoch)

    def _prepare(self, epoch: int) -> None:
        """Starts a thread that makes the next epoch's files, unless another process does."""
        if self._samples <= SMALL or self._ahead is not None or epoch in self._epochs:
            return

        def make() -> None:
            with contextlib.suppress(OSError):
                self._made(epoch, wait=False)

        self._ahead = threading.Thread(target=make, name=f"order of epoch {epoch}", daemon=True)
        self._ahead.start()

    def _made(self, epoch: int, *, wait: bool) -> Path:
        """Returns an epoch's folder, made if needed; without `wait` another process may make it."""
        root = node_folder("orders")
        folder = root / f"{self._key}-{epoch}"
        if not _is_whole(folder):
            with locked(root / f"{self._key}.lock", wait=wait) as ours:
                if ours and not _is_whole(folder):
                    _delete(folder)
                    _write(folder, self._build(epoch))
                    self._forget(root, epoch)
        if wait:
            self._ahead = None
            with contextlib.suppress(OSError):
                os.utime(folder)  # in use
        return folder

    def _forget(self, root: Path, epoch: int) -> None:
        """Deletes past epochs, and files unused for long; mapped arrays stay valid."""
        old = time.time() - UNUSED_DAYS * 24 * 3600
        for path in root.iterdir():
            key, _, number = path.name.partition("-")
            over = key == self._key and number.isdecimal() and int(number) <= epoch - _EPOCHS_KEPT
            with contextlib.suppress(OSError):
                if over or path.stat().st_mtime < old:
                    _delete(path)

    def __getstate__(self) -> dict[str, object]:
        # A worker maps or computes its own arrays: sending them would take longer.
        return {**self.__dict__, "_epochs": {}, "_ahead": None}


def _write(folder: Path, arrays: Arrays) -> None:
    """Writes all files or none."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as new:
        there = Path(new) / "order"
        there.mkdir()
        for name, array in arrays.items():
            np.save(there / f"{name}.npy", array)
        (there / WHOLE).write_text("\n".join(arrays))
        there.rename(folder)


def _is_whole(folder: Path) -> bool:
    """Returns whether all files exist: a cleaner of temporary folders may have deleted some."""
    try:
        names = (folder / WHOLE).read_text().splitlines()
    except OSError:
        return False
    return all((folder / f"{name}.npy").is_file() for name in names)


def _delete(path: Path) -> None:
    """Deletes a file, or a folder after renaming it; does nothing if it does not exist."""
    if path.is_dir():
        old = path.with_name(f".old-{secrets.token_hex(4)}")
        path.rename(old)
        shutil.rmtree(old)
    else:
        path.unlink(missing_ok=True)


def _mapped(folder: Path) -> Arrays:
    return {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
