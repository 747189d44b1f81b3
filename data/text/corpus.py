"""Text that every machine has: the sources of the running Python's standard library."""

import os
import sysconfig
from pathlib import Path

# Test suites repeat the library's own lines and hold deliberately broken files; the package
# folders hold installed packages, which differ between machines.
LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


def standard_library() -> Path:
    """Returns the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def standard_library_files(root: Path) -> list[Path]:
    """Lists the standard library's own modules.

    Args:
        root: The folder of the library, as `standard_library` gives it.

    Returns:
        The `.py` files below it in the order of their relative paths, without installed packages
        and test suites.
    """
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        found.extend(Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root).parts)
