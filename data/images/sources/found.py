"""What a source consists of."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
    """None: numbers, as many as there are labels."""
    grouped: frozenset[str] = field(default_factory=frozenset)
    """Splits that are read by whole row groups."""
    total_bytes: int = 0
    """Of all images, if it is known: for the progress."""
