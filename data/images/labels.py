"""Class names of a source: one list for all of its files.

Files may number the same classes differently, as `datasets` does if each split was made alone. The
name decides: the numbers of each file become positions among the names of the training images.
"""

from collections.abc import Sequence

import numpy as np

from polyad.data.errors import DataError
from polyad.data.errors import listed as quoted
from polyad.data.images.index import Listed
from polyad.data.images.sources.found import Found
from polyad.data.names import each_once

MOST_CLASSES = 1_000_000
"""Maximum number of classes without names; a higher number is probably an id, not a class."""


def by_name(
    source: str, found: Found, listed: dict[str, Listed]
) -> tuple[list[str], dict[str, Listed]]:
    """Returns the class names, and the splits with labels that are positions among these.

    A test split whose labels are unknown is left out.

    Args:
        source: The source as the user wrote it.
        found: Its files.
        listed: Their images, with the labels of the files.

    Raises:
        DataError: An image has no class, or one that the training images do not have.
    """
    listed = {split: each for split, each in listed.items() if len(each.rows)}
    highest = max(int(each.rows["label"].max()) for each in listed.values())
    if (test := listed.get("test")) is not None and (test.rows["label"] == -1).all():
        listed = {split: each for split, each in listed.items() if split != "test"}
    names_of = found.names_of_shards or [found.class_names] * len(found.shards)
    names_of = [names and each_once(names) for names in names_of]
    names = _training_names(source, found, listed, names_of)
    if names is None:
        if highest < 0:
            raise DataError(f"--images: {source}: no image has a class")
        if highest >= MOST_CLASSES:
            raise DataError(
                f"--images: {source}: an image has the label {highest:,}, and without names "
                f"{MOST_CLASSES:,} classes are allowed: are the labels ids?"
            )
        names = [str(number) for number in range(highest + 1)]
        names_of = [names] * len(names_of)
    return names, {
        split: _in_common(f"--images: {source}", split, each, names, names_of)
        for split, each in listed.items()
    }


def _training_names(
    source: str,
    found: Found,
    listed: dict[str, Listed],
    names_of: Sequence[Sequence[str] | None],
) -> list[str] | None:
    """Lists classes in the order in which training files name them; None if none names any."""
    used = {split: np.unique(each.rows["shard"]).tolist() for split, each in listed.items()}
    every = sorted({shard for shards in used.values() for shard in shards})
    named = [shard for shard in every if names_of[shard] is not None]
    unnamed = [shard for shard in every if names_of[shard] is None]
    if named and unnamed:
        first, other = (found.shards[shards[0]].path for shards in (unnamed, named))
        raise DataError(
            f"--images: {source}: {first} has numbered classes without names, but {other} has "
            "names, so it is unknown which number is which class; both need names, or neither"
        )
    names = [name for shard in used["train"] for name in names_of[shard] or ()]
    return list(dict.fromkeys(names)) if named else None


def _in_common(
    place: str,
    split: str,
    images: Listed,
    names: Sequence[str],
    names_of: Sequence[Sequence[str] | None],
) -> Listed:
    """Renumbers the labels of a split to positions among the common names."""
    number_of = {name: number for number, name in enumerate(names)}
    rows = images.rows.copy()
    for shard in np.unique(rows["shard"]):
        theirs = names_of[shard] or ()
        inside = np.flatnonzero(rows["shard"] == shard)
        labels = rows["label"][inside]
        wrong = np.flatnonzero((labels < 0) | (labels >= len(theirs)))
        if len(wrong):
            raise DataError(
                f"{place}: {images.names[inside[wrong[0]]]} of {split} has the label "
                f"{labels[wrong[0]]}, and classes are 0 to {len(theirs) - 1}{_like_it(len(wrong))}"
            )
        common = np.array([number_of.get(name, -1) for name in theirs], dtype=np.int32)
        rows["label"][inside] = common[labels]
        strange = np.flatnonzero(common[labels] < 0)
        if len(strange):
            raise DataError(
                f"{place}: {images.names[inside[strange[0]]]} of {split} has the class "
                f"{theirs[labels[strange[0]]]!r}, which no file of training images has; they have "
                f"{quoted(names, 5)}{_like_it(len(strange))}"
            )
    return images._replace(rows=rows)


def _like_it(count: int) -> str:
    return f" ({count:,} images like it)" if count > 1 else ""
