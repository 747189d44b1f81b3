"""What preparations of text and of images share.

Their folders are complete or not at all, and made by one process at a time; they are described by a
manifest; verification gives a report for each of their files; and what of a source is left out is
counted by reason, told, or refused.
"""

import contextlib
import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field

from polyad.data.errors import DataError
from polyad.data.files import flush_to_disk, locked, temporary_folder

SYSTEM_FILES = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini"})
"""What systems put beside files, with all names that begin with a point."""


class LeftOut:
    """What a source has and the prepared folder has not, by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.doubts: list[str] = []
        """What is taken, and probably not meant so."""
        self._mistakes: dict[str, str] = {}

    def add(self, reason: str, name: str, *, mistake: bool = True) -> None:
        """Counts something that is left out.

        Args:
            reason: What it is, in the plural.
            name: The name of this one.
            mistake: Whether leaving it out is probably not what is wanted.
        """
        reason = reason.encode("utf-8", "backslashreplace").decode()  # as it is written down
        self.counts[reason] += 1
        if mistake:
            self._mistakes.setdefault(reason, name)

    def mistakes(self) -> list[str]:
        """What is probably not wanted, each with its number and the first one's name."""
        return [f"{why}: {self.counts[why]:,} (as {name})" for why, name in self._mistakes.items()]

    def check(self, place: str, more: Sequence[str] = (), *, accept: bool) -> None:
        """Refuses what is probably a mistake.

        Args:
            place: The option and its value.
            more: What else is one.
            accept: Whether all of it is meant.

        Raises:
            DataError: There is such a thing, and it is not accepted.
        """
        mistakes = [f"would leave out {', '.join(self.mistakes())}"] if self._mistakes else []
        mistakes += [*self.doubts, *more]
        if mistakes and not accept:
            raise DataError(f"{place}: {'; '.join(mistakes)}; if that is intended, add --accept")


def in_words(counts: Mapping[str, int]) -> str:
    """What was left out, for a person."""
    return "; ".join(f"{reason}: {count:,}" for reason, count in counts.items())


def is_hidden(name: str) -> bool:
    """Whether one part of a path is a system's own, and no data."""
    return name.startswith(".") or name in SYSTEM_FILES


LOCK_FILE = ".lock"
"""Is locked while a folder is prepared, and gone afterwards unless a process was killed."""
PARTIAL_FOLDER = ".partial"
"""Holds files of a folder that are not whole yet, where the folder is not made as one."""


@contextlib.contextmanager
def alone(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Within the block no other process has the lock of a folder, which is made if need be.

    If nothing else is in the folder when the block ends, it is removed.

    Args:
        folder: The folder.
        wait: Whether to wait for a process that has the lock.

    Yields:
        Whether this one has it; False: another one has, without `wait`.

    Raises:
        OSError: The folder or the lock cannot be made.
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
    """Where a file of a prepared folder is written, before it is moved to its place in one step.

    Args:
        path: Its place.

    Returns:
        A path in a hidden folder inside the prepared one, which is made if need be, and is for
        whoever prepares it to remove.
    """
    folder = path.parent / PARTIAL_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder / path.name


@contextlib.contextmanager
def staged_folder(output: Path, *, flush: bool = True) -> Iterator[Path]:
    """Gives a folder to write into, and puts it in place of `output` when the block ends well.

    It lies beside `output` under a hidden name and is gone after an error. What a killed process of
    this host left of one is removed by the next call: nothing that looks complete is half written.

    Yields:
        An empty folder on the same file system.

    Raises:
        OSError: The folder cannot be written or put in place.
    """
    with temporary_folder(f".{output.name}.partial-", output.parent) as staging:
        yield staging
        for path in [*staging.iterdir(), staging] if flush else ():
            flush_to_disk(path)
        _put_in_place(staging, output, flush=flush)


def _put_in_place(staging: Path, output: Path, *, flush: bool) -> None:
    # A rename replaces an empty folder but no other, so the old data steps aside first; between
    # the two renames there is no data, at no time is there a mixture.
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
"""The description of a prepared folder; it is written last."""
SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Sealed = TypeVar("Sealed", bound=BaseModel)


def seal(tree: dict[str, Any]) -> str:
    """Digests all keys of a description but the digest itself, in canonical form."""
    others = {key: value for key, value in tree.items() if key != "sha256"}
    return hashlib.sha256(
        json.dumps(others, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def write_sealed(content: Sealed, path: Path) -> Sealed:
    """Writes a description with its digest.

    Returns:
        The content with its digest.
    """
    sealed = content.model_copy(update={"sha256": seal(content.model_dump(mode="json"))})
    path.write_text(sealed.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return sealed


PIECE_BYTES = 2**20
"""Bytes that are read and checked together: a piece stays in a core's cache."""

Read = Callable[[int], None]
"""Called with the number of bytes, whenever some were read. What it raises ends the reading."""


class FileReport(NamedTuple):
    """The result of reading a file of a prepared folder.

    Attributes:
        name: The file's.
        bytes: Its size; 0 where it is missing.
        checked: What it was compared with, in a few words.
        reason: One line on why it is damaged; None where it is whole.
    """

    name: str
    bytes: int
    checked: str
    reason: str | None


class PreparedFolder(ABC):
    """A prepared folder whose files can be compared with its manifest.

    Attributes:
        path: The folder.
    """

    path: Path

    @abstractmethod
    def bytes_to_verify(self) -> int:
        """Counts what `reports` reads of the files that grow with the data."""

    @abstractmethod
    def reports(self, read: Read) -> Iterator[FileReport]:
        """Reads every file, whatever is wrong with those before it.

        Args:
            read: Called as the files are read.

        Yields:
            What each file showed.
        """

    def faults(self, read: Read) -> Iterator[tuple[str, str]]:
        """Names each damaged file of `reports`, and says in one line what is wrong with it."""
        for report in self.reports(read):
            if report.reason is not None:
                yield report.name, report.reason


def read_pieces(path: Path, read: Read) -> Iterator[bytes]:
    """Reads a file in pieces.

    Args:
        path: The file.
        read: Is told of each.
    """
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            read(len(piece))
            yield piece
