"""`manifest.json` of a folder of prepared images, and the files of its index.

manifest.json       classes, splits, shards, digests
SPLIT.npy           rows (shard, offset, size, label), see `polyad.data.images.shards`
SPLIT.names         the names of the images, UTF-8, each ended by a line feed
SPLIT.ends.npy      where each name ends in that file
SPLIT.attributes.npy    0 or 1 for each attribute of each image, where images have attributes
SPLIT.domains.npy   the number of each image's domain, where images have domains
images.bin          images of tables, one after the other
"""

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.images.shards import Shard
from polyad.data.json_reader import read_json
from polyad.data.prepared import MANIFEST_FILE, Count, Sha256

FORMAT_VERSION = 3
TEST_IS_VALIDATION = "test: the data set's validation split"
"""How `held_out` ends in that case."""


class ImageSplitInfo(Config):
    """One split."""

    images: Count
    per_class: list[Count]
    """Images of each class, or with each attribute."""
    per_domain: list[Count] = Field(default_factory=list)
    """Images of each domain; empty: there are none."""


class ImageManifest(Config):
    """The whole content of `manifest.json`."""

    kind: Literal["images"] = "images"
    version: int = FORMAT_VERSION
    source: str
    """What the user wrote."""
    class_names: list[str]
    has_attributes: bool = False
    """Whether an image has any number of the classes, which are then attributes."""
    domain_names: list[str] = Field(default_factory=list)
    """Empty: images have no domains."""
    splits: dict[str, ImageSplitInfo]
    shards: list[Shard]
    left_out: dict[str, Count] = Field(default_factory=dict)
    """What of the source is not in the index: how many, by reason."""
    held_out: str | None = None
    """What was held out of what; None: the splits are the data set's own."""
    request: str
    """A digest of the request."""
    fingerprint: str
    """A digest of the training images' names and labels, and of the classes."""
    sha256: dict[str, Sha256]
    """SHA-256 of each other file of the folder, by name."""

    @property
    def own_validation(self) -> str | None:
        """The data set's own validation split; None if it is left out."""
        if self.held_out is None:
            return "validation" if "validation" in self.splits else None
        return "test" if self.held_out.endswith(TEST_IS_VALIDATION) else None

    @classmethod
    def read(cls, folder: Path) -> "ImageManifest":
        """Reads the manifest of a folder.

        Raises:
            DataError: It is missing or damaged, or describes other data.
        """
        path = folder / MANIFEST_FILE
        if not path.exists():
            raise DataError(
                f"data.path: {folder}: is not a folder of prepared images: it has no "
                f"{MANIFEST_FILE}; create one with `polyad prepare --images SOURCE --output "
                f"{folder}`"
            )
        tree = read_json(path)
        if not is_of_images(tree):
            raise DataError(
                f"data.path: {folder}: holds prepared text, but data.kind: images needs a folder "
                "made by `polyad prepare --images`"
            )
        if tree.get("version") != FORMAT_VERSION:
            raise DataError(
                f"{path}: format version {tree.get('version')!r:.60}, but this Polyad reads "
                f"version {FORMAT_VERSION}: prepare the images again"
            )
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise DataError(f"{path}: is damaged: {where}: {first['msg']}") from None

    @classmethod
    def find(cls, folder: Path) -> "ImageManifest | None":
        """Reads the manifest of a folder; None if there is none that can be read."""
        try:
            return cls.read(folder)
        except DataError:
            return None

    def write(self, folder: Path) -> None:
        """Writes the manifest."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"
        (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def is_of_images(tree: object) -> bool:
    """Returns whether a JSON manifest describes prepared images."""
    return isinstance(tree, dict) and tree.get("kind") == "images"
