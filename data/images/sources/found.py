"""What a source consists of, and what of it is left out."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from polyad.data.images.shards import Entry, Packed, Shard
from polyad.data.left_out import LeftOut

SPLIT_NAMES = {
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test",
}  # fmt: skip
"""How folders and files of splits are called."""
IMAGE_SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".dib", ".gif"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff"),
    }
)
"""Endings of the formats that are decoded, in small letters."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A source, before its images are listed."""

    shards: list[Shard]
    """Each entry's shard is a place in this list."""
    splits: dict[str, Callable[[], Iterator[Entry]]]
    """Lists the images of each split."""
    class_names: list[str] | None
    """The same of all shards; None: numbers, as many as there are labels, unless shards name them.
    """
    names_of_shards: list[list[str] | None] = field(default_factory=list)
    """What each shard calls its own numbers of classes, None for nothing; empty: `class_names`."""
    has_attributes: bool = False
    """Whether an image has any number of the classes, which are then attributes."""
    domain_names: list[str] = field(default_factory=list)
    """Empty: images have no domains."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Is complete when all splits are listed."""
    packed: Packed | None = None
    """Takes images that cannot be read where they are; it is the last shards; None: there are none.
    """
    total_bytes: int = 0
    """Of all images, if it is known: for the progress."""


def split_of(file: Path, root: Path) -> str | None:
    """The split that the names of a file or of its folders say, the nearest first."""
    inside = file.relative_to(root).parts if root.is_dir() else (file.name,)
    return next(filter(None, map(split_in, reversed(inside))), None)


def split_in(name: str) -> str | None:
    """The split that a word of a name says, as val2017, training_set or test-00000.parquet."""
    words = re.split(r"[\W\d_]+", name.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


def files_by_split(files: list[Path], root: Path, left_out: LeftOut) -> dict[str, list[int]]:
    """The numbers of the files of each split; a file that names none is of train.

    Args:
        files: All.
        root: What the user named: a file, or the folder that they are in.
        left_out: Takes a doubt where some name train and others no split.
    """
    found: dict[str, list[int]] = {}
    unnamed = []
    for number, file in enumerate(files):
        split = split_of(file, root)
        if split is None:
            unnamed.append(file)
        found.setdefault(split or "train", []).append(number)
    if unnamed and len(unnamed) < len(files):
        left_out.doubts.append(
            f"{len(unnamed):,} files of which no name says the split would train "
            f"(as {unnamed[0].relative_to(root)})"
        )
    return found


def is_image(name: str) -> bool:
    """Whether a file's name is an image's."""
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES
