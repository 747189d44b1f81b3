"""Images that cannot be read where they are, one after the other in a file of their own."""

import re
from pathlib import Path

from polyad.data.files import DigestedFile, writing
from polyad.data.images.manifest import FileRecord
from polyad.data.staging import partial_file

PACKED_FILE = re.compile(r"images(-[0-9a-f]{12})?\.bin")
"""Its name in a prepared folder, with the first digits of its SHA-256: a run that reads another one
does not find it, and takes no wrong bytes."""
WHAT_TO_DO = "make room there, and give the same command again"
"""Advice where the disk is full."""


class Packed:
    """A file that images are appended to; it is made when there is a first one.

    Args:
        folder: The prepared folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "images.bin"
        """Stands for it until it is finished."""
        self._file: DigestedFile | None = None

    def add(self, content: bytes) -> int:
        """Appends an image.

        Returns:
            Where it begins.

        Raises:
            DataError: The disk refuses it.
        """
        with writing(self.path, WHAT_TO_DO):
            if self._file is None:
                self._file = DigestedFile(partial_file(self.path))
            self._file.write(content)
        return self._file.size - len(content)

    def finish(self) -> tuple[str, FileRecord] | None:
        """Ends the file, which is on the disk then, among those that are not in their place yet.

        Returns:
            Its name, its size and its digest; None: there are no such images.

        Raises:
            DataError: The disk refuses it.
        """
        if self._file is None:
            return None
        with writing(self.path, WHAT_TO_DO):
            record = FileRecord(bytes=self._file.size, sha256=self._file.finish())
        partial, name = partial_file(self.path), f"images-{record.sha256[:12]}.bin"
        partial.rename(partial.with_name(name))
        return name, record

    def close(self) -> None:
        """Closes the file, finished or not."""
        if self._file is not None:
            self._file.close()
