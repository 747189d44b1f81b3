"""Images that cannot be read where they are, one after the other in a file of their own."""

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import BinaryIO

from polyad.data.files import writing

PACKED_FILE = re.compile(r"images(-[0-9a-f]{12})?\.bin")
"""Its name in a prepared folder, with the first digits of its SHA-256: a run that reads another one
does not find it, and takes no wrong bytes."""
GO_ON = "make room there, and give the same command again"


class Packed:
    """A file that images are appended to; it is made when there is a first one.

    Args:
        folder: The prepared folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "images.bin"
        """Stands for it until it is finished."""
        self._partial = folder / "images.bin.partial"
        self._digest = hashlib.sha256()
        self.size = 0
        """Bytes so far."""
        self._file: BinaryIO | None = None

    def add(self, content: bytes) -> int:
        """Appends an image.

        Returns:
            Where it begins.

        Raises:
            DataError: The disk refuses it.
        """
        with writing(self.path, GO_ON):
            if self._file is None:
                self._partial.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._partial.open("wb")
            self._file.write(content)
        self._digest.update(content)
        self.size += len(content)
        return self.size - len(content)

    def close(self) -> Path | None:
        """Ends the file, which is on the disk then.

        Returns:
            The partial file, whose name without its last ending is to become it; None: there are no
            such images.

        Raises:
            DataError: The disk refuses it.
        """
        if self._file is None:
            return None
        with writing(self.path, GO_ON), self._file as file:
            file.flush()
            os.fsync(file.fileno())
        self._file = None
        name = f"images-{self._digest.hexdigest()[:12]}.bin.partial"
        return self._partial.rename(self._partial.with_name(name))

    def discard(self) -> None:
        """Removes the file, after an error."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
            self._partial.unlink(missing_ok=True)
