"""Prepared folders: complete or absent, and verified.

Prepared folders are complete or absent, and described by a manifest. Verification reports on each
of their files. Anything of a source that is left out is counted by reason.
"""

import contextlib
import hashlib
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from polyad.data.files import digest_of, flush_to_disk, temporary_folder

SYSTEM_FILES = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini"})
"""Files that operating systems add, besides all names that begin with a dot."""


class LeftOut(Counter[str]):
    """Counts, by reason, what a source contains and the prepared folder does not."""

    def add(self, reason: str) -> None:
        """Counts something that is left out."""
        self[reason.encode("utf-8", "backslashreplace").decode()] += 1  # as it is stored


def is_hidden(name: str) -> bool:
    """Returns whether a component of a path belongs to the operating system and holds no data."""
    return name.startswith(".") or name in SYSTEM_FILES


@contextlib.contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """Yields a folder to write into, and moves it to `output` when the block ends without error.

    The folder is beside `output` under a hidden name and is deleted after an error. Folders left by
    a killed process of this host are deleted by the next call, so `output` is never incomplete.

    Yields:
        An empty folder on the same file system.

    Raises:
        OSError: The folder cannot be written or moved.
    """
    with temporary_folder(f".{output.name}.partial-", output.parent) as staging:
        yield staging
        put_in_place(staging, output)


def put_in_place(staging: Path, output: Path) -> None:
    """Flushes a folder to the disk and renames it, in place of one that is there."""
    for path in [*staging.iterdir(), staging]:
        flush_to_disk(path)
    # A rename replaces an empty folder but no other, so the old data is renamed first: between the
    # two renames there is no data, but never a mixture.
    retired = staging.with_name(staging.name.replace(".partial-", ".old-"))
    if output.exists() and any(output.iterdir()):
        output.rename(retired)
    try:
        staging.rename(output)
    except OSError:
        if retired.exists():
            retired.rename(output)
        raise
    flush_to_disk(output.parent)
    shutil.rmtree(retired, ignore_errors=True)


MANIFEST_FILE = "manifest.json"
"""The description of a prepared folder, written last."""
SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

PIECE_BYTES = 2**20
"""Bytes that are read and checked at a time: such a piece fits into a core's cache."""

Read = Callable[[int], None]
"""Called with the number of bytes after each read. An exception that it raises ends the reading."""


class FileReport(NamedTuple):
    """The result of reading a file of a prepared folder.

    Attributes:
        name: The name of the file.
        bytes: Its size; 0 if it is missing.
        reason: One line on why it is damaged; None if it is intact.
    """

    name: str
    bytes: int
    reason: str | None


class PreparedFolder(ABC):
    """A prepared folder whose files can be compared with its manifest.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    @abstractmethod
    def digests(self) -> Mapping[str, str]:
        """The SHA-256 of each file, by name."""

    def bytes_to_verify(self) -> int:
        """Returns the bytes that `reports` reads."""
        return sum(_size(self.path / name) for name in self.digests)

    def reports(self, read: Read = lambda count: None) -> Iterator[FileReport]:
        """Reads every file and compares its digest, even after a damaged one.

        Args:
            read: Called as the files are read.

        Yields:
            The result for each file.
        """
        for name, sha256 in self.digests.items():
            path, digest, reason = self.path / name, hashlib.sha256(), None
            try:
                with path.open("rb") as file:
                    while piece := file.read(PIECE_BYTES):
                        digest.update(piece)
                        read(len(piece))
                if digest.hexdigest() != sha256:
                    reason = f"{path}: damaged: its SHA-256 is not that of {MANIFEST_FILE}"
            except OSError as error:
                reason = f"{path}: cannot be read: {error.strerror or error}"
            yield FileReport(name, _size(path), reason)

    def faults(self, read: Read = lambda count: None) -> Iterator[tuple[str, str]]:
        """Names each damaged file of `reports`, and says in one line what is wrong with it."""
        for report in self.reports(read):
            if report.reason is not None:
                yield report.name, report.reason


def digests_of(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file of a folder that is being prepared."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: digest_of(path) for path in files}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
