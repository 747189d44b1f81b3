"""The index of images: assigns images to splits; writes rows, names and the manifest."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from polyad.data.errors import DataError
from polyad.data.errors import listed as quoted
from polyad.data.images.manifest import TEST_IS_VALIDATION, ImageManifest, ImageSplitInfo
from polyad.data.images.shards import Rows
from polyad.data.images.sources.found import Found
from polyad.data.prepared import SPLITS, digests_of

HELD_OUT = 0.01
"""Share of the training images held out for validation where the data set has no validation
split besides its test split: big_vision's train[99%:]."""
_SEED = 0
"""Seed of the choice of held-out images, the same for every user."""
INDEX = re.compile(
    rf"({'|'.join(SPLITS)})\.(npy|ends\.npy|names|attributes\.npy|domains\.npy)|images\.bin"
)
"""Files of the index."""


class Listed(NamedTuple):
    """The images of a split."""

    rows: Rows
    names: list[str]
    attributes: npt.NDArray[np.uint8] | None = None
    """0 or 1 for each attribute of each image; None if images have one class."""
    domains: npt.NDArray[np.int32] | None = None
    """The domain number of each image; None if there are no domains."""

    def take(self, numbers: npt.NDArray[np.integer]) -> "Listed":
        """Returns the images with the given numbers."""
        attributes = None if self.attributes is None else self.attributes[numbers]
        domains = None if self.domains is None else self.domains[numbers]
        names = [self.names[number] for number in numbers]
        return Listed(self.rows[numbers], names, attributes, domains)

    def per_class(self, classes: int) -> list[int]:
        """Counts the images of each class, or with each attribute."""
        if self.attributes is not None:
            return [int(count) for count in self.attributes.sum(0, dtype=np.int64)]
        return [int(count) for count in np.bincount(self.rows["label"], minlength=classes)]

    def per_domain(self, domains: int) -> list[int]:
        """Counts the images of each domain; empty if there are none."""
        if self.domains is None:
            return []
        return [int(count) for count in np.bincount(self.domains, minlength=domains)]


def missing_classes(
    images: Listed, names: Sequence[str], domain_names: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Finds the domains that lack classes.

    Yields:
        The name of a domain, and the names of the classes that it has no image of.
    """
    for number, domain in enumerate(domain_names):
        here = set(images.rows["label"][images.domains == number].tolist())
        missing = [name for label, name in enumerate(names) if label not in here]
        if missing:
            yield domain, quoted(missing, 5)


def split_images(
    listed: dict[str, Listed], held_out: float | None, domain_names: Sequence[str]
) -> tuple[dict[str, Listed], str | None]:
    """Makes the splits of the folder; the data set's test split is never used for validation.

    Args:
        listed: The splits of the source.
        held_out: Share of the training images that become the validation split, within each domain
            if there are any; None for 0.01 if the source lacks a validation or a test split.
        domain_names: The names of the domains, in the order of their numbers.

    Returns:
        The splits, and a description of what was held out; None if nothing was.

    Raises:
        DataError: The share leaves no training images.
    """
    if held_out is None and {"validation", "test"} <= listed.keys():
        return listed, None
    share = HELD_OUT if held_out is None else held_out
    train = listed["train"]
    stay, out = _held_out(train, share, domain_names)
    within = f", from each of {len(domain_names)} domains" if domain_names else ""
    said = (
        f"validation: {len(out):,} of the {len(train.rows):,} training images{within}, drawn with "
        f"the seed {_SEED}"
    )
    splits = {"train": train.take(stay), "validation": train.take(out)}
    if "test" in listed:
        splits["test"] = listed["test"]
        if "validation" in listed:
            said += "; the data set's own validation split is left out"
    elif "validation" in listed:
        splits["test"] = listed["validation"]
        said += f"; {TEST_IS_VALIDATION}"
    return splits, said


def _held_out(
    train: Listed, share: float, domain_names: Sequence[str]
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """Which images stay, and which are held out: a share of all, or of those of each domain."""
    groups = {"": np.arange(len(train.rows))}
    if train.domains is not None:
        groups = {
            f" of {name}": np.flatnonzero(train.domains == number)
            for number, name in enumerate(domain_names)
        }
    generator = np.random.Generator(np.random.PCG64(_SEED))
    stay, out = [], []
    for where, numbers in groups.items():
        count = max(1, round(share * len(numbers)))
        if count >= len(numbers):
            raise DataError(
                f"--held-out: {share} of {len(numbers):,} images{where} leaves none to train on"
            )
        order = numbers[generator.permutation(len(numbers))]
        stay.append(order[count:])
        out.append(order[:count])
    return np.sort(np.concatenate(stay)), np.sort(np.concatenate(out))


def write_index(
    folder: Path,
    source: str,
    request: str,
    found: Found,
    names: list[str],
    splits: dict[str, Listed],
    said: str | None,
    output: Path,
) -> ImageManifest:
    """Writes the index.

    Args:
        folder: The folder to write to.
        source: The source as the user wrote it.
        request: Digest of the request.
        found: The source.
        names: The names of the classes.
        splits: The images of each split.
        said: Description of what was held out; None if nothing was.
        output: What the folder will be renamed to.
    """
    for split, each in splits.items():
        encoded = [os.fsencode(name) for name in each.names]
        ends = np.cumsum([len(name) + 1 for name in encoded], dtype=np.int64) - 1
        np.save(folder / f"{split}.npy", each.rows)
        np.save(folder / f"{split}.ends.npy", ends)
        (folder / f"{split}.names").write_bytes(b"".join(name + b"\n" for name in encoded))
        if each.attributes is not None:
            np.save(folder / f"{split}.attributes.npy", each.attributes)
        if each.domains is not None:
            np.save(folder / f"{split}.domains.npy", each.domains)
    inside = {
        shard.path: str(output / Path(shard.path).relative_to(folder))
        for shard in found.shards
        if Path(shard.path).is_relative_to(folder)
    }
    manifest = ImageManifest(
        source=source,
        class_names=names,
        has_attributes=found.has_attributes,
        domain_names=found.domain_names,
        splits={
            split: ImageSplitInfo(
                images=len(each.rows),
                per_class=each.per_class(len(names)),
                per_domain=each.per_domain(len(found.domain_names)),
            )
            for split, each in splits.items()
        },
        shards=[
            shard.model_copy(update={"path": inside.get(shard.path, shard.path)})
            for shard in found.shards
        ],
        left_out=dict(found.left_out),
        held_out=said,
        request=request,
        fingerprint=_fingerprint(splits["train"], names, found.domain_names),
        sha256=digests_of(folder),
    )
    manifest.write(folder)
    return manifest


def _fingerprint(train: Listed, names: list[str], domain_names: list[str]) -> str:
    """Digests the names and labels of the training images, and the classes."""
    digest = xxhash.xxh3_128(json.dumps([names, domain_names]).encode())
    digest.update(np.ascontiguousarray(train.rows["label"]).tobytes())
    for of_each in (train.attributes, train.domains):
        if of_each is not None:
            digest.update(np.ascontiguousarray(of_each).tobytes())
    for name in train.names:
        digest.update(os.fsencode(name) + b"\n")
    return digest.hexdigest()
