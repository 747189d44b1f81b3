"""What of a source is probably not what its user wants: refused, unless it is accepted."""

import unicodedata

import numpy as np

from polyad.data.errors import DataError
from polyad.data.errors import listed as quoted
from polyad.data.images.sources.classes import NO_CLASSES
from polyad.data.images.sources.found import SPLIT_NAMES, Found, split_in
from polyad.data.images.splits import Listed

MOST_CLASSES = 1_000_000
"""Classes that are numbered and not named; a higher number is probably no class but an id."""
FEW_IMAGES = 10
"""Images up to which as many classes as images are no sign of ids."""


def check_highest(source: str, found: Found, listed: dict[str, Listed]) -> None:
    """Refuses numbers of classes that would fill the memory with names.

    Raises:
        DataError: A number is too high.
    """
    if found.class_names is not None or any(found.names_of_shards):
        return
    for split, images in listed.items():
        if len(images.rows) and int(images.rows["label"].max()) >= MOST_CLASSES:
            first = int(images.rows["label"].argmax())
            raise DataError(
                f"--images: {source}: {images.names[first]} of {split} has the label "
                f"{int(images.rows['label'][first]):,}, and without names {MOST_CLASSES:,} classes "
                f"are allowed: are the labels ids?"
            )


def check_mistakes(
    source: str, found: Found, listed: dict[str, Listed], names: list[str], *, accept: bool
) -> None:
    """Refuses what is probably a mistake.

    Args:
        source: What the user wrote.
        found: The source, all of whose images are listed.
        listed: The images of each split.
        names: Of the classes.
        accept: Whether all of it is meant.

    Raises:
        DataError: There is such a thing, and it is not accepted.
    """
    more = [] if found.has_attributes else _of_classes(found, listed["train"], names)
    found.left_out.check(f"--images: {source}", more, accept=accept)


def _of_classes(found: Found, train: Listed, names: list[str]) -> list[str]:
    counts = np.bincount(train.rows["label"], minlength=len(names))
    empty = [names[number] for number in np.flatnonzero(counts == 0)[:3]]
    mistakes = []
    if len(names) == 1:
        mistakes.append(f"there is only one class, {names[0]!r}")
    if empty:
        many = int((counts == 0).sum())
        which = f"{many:,} of the {len(names):,} classes have" if many > 1 else "one class has"
        mistakes.append(f"{which} no training image: {quoted(empty)}{', ...' * (many > 3)}")
    mistakes += _of_names(names)
    low = {name.lower() for name in names}
    if all(low & known for known in NO_CLASSES):
        mistakes.append(f"{quoted(names, 5)} are no classes: name the folder that has them")
    numbered = found.class_names is None and not any(found.names_of_shards)
    ids = numbered and len(train.rows) > FEW_IMAGES
    if ids and 2 * int((counts > 0).sum()) > len(train.rows):
        mistakes.append(
            f"{len(train.rows):,} training images have {int((counts > 0).sum()):,} classes: are "
            f"the labels ids?"
        )
    return mistakes


def _of_names(names: list[str]) -> list[str]:
    """What is probably wrong with names of classes: splits, or one class that is written twice."""
    mistakes = []
    splits = [name for name in names if split_in(name)]
    if len({split_in(name) for name in splits}) > 1:
        mistakes.append(
            f"{quoted(splits, 5)} are called as splits, and would be classes: folders of splits "
            f"are {', '.join(SPLIT_NAMES)}, and one of them is train or training"
        )
    first: dict[str, str] = {}
    for name in names:
        # Letters, as those of handwriting, are classes of their own whether large or small.
        alike = unicodedata.normalize("NFKC", name).casefold().strip() if len(name) > 1 else name
        if (other := first.setdefault(alike, name)) is not name:
            mistakes.append(
                f"{other!a} and {name!a} would be two classes, and differ only by the "
                f"case of letters, blanks or forms of Unicode"
            )
    return mistakes[:3]
