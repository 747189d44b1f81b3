"""The only reader of JSON from untrusted files: size-limited, with one-line errors."""

import json
import os
from pathlib import Path
from typing import Any

from polyad.data.errors import DataError

MOST_BYTES = 1 << 28
"""Maximum size of a JSON file, in bytes: a tokenizer of 256,000 words has 33 million."""


def read_json(
    path: Path, *, most_bytes: int = MOST_BYTES, error: type[ValueError] = DataError
) -> Any:
    """Reads a JSON file.

    Args:
        path: The file.
        most_bytes: A larger file is refused without being read.
        error: The exception type to raise.

    Raises:
        ValueError: As `error`: the file cannot be read, is too large, or is not JSON.
    """
    return parse_json(read_bounded(path, most_bytes, error), str(path), error=error)


def read_bounded(
    path: Path, most_bytes: int = MOST_BYTES, error: type[ValueError] = DataError
) -> bytes:
    """Reads a file that should be small.

    Args:
        path: The file.
        most_bytes: A larger file is refused without being read.
        error: The exception type to raise.

    Raises:
        ValueError: As `error`: it cannot be read, is too large, or is not a regular file.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe would never end
            raise error(f"{path}: is not a file")
        with path.open("rb") as file:
            # Not the whole limit: Python allocates as much memory as is requested.
            content = file.read(min(os.fstat(file.fileno()).st_size, most_bytes) + 1)
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror or fault}") from None
    if len(content) > most_bytes:
        raise error(f"{path}: has more than {most_bytes:,} bytes, so it is not read")
    return content


def parse_json(
    content: bytes | str, place: str, *, error: type[ValueError] = DataError, once: bool = False
) -> Any:
    """Parses JSON, with or without a byte order mark.

    Args:
        content: The JSON document.
        place: File, and line or member if any: the prefix of the error; empty for no prefix.
        error: The exception type to raise.
        once: Whether a repeated key in an object is an error; otherwise the last one counts.

    Raises:
        ValueError: As `error`: it is not JSON, or cannot be represented.
    """
    before = f"{place}: " if place else ""
    try:
        if isinstance(content, bytes):
            content = content.decode("utf-8-sig")
        text = content.removeprefix("\ufeff")
        return json.loads(text, object_pairs_hook=_with_keys_once if once else None)
    except KeyError as fault:
        raise error(f"{before}has the key {fault.args[0]!r} twice") from None
    except UnicodeDecodeError as fault:
        raise error(f"{before}is not UTF-8: {fault.reason} at byte {fault.start:,}") from None
    except json.JSONDecodeError as fault:
        several = "\n" in fault.doc.rstrip()
        line = f"line {fault.lineno}, column {fault.colno}"
        where = line if several else f"character {fault.pos + 1:,}"
        raise error(f"{before}is not JSON: {fault.msg} at {where}") from None
    except RecursionError:
        raise error(f"{before}is not read: its JSON is nested too deeply") from None
    except ValueError:  # Python parses no number of more than 4,300 digits
        raise error(f"{before}is not read: its JSON has a number of too many digits") from None


def _with_keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise KeyError(name)
        found[name] = value
    return found
