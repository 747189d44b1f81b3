"""Text to prepare, and prepared folders that are changed or damaged."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from polyad.data.text.manifest import MANIFEST_FILE

Tree = dict[str, Any]


def jsonl(path: Path, texts: Iterable[str]) -> str:
    """Writes a file with a document a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def rewrite(folder: Path, change: Callable[[Tree], Tree]) -> None:
    """Changes a manifest."""
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=2) + "\n")


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flips a bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
