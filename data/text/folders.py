"""The text files of a folder, and its other files; the modules of Python and of packages."""

import importlib.util
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path, PurePath

from polyad.data.errors import DataError
from polyad.data.prepared import LeftOut, is_hidden

_PACKED = frozenset({".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4"})
"""Extensions of compressed files."""


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
        for _ in filter(is_hidden, [*subfolders, *names]):
            left_out.add("hidden files and folders")
        subfolders[:] = [name for name in subfolders if not is_hidden(name)]
        for path in (Path(folder, name) for name in names if not is_hidden(name)):
            (found if is_read(path) else others).append(path)
    if broken := next((path for path in found if not path.exists()), None):
        raise DataError(f"{broken}: a link to {os.readlink(broken)}, which does not exist")
    plain = sorted(filter(Path.is_file, found), key=lambda path: path.relative_to(root).parts)
    for _ in set(found) - set(plain):  # reading a pipe would never end
        left_out.add("pipes and devices")
    for path in others:
        ending = ending_of(path.name)
        left_out.add(f"{ending} files" if ending else "files without an ending")
    return plain


def _raise(error: OSError) -> None:
    raise error


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
