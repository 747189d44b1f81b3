"""Images that cannot be read where they are, one after the other in a file of their own."""

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

from data.files import writing

PACKED_FILE = "images.bin"
"""Its name in a prepared folder."""
GO_ON = "make room there, and give the same command again"


class Packed:
    """A file that images are appended to; it is made when there is a first one.

    Args:
        folder: The prepared folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / PACKED_FILE
        """Where the file will be when it is finished."""
        self.partial = folder / f"{PACKED_FILE}.partial"
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
                self.partial.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.partial.open("wb")
            self._file.write(content)
        self.size += len(content)
        return self.size - len(content)

    def close(self) -> None:
        """Ends the file; it is on the disk then.

        Raises:
            DataError: The disk refuses it.
        """
        if self._file is not None:
            with writing(self.path, GO_ON), self._file as file:
                file.flush()
                os.fsync(file.fileno())
            self._file = None

    def discard(self) -> None:
        """Removes the file, after an error."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
            self.partial.unlink(missing_ok=True)
