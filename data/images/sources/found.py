"""What a source consists of."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from data.images.shards import Entry, Shard

SPLIT_NAMES = {
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test",
}  # fmt: skip
"""How folders and files of splits are called."""
IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"}
)


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
    grouped: frozenset[str] = field(default_factory=frozenset)
    """Splits that are read by whole row groups."""
    total_bytes: int = 0
    """Of all images, if it is known: for the progress."""


def split_of(file: Path, root: Path) -> str:
    """The split that the names of a file or of its folders say, the nearest first; else train."""
    inside = file.relative_to(root).parts if root.is_dir() else (file.name,)
    for part in reversed(inside):
        for word in part.lower().replace("_", "-").replace(".", "-").split("-"):
            if word in SPLIT_NAMES:
                return SPLIT_NAMES[word]
    return "train"
