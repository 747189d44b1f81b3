"""Text that every machine has: sources of the running Python's library and packages."""

import importlib.util
import os
import sysconfig
from pathlib import Path

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
