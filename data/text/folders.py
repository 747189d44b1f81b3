"""The text files of a folder, and its other files; the modules of Python and of packages."""

import importlib.util
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePath

from polyad.data.errors import DataError
from polyad.data.names import SPLIT_NAMES
from polyad.data.prepared import LeftOut, is_hidden

_PACKED = frozenset({".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4"})
"""Extensions of compressed files."""
_HOLDS_TEXT = _PACKED | {
    *(".txt", ".text", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow"),
    *(".html", ".htm", ".xml", ".tex", ".zip", ".tar", ".tgz", ".7z"),
}
"""Extensions of files that probably hold the intended text."""


_SPLITS = {**SPLIT_NAMES, "testing": "test", "eval": "validation"}
"""Names that suggest that files are splits rather than one text."""
_SPLIT_NAME = re.compile(rf"({'|'.join(_SPLITS)})(?:[_-]?[0-9].*)?")
"""A split's name, or that of one of its shards, as in train-00000-of-00004."""


def ending_of(name: str) -> str:
    """Returns the lower-case extension of a file name, including what precedes .gz and the like."""
    endings = PurePath(name.lower()).suffixes
    if len(endings) > 1 and endings[-1] in _PACKED:
        return "".join(endings[-2:])
    return endings[-1] if endings else ""


def text_files(root: Path, is_read: Callable[[Path], bool], left_out: LeftOut) -> list[Path]:
    """Finds the text files below a folder, following links to folders.

    Returns:
        The files, in the order of their paths.

    Raises:
        DataError: A link is broken, or makes the text contain a folder twice.
        OSError: A folder cannot be read.
    """
    found: list[Path] = []
    others: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_raise):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            raise DataError(f"{folder}: a link makes {root} contain this folder twice")
        seen.add((status.st_dev, status.st_ino))
        for name in filter(is_hidden, [*subfolders, *names]):
            left_out.add("hidden files and folders", name, mistake=False)
        subfolders[:] = [name for name in subfolders if not is_hidden(name)]
        for path in (Path(folder, name) for name in names if not is_hidden(name)):
            (found if is_read(path) else others).append(path)
    if broken := next((path for path in found if not path.exists()), None):
        raise DataError(f"{broken}: a link to {os.readlink(broken)}, which does not exist")
    plain = sorted(filter(Path.is_file, found), key=lambda path: path.relative_to(root).parts)
    for path in set(found) - set(plain):  # reading a pipe would never end
        left_out.add("pipes and devices", path.name)
    _count_others(others, len(plain), left_out)
    _doubt_links(plain, root, left_out)
    _doubt_splits(plain, root, left_out)
    return plain


def _doubt_splits(files: list[Path], root: Path, left_out: LeftOut) -> None:
    """Reports files named like splits: joined, test data would be trained on."""
    parts = (path.relative_to(root).parts[0].lower() for path in files)
    found = (_SPLIT_NAME.fullmatch(part.partition(".")[0]) for part in parts)
    named = {match[1] for match in found if match}
    if len({_SPLITS[word] for word in named}) > 1:
        left_out.doubts.append(
            f"would join {', '.join(sorted(named))}, which are called as splits, and split the "
            f"whole anew (--validation-source and --test-source take files of their own)"
        )


def _raise(error: OSError) -> None:
    raise error


def _count_others(others: list[Path], taken: int, left_out: LeftOut) -> None:
    """Counts files of other endings: a mistake where they are as text is, or more than the text."""
    counts = Counter(ending_of(path.name) for path in others)
    for path in sorted(others):
        ending = ending_of(path.name)
        holds_text = not _HOLDS_TEXT.isdisjoint(f".{part}" for part in ending.split("."))
        mistake = holds_text or counts[ending] > max(taken, 2)
        reason = f"{ending} files" if ending else "files without an ending"
        left_out.add(reason, path.name, mistake=mistake)


def _doubt_links(files: list[Path], root: Path, left_out: LeftOut) -> None:
    """Doubts names of one file, whose text would be read as often."""
    first: dict[tuple[int, int], Path] = {}
    again: list[tuple[Path, Path]] = []
    for path in files:
        status = path.stat()
        other = first.setdefault((status.st_dev, status.st_ino), path)
        if other is not path:
            again.append((path, other))
    if again:
        path, other = (each.relative_to(root) for each in again[0])
        left_out.doubts.append(
            f"would read text twice, of {len(again):,} files that are others by a link (as {path}, "
            f"which is {other})"
        )


PACKAGE = "python:"
"""What the name of a source of a package's modules begins with."""
# Test suites repeat the library's own lines and hold deliberately broken files; the package
# folders hold installed packages, which differ between machines.
LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


def standard_library() -> Path:
    """Returns the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def package(name: str) -> Path | None:
    """The folder of an installed package, which is not imported.

    Args:
        name: As it is imported; of no part of a package.

    Returns:
        None if there is no such package, or it is a single module.
    """
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except ValueError:  # a module of this name was made without one
        return None
    folders = None if spec is None else spec.submodule_search_locations
    return Path(folders[0]) if folders else None


def module_files(root: Path) -> list[Path]:
    """Lists the modules of the standard library, or of a package.

    Args:
        root: Its folder, as `standard_library` or `package` gives it.

    Returns:
        The `.py` files below it in the order of their relative paths, without installed packages
        and test suites.
    """
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        found.extend(Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root).parts)
