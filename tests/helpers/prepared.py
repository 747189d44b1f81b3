"""Prepared folders, made without output, and changed or damaged ones."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from polyad.data.text.manifest import MANIFEST_FILE, Manifest
from polyad.data.text.prepare import prepare

Tree = dict[str, Any]


def silent(*arguments: Any, **options: Any) -> Manifest:
    """Prepares text without output."""
    return prepare(*arguments, report=lambda line: None, **options)


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
