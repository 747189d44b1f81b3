"""Prepared folders: complete or absent, and verified.

A manifest describes them. Verification reports on each of their files.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from polyad.data.files import digest_of, flush_to_disk, temporary_folder

SYSTEM_FILES = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini"})
"""Files that operating systems add, besides all names that begin with a dot."""


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
        OSError: The folder cannot be written, flushed to the disk or moved.
    """
    with temporary_folder(f".{output.name}.partial-", output.parent) as staging:
        yield staging
        for path in [*staging.iterdir(), staging]:
            flush_to_disk(path)
        # A rename replaces an empty folder but no other, so the old data is renamed first: between
        # the two renames there is no data, but never a mixture.
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


def digests_of(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file of a folder that is being prepared."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: digest_of(path) for path in files}
