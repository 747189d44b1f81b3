"""A folder that appears whole or not at all."""

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from data.errors import DataError
from data.manifest import FILES, MANIFEST_FILE, flush_to_disk


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
def staged_folder(output: Path) -> Iterator[Path]:
    """Gives a folder to write into, and puts it in place of `output` when the block ends well.

    An error, Ctrl-C included, removes it. A killed process leaves it behind under a hidden name,
    which the next call on this host removes: nothing that looks complete is ever half written.

    Args:
        output: Where the finished folder shall be; `check_replaceable` has allowed it.

    Yields:
        An empty folder beside it, on the same file system.

    Raises:
        DataError: The folder cannot be written or put in place.
    """
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())
    staging = output.parent / f".{output.name}.partial-{host}-{os.getpid()}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(output, host)
        staging.mkdir()
        yield staging
        for path in staging.iterdir():
            flush_to_disk(path)
        flush_to_disk(staging)
        _put_in_place(staging, output)
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror or error}") from error
    finally:
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


def _remove_stale(output: Path, host: str) -> None:
    """Removes what killed processes of this host left; of other hosts we cannot know."""
    pattern = re.compile(re.escape(f".{output.name}.partial-{host}-") + r"(\d+)")
    for path in output.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not _is_alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(process_id: int) -> bool:
    if process_id == os.getpid():
        return False  # a staging folder of ours does not exist yet: its maker had our number
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
