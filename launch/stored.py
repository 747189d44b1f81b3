"""`polyad checkpoint` and `polyad data verify`: lists and verifies what is on disk."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from polyad.data.errors import DataError, user_path
from polyad.data.prepared import PreparedFolder, Read
from polyad.data.progress import Progress
from polyad.data.text.dataset import PreparedData, check_prepared
from polyad.data.text.manifest import Manifest
from polyad.launch.command import UsageError
from polyad.launch.output import align
from polyad.parallel.checkpoint.format import (
    CheckpointError,
    read_contents,
    verify_contents,
)
from polyad.parallel.checkpoint.manage import (
    LEFT_BY_CRASHES,
    STEP_FOLDER,
    step_folders,
)

Row = tuple[str, ...]
Status = Literal["complete", "verified", "damaged", "unfinished"]
"""complete: manifest and sizes are correct; verified: every byte is; unfinished: not committed."""


@dataclass(frozen=True)
class CheckpointState:
    """A checkpoint, and its state; values that cannot be read are None."""

    name: str
    step: int | None = None
    bytes: int | None = None
    saved_at: float | None = None
    processes: int | None = None
    status: Status = "unfinished"
    reason: str | None = None
    """Why it is damaged."""

    def cells(self) -> Row:
        """The cells of its row in a table."""
        saved = ""
        if self.saved_at is not None:
            saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.saved_at))
        return (
            self.name,
            "" if self.step is None else f"{self.step:,}",
            "" if self.bytes is None else f"{self.bytes / 1e6:,.1f}",
            str(self.processes or ""),
            saved,
            self.status,
        )


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a folder, oldest first."""

    folder: str
    checkpoints: list[CheckpointState]

    def text(self) -> str:
        """The result as text; below the table why one is damaged."""
        rows: list[Row] = [("checkpoint", "step", "MB", "processes", "saved", "status")]
        rows += [each.cells() for each in self.checkpoints]
        return "\n".join([align(rows), *(each.reason for each in self.checkpoints if each.reason)])


@dataclass(frozen=True)
class VerifiedCheckpoints(Checkpoints):
    """Checkpoints, verified byte by byte."""

    seconds: float
    bytes: int
    good: bool
    """Whether nothing is damaged."""

    def text(self) -> str:
        """The result as text; below the table why one is damaged, and what verifying took."""
        gigabytes = self.bytes / 1e9
        rate = gigabytes / max(self.seconds, 1e-9)
        took = f"{gigabytes:,.2f} GB in {self.seconds:.1f} s, {rate:.2f} GB/s"
        return f"{super().text()}\n{took}"


def list_checkpoints(folder: Path) -> Checkpoints:
    """Lists checkpoints; reads manifests, sizes and small files, but no tensors.

    Args:
        folder: a run, its `checkpoints` folder, or one checkpoint.

    Raises:
        UsageError: there is no checkpoint, not even a broken one.
    """
    place, found = _find(folder)
    return Checkpoints(str(place), [_state_of(path) for path in found])


