"""What the preparations of text and of images share.

Prepared folders are complete or absent, made by one process at a time, and described by a
manifest. Verification reports on each of their files. Anything of a source that is left out is
counted by reason, and reported or refused.
"""

import contextlib
import hashlib
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from polyad.data.errors import DataError
from polyad.data.files import flush_to_disk, locked, temporary_folder

SYSTEM_FILES = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini"})
"""Files that operating systems add, besides all names that begin with a dot."""


class LeftOut:
    """Counts, by reason, what a source contains and the prepared folder does not."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.doubts: list[str] = []
        """What is taken, although probably not intended."""
        self._mistakes: dict[str, str] = {}

    def add(self, reason: str, name: str, *, mistake: bool = True) -> None:
        """Counts something that is left out.

        Args:
            reason: The kind of thing, in the plural.
            name: The name of this one.
            mistake: Whether leaving it out is probably unintended.
        """
        reason = reason.encode("utf-8", "backslashreplace").decode()  # as it is stored
        self.counts[reason] += 1
        if mistake:
            self._mistakes.setdefault(reason, name)

    def mistakes(self) -> list[str]:
        """Lists what was probably left out by mistake: the number, and the first one's name."""
        return [f"{why}: {self.counts[why]:,} (as {name})" for why, name in self._mistakes.items()]

    def check(self, place: str, more: Sequence[str] = (), *, accept: bool) -> None:
        """Refuses likely mistakes.

        Args:
            place: The option and its value.
            more: Further mistakes.
            accept: Whether the user accepts all of them.

        Raises:
            DataError: There is one, and it is not accepted.
        """
        mistakes = [f"would leave out {', '.join(self.mistakes())}"] if self._mistakes else []
        mistakes += [*self.doubts, *more]
        if mistakes and not accept:
            raise DataError(f"{place}: {'; '.join(mistakes)}; if that is intended, add --accept")


def in_words(counts: Mapping[str, int]) -> str:
    """Describes what was left out, for the user."""
    return "; ".join(f"{reason}: {count:,}" for reason, count in counts.items())


def is_hidden(name: str) -> bool:
    """Returns whether a component of a path belongs to the operating system and holds no data."""
    return name.startswith(".") or name in SYSTEM_FILES


LOCK_FILE = ".lock"
"""Locked while a folder is prepared, and then removed, unless the process was killed."""
PARTIAL_FOLDER = ".partial"
"""Holds unfinished files where the folder is not created in one step."""


@contextlib.contextmanager
def alone(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Holds the lock of a folder within the block; the folder is created if needed.

    If nothing else is in the folder when the block ends, it is removed.

    Args:
        folder: The folder.
        wait: Whether to wait for the process that holds the lock.

    Yields:
        Whether this process has the lock; False if another process does and `wait` is off.

    Raises:
        OSError: The folder or the lock cannot be created.
    """
    with locked(folder / LOCK_FILE, wait=wait) as ours:
        try:
            yield ours
        finally:
            if ours:
                with contextlib.suppress(OSError):
                    (folder / LOCK_FILE).unlink(missing_ok=True)
                    folder.rmdir()


def partial_file(path: Path) -> Path:
    """Returns where a file of a prepared folder is written before it is renamed to `path`.

    Args:
        path: Its final path.

    Returns:
        A path in a hidden folder inside the prepared one. That folder is created if needed, and
        removed by the process that prepares the data.
    """
    folder = path.parent / PARTIAL_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder / path.name


@contextlib.contextmanager
def staged_folder(output: Path, *, flush: bool = True) -> Iterator[Path]:
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
        for path in [*staging.iterdir(), staging] if flush else ():
            flush_to_disk(path)
        _put_in_place(staging, output, flush=flush)


def _put_in_place(staging: Path, output: Path, *, flush: bool) -> None:
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
    if flush:
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


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
