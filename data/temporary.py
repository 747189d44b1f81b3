"""Folders of one process, of which a killed one leaves nothing, and of one user on a node."""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def temporary_folder(name: str, parent: Path | None = None, ending: str = "") -> Iterator[Path]:
    """Makes a folder that is gone, or has another name, when the block ends.

    What processes of this host that were killed left of such folders is removed first. A living one
    holds a lock on its folder, which the kernel releases when it ends.

    Args:
        name: what its name begins with.
        parent: the folder to make it in, which is made too; None: that for temporary files.
        ending: of its name.

    Raises:
        OSError: it cannot be made.
    """
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    _remove_what_is_left(
        parent, re.compile(rf"{re.escape(f'{name}{host}')}[0-9a-f]{{8}}{re.escape(ending)}")
    )
    folder = parent / f"{name}{host}{secrets.token_hex(4)}{ending}"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: nobody removes it then
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_what_is_left(parent: Path, pattern: re.Pattern[str]) -> None:
    for path in [path for path in parent.iterdir() if pattern.fullmatch(path.name)]:
        with contextlib.suppress(OSError):  # in use, of another user, or gone by now
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def node_folder(name: str) -> Path:
    """Makes a folder in the node's temporary one, `TMPDIR` or `/tmp`, for this user alone.

    Args:
        name: Its name.

    Returns:
        The folder.

    Raises:
        OSError: It cannot be made, or is somebody else's.
    """
    root = Path(tempfile.gettempdir()) / f"polyad-{os.getuid()}"
    for folder in (root, root / name):
        folder.mkdir(exist_ok=True, mode=0o700)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} is somebody else's")
        folder.chmod(0o700)
    return root / name
