"""Writes a folder so that it appears complete or not at all."""

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from polyad.data.errors import DataError
from polyad.data.text.manifest import FILES, MANIFEST_FILE, flush_to_disk


def check_replaceable(output: Path, *, overwrite: bool) -> None:
    """Refuses to touch a folder that `polyad prepare` did not make, or may not replace.

    Args:
        output: Where the prepared data shall be.
        overwrite: Whether prepared data there may be replaced.

    Raises:
        DataError: There is something else, or prepared data that may not be replaced.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise DataError(f"{output}: is a file; the output is a folder")
    names = {entry.name for entry in output.iterdir()}
    if not names:
        return
    if MANIFEST_FILE not in names or names - FILES:
        other = sorted(names - FILES) or sorted(names)
        raise DataError(
            f"{output}: holds {other[0]!r}, which `polyad prepare` did not make there; choose "
            "another folder (nothing was changed)"
        )
    if not overwrite:
        raise DataError(
            f"{output}: holds prepared data of another request, or damaged; choose another folder "
            "or add --overwrite"
        )


@contextlib.contextmanager
def staged_folder(output: Path, goes_on: Callable[[Path], bool]) -> Iterator[Path]:
    """Gives a folder to write into, and puts it in place of `output` when the block ends well.

    What a killed or interrupted call on this host left behind, under a hidden name, is given again
    where that can be gone on from, and removed otherwise: nothing that looks complete is ever half
    written. A `DataError` removes it too, unless the disk or the network is its cause.

    Args:
        output: Where the finished folder shall be; `check_replaceable` has allowed it.
        goes_on: Tells of a folder that was left whether its content is of use.

    Yields:
        A folder beside it, on the same file system: empty, or as it was left.

    Raises:
        DataError: The folder cannot be written or put in place.
    """
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())
    staging = output.parent / f".{output.name}.partial-{host}-{os.getpid()}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _take_over(output, host, staging, goes_on)
        staging.mkdir(exist_ok=True)
        yield staging
        for path in staging.iterdir():
            flush_to_disk(path)
        flush_to_disk(staging)
        _put_in_place(staging, output)
    except OSError as error:
        _remove_useless(staging, goes_on)
        raise DataError(f"{output}: cannot be written: {error.strerror or error}") from error
    except DataError as error:
        if isinstance(error.__cause__, OSError):
            _remove_useless(staging, goes_on)
        else:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    except BaseException:
        _remove_useless(staging, goes_on)
        raise


def _remove_useless(staging: Path, goes_on: Callable[[Path], bool]) -> None:
    if not goes_on(staging):
        shutil.rmtree(staging, ignore_errors=True)


def _put_in_place(staging: Path, output: Path) -> None:
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
    flush_to_disk(output.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _take_over(output: Path, host: str, staging: Path, goes_on: Callable[[Path], bool]) -> None:
    """Takes what a process of this host left and can be gone on from; removes all else it left.

    Of other hosts we cannot know whether their processes live.
    """
    pattern = re.compile(re.escape(f".{output.name}.partial-{host}-") + r"(\d+)")
    for path in sorted(output.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or _is_alive(int(match[1])):
            continue
        if path == staging and goes_on(path):
            continue
        if not staging.exists() and goes_on(path):
            with contextlib.suppress(FileNotFoundError):  # another process has taken it
                path.rename(staging)
            continue
        shutil.rmtree(path, ignore_errors=True)


def _is_alive(process_id: int) -> bool:
    if process_id == os.getpid():
        return False  # we have not made one yet: its maker had our number, or was an earlier call
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
