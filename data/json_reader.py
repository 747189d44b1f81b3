"""Reads JSON files, with one-line errors."""

import json
from pathlib import Path
from typing import Any

from polyad.data.errors import DataError


def read_json(path: Path, *, error: type[ValueError] = DataError) -> Any:
    """Reads a JSON file.

    Args:
        path: The file.
        error: The exception type to raise.

    Raises:
        ValueError: As `error`: the file cannot be read, or is not JSON.
    """
    return parse_json(read_bytes(path, error), str(path), error=error)


def read_bytes(path: Path, error: type[ValueError] = DataError) -> bytes:
    """Reads a file.

    Args:
        path: The file.
        error: The exception type to raise.

    Raises:
        ValueError: As `error`: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror or fault}") from None


def parse_json(content: bytes | str, place: str, *, error: type[ValueError] = DataError) -> Any:
    """Parses JSON, with or without a byte order mark.

    Args:
        content: The JSON document.
        place: File, and line or member if any: the prefix of the error; empty for no prefix.
        error: The exception type to raise.

    Raises:
        ValueError: As `error`: it is not JSON.
    """
    before = f"{place}: " if place else ""
    try:
        return json.loads(content.removeprefix("\ufeff") if isinstance(content, str) else content)
    except (ValueError, RecursionError) as fault:
        raise error(f"{before}is not JSON: {fault}") from None
