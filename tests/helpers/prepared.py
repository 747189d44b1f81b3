"""Prepared folders, made without output, and changed and resealed, old, or damaged ones."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from polyad.data.prepared import MANIFEST_FILE, seal
from polyad.data.text.manifest import Manifest
from polyad.data.text.prepare import prepare

Tree = dict[str, Any]


def silent(*arguments: Any, **options: Any) -> Manifest:
    """Prepares text without output."""
    return prepare(*arguments, report=lambda line: None, **options)


def jsonl(path: Path, texts: Iterable[str]) -> str:
    """Writes a file with a document a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def rewrite(folder: Path, change: Callable[[Tree], Tree], *, sealed: bool = True) -> None:
    """Changes a manifest; `sealed`: with a digest of itself that is right."""
    path = folder / MANIFEST_FILE
    tree = change(json.loads(path.read_text()))
    if sealed and "sha256" in tree:
        tree["sha256"] = seal(tree)
    path.write_text(json.dumps(tree, indent=2) + "\n")


def age(folder: Path) -> None:
    """Makes a folder one of version 1, which had no digest of the manifest and of .idx files."""

    def change(tree: Tree) -> Tree:
        del tree["sha256"]
        for split in tree["splits"].values():
            del split["index_sha256"]
        return tree | {"format_version": 1}

    rewrite(folder, change)


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flips a bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
