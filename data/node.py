"""The folder that the processes of one user on one node share, for what can be made again."""

import os
import tempfile
from pathlib import Path


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
