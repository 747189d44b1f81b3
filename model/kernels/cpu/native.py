"""Loads functions in C, which are compiled when Polyad is installed if there is a compiler.

A library is found like a Python module, but is not one. Without it everything works, but slower.
"""

import ctypes
import functools
import importlib.util


@functools.cache
def load_library(name: str, version: int) -> ctypes.CDLL | None:
    """Loads a library.

    Args:
        name: Of its folder and file, as of a module: `model._gelu`.
        version: That its `polyad_NAME_version` has to say, NAME without the underscore; one of an
            older installation is left alone.

    Returns:
        None if it is not there, or not of this version.
    """
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    try:
        found_version = ctypes.c_int.in_dll(library, _symbol(name, "version")).value
    except ValueError:
        return None
    return library if found_version == version else None


def _symbol(name: str, what: str) -> str:
    """The name of a symbol that each library has, as its version."""
    return f"polyad_{name.rpartition('.')[2].lstrip('_')}_{what}"