def verify_checkpoints(folder: Path) -> VerifiedCheckpoints:
    """Reads every byte of checkpoints and compares it with the manifests.

    Args:
        folder: a run, its `checkpoints` folder, or one checkpoint.

    Raises:
        UsageError: there is no checkpoint, not even a broken one.
    """
    place, found = _find(folder)
    listed = [_state_of(path) for path in found]
    sizes = [each.bytes or 0 if each.status == "complete" else 0 for each in listed]
    started = time.monotonic()
    with _progress(sum(sizes)) as show:
        for number, each in enumerate(listed):
            if each.status == "complete":
                done = sum(sizes[:number])
                listed[number] = _verified(each, place, partial(_show_after, show, done))
    return VerifiedCheckpoints(
        folder=str(place),
        checkpoints=listed,
        seconds=time.monotonic() - started,
        bytes=sum(sizes),
        good=all(each.status in {"verified", "unfinished"} for each in listed),
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Shows the share of bytes verified."""
    progress = Progress()
    progress.start("verify", total)
    try:
        yield progress.update
    finally:
        progress.close()


def _show_after(show: Callable[[int], None], done: int, more: int) -> None:
    show(done + more)


def _verified(each: CheckpointState, place: Path, report: Callable[[int], None]) -> CheckpointState:
    try:
        verify_contents(place / each.name, report)
    except CheckpointError as error:
        return replace(each, status="damaged", reason=str(error))
    return replace(each, status="verified")


def _find(folder: Path) -> tuple[Path, list[Path]]:
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder")
    if STEP_FOLDER.fullmatch(folder.absolute().name) or (folder / "manifest.json").is_file():
        return folder.parent, [folder]
    for place in (folder / "checkpoints", folder):
        found = step_folders(place)
        found += [path for pattern in LEFT_BY_CRASHES for path in sorted(place.glob(pattern))]
        if found:
            return place, found
    raise UsageError(f"{folder}: holds no checkpoint (a run folder or a step-* folder)")


def _state_of(path: Path) -> CheckpointState:
    if path.name.startswith("."):
        return CheckpointState(path.name)
    try:
        contents = read_contents(path)
    except CheckpointError as error:
        return CheckpointState(path.name, status="damaged", reason=str(error))
    state = contents.state
    return CheckpointState(
        name=path.name,
        step=contents.step,
        bytes=contents.total_bytes,
        saved_at=state.saved_at,
        processes=state.world_size,
        status="complete",
    )


@dataclass(frozen=True)
class FileState:
    """A file of prepared data."""

    name: str
    bytes: int
    reason: str | None
    """Why it is damaged."""
    status: Literal["verified", "damaged"]


@dataclass(frozen=True)
class FolderState:
    """A folder of prepared data."""

    folder: str
    files: list[FileState]
    good: bool


@dataclass(frozen=True)
class VerifiedData:
    """Prepared folders, verified byte by byte."""

    folders: list[FolderState]
    seconds: float
    bytes: int
    good: bool
    """Whether nothing is damaged."""

    def text(self) -> str:
        """The result as text, and what it took."""
        rows: list[Row] = [("file", "MB", "status")]
        for each in self.folders:
            for file in each.files:
                path, size = str(Path(each.folder) / file.name), f"{file.bytes / 1e6:,.2f}"
                rows.append((path, size, file.status))
        megabytes = self.bytes / 1e6
        rate = megabytes / max(self.seconds, 1e-9)
        took = f"{megabytes:,.2f} MB in {self.seconds:.1f} s, {rate:,.1f} MB/s"
        return f"{align(rows)}\n{took}"

    def check(self) -> None:
        """Ends the command with a line if something is damaged.

        Raises:
            DataError: names the first damaged file, and the number of them.
        """
        reasons = [file.reason for each in self.folders for file in each.files if file.reason]
        if reasons:
            others = len(reasons) - 1
            plural = "s" if others > 1 else ""
            more = f" (and {others} more damaged file{plural})" if others else ""
            raise DataError(f"{reasons[0]}{more}")


def verify_data(folders: Sequence[str]) -> VerifiedData:
    """Reads every byte of prepared folders, and continues if one is damaged.

    Raises:
        DataError: one is not a folder of prepared data; nothing was read.
    """
    stored = [_stored(path) for path in dict.fromkeys(user_path(folder) for folder in folders)]
    started, done = time.monotonic(), 0
    with _progress(sum(folder.bytes_to_verify() for folder in stored)) as show:

        def read(count: int) -> None:
            nonlocal done
            done += count
            show(done)

        listed = [_verified_folder(folder, read) for folder in stored]
    return VerifiedData(
        folders=listed,
        seconds=time.monotonic() - started,
        bytes=sum(file.bytes for each in listed for file in each.files),
        good=all(each.good for each in listed),
    )


def _stored(path: Path) -> PreparedFolder:
    check_prepared(path)
    return PreparedData(path, Manifest.read(path))


def _verified_folder(folder: PreparedFolder, read: Read) -> FolderState:
    files = [
        FileState(*report, status="verified" if report.reason is None else "damaged")
        for report in folder.reports(read)
    ]
    good = all(each.reason is None for each in files)
    return FolderState(folder=str(folder.path), files=files, good=good)
