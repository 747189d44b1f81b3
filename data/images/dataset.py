"""The splits of a data set of images, and its classes.

Sources may number the same classes differently, as `datasets` does if each split was made alone.
The name decides: labels become positions among the names of the training images.

A domain has samples of one kind, such as the sketches among pictures, and can be left out of
training: with `data.leave_out` a run trains and validates on the other domains, and its test split
is all of the data of those left out (Gulrajani & Lopez-Paz 2021, "In search of lost domain
generalization").
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import xxhash

from polyad.data.errors import DataError, listed, nearest, user_path
from polyad.data.images.config import ImageDataConfig
from polyad.data.images.source import ImageSplit, digits, open_folders, table_images
from polyad.data.tables import open_tables

DIGITS, TEST = "digits", "test"
TABLES = (".parquet", ".arrow", ".tar")
"""Endings of files that are tables of images."""
HELD_OUT = 0.01
"""Share of the training images held out for validation where the data set has no validation
split besides its test split: big_vision's train[99%:]."""
_SEED = 0
"""Seed of the choice of held-out images, the same for every user."""


class ImageData:
    """Images as `data.path` names them.

    Args:
        settings: The settings of the data.
        by_split: The images by split, with labels by the names of each source.
        domain_names: The names of the domains; empty: images have no domains.
        notes: What was not read, and why; a line each.

    Attributes:
        class_names: The names of the classes, or of the attributes.
        has_attributes: Whether an image has any number of the classes, which are then attributes.
        domain_names: The names of the domains.
        held_out: What was held out of what; None: the splits are the data set's own.
        own_validation: The data set's own validation split; None if it is left out.
        left_out: Names of the domains left out, in order.

    Raises:
        DataError: An image has no class, or one that the training images do not have; nothing is
            left to train on; or these domains cannot be left out.
    """

    def __init__(
        self,
        settings: ImageDataConfig,
        by_split: Mapping[str, ImageSplit],
        domain_names: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self.place = f"data.path: {settings.path}"
        self.domain_names, self.notes = list(domain_names), list(notes)
        self._splits = {
            split: images
            for split, images in by_split.items()
            if split != TEST or not (images.labels == -1).all()
        }
        if "train" not in self._splits:
            raise DataError(f"{self.place}: has no training images with classes")
        self.has_attributes = self._splits["train"].labels.ndim == 2
        self.class_names = list(self._splits["train"].class_names)
        for split, images in self._splits.items():
            self._renumber(split, images)
        self.held_out: str | None = None
        self.own_validation = "validation" if "validation" in self._splits else None
        train = self._splits["train"]
        if settings.held_out is not None or not {"validation", TEST} <= self._splits.keys():
            self._hold_out(HELD_OUT if settings.held_out is None else settings.held_out)
        check_leave_out(settings.leave_out, self.domain_names, self.place)
        self.left_out = [name for name in self.domain_names if name in (settings.leave_out or ())]
        if self.left_out:
            self._leave_out(train)

    @classmethod
    def open(cls, settings: ImageDataConfig) -> "ImageData":
        """Lists the images; see the class.

        Raises:
            DataError: There are none, or they cannot be read.
        """
        path = settings.path
        if path == DIGITS:
            return cls(settings, {"train": digits()})
        folder, tables = user_path(path), None
        if not settings.domains:
            tables = open_tables(path, TABLES)
        elif not folder.is_dir():
            raise DataError(f"data.domains: true needs a folder, and data.path is {path}")
        if tables is not None:
            by_split = {
                split: table_images(rows, f"data.path: {path}, {split}")
                for split, rows in tables.splits.items()
            }
            return cls(settings, by_split, notes=tables.notes)
        by_split, domain_names, others = open_folders(folder, domains=settings.domains)
        note = f"data.path: {path}: {others:,} files are not images, and not read"
        return cls(settings, by_split, domain_names, [note] if others else [])

    @property
    def splits(self) -> list[str]:
        """Names of the available splits."""
        return list(self._splits)

    def split(self, name: str) -> ImageSplit:
        """Returns a split. If domains are left out, `test` is all of their images, and the other
        splits have only images of the other domains.

        Raises:
            DataError: There is no split of that name.
        """
        if name not in self._splits:
            raise DataError(f"{self.place}: has no {name} split; it has {listed(self.splits)}")
        return self._splits[name]

    @functools.cache  # noqa: B019  # a run has one
    def contents(self, split: str) -> str:
        """Digests the names and labels of a split's images, the classes, and the domains."""
        names = [self.class_names, self.domain_names, self.left_out]
        digest = xxhash.xxh3_128(json.dumps(names).encode())
        digest.update(self.split(split).digest().encode())
        return digest.hexdigest()

    def _renumber(self, split: str, images: ImageSplit) -> None:
        """Renumbers the labels of a split by the class names of the training images."""
        names, labels = images.class_names, images.labels
        if self.has_attributes or labels.ndim == 2:
            if list(names) != self.class_names:
                raise DataError(f"{self.place}: train and {split} have different attributes")
            return
        wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
        if len(wrong):
            raise DataError(
                f"{self.place}: {images.name_of(int(wrong[0]))} of {split} has the label "
                f"{labels[wrong[0]]}, which is not the number of a class "
                f"({len(wrong):,} images like it)"
            )
        number_of = {name: number for number, name in enumerate(self.class_names)}
        images.labels = np.array([number_of.get(name, -1) for name in names])[labels]
        strange = np.flatnonzero(images.labels < 0)
        if len(strange):
            raise DataError(
                f"{self.place}: {split} has images of the class {names[labels[strange[0]]]!r}, "
                f"which no training image has; classes are {listed(self.class_names, 5)}"
            )

    def _hold_out(self, share: float) -> None:
        """Draws a validation split; the data set's own test split is never used for it."""
        train = self._splits["train"]
        domains = np.zeros(len(train), int) if train.domains is None else train.domains
        generator = np.random.Generator(np.random.PCG64(_SEED))
        out = np.zeros(len(train), dtype=bool)
        for domain, name in enumerate(self.domain_names or [""]):
            numbers = np.flatnonzero(domains == domain)
            count = max(1, round(share * len(numbers)))
            if count >= len(numbers):
                where = f" of {name}" if name else ""
                raise DataError(
                    f"data.held_out: {share} of {len(numbers):,} images{where} leaves none to "
                    "train on"
                )
            out[numbers[generator.permutation(len(numbers))[:count]]] = True
        within = f", from each of {len(self.domain_names)} domains" if self.domain_names else ""
        self.held_out = (
            f"validation: {out.sum():,} of the {len(train):,} training images{within}, drawn with "
            f"the seed {_SEED}"
        )
        own, test = self._splits.get("validation"), self._splits.get(TEST)
        self.own_validation = None
        if test is not None and own is not None:
            self.held_out += "; the data set's own validation split is left out"
        elif own is not None:
            self.held_out += "; test: the data set's validation split"
            test, self.own_validation = own, TEST
        self._splits = {
            "train": train.select(np.flatnonzero(~out)),
            "validation": train.select(np.flatnonzero(out)),
        } | ({TEST: test} if test is not None else {})

    def _leave_out(self, images: ImageSplit) -> None:
        """Moves the images of domains to the test split.

        Args:
            images: All images of the folder.
        """
        numbers = [self.domain_names.index(name) for name in self.left_out]
        inside, splits = [], {}
        for name, split in self._splits.items():
            assert split.domains is not None
            assert split.numbers is not None
            away = np.isin(split.domains, numbers)
            inside.append(split.numbers[away])
            splits[name] = split.select(np.flatnonzero(~away))
        test = images.select(np.concatenate(inside))
        names = np.array(self.class_names)
        domains = np.array(self.domain_names)[test.domains].tolist()
        check_classes(domains, names[test.labels].tolist(), names[splits["train"].labels].tolist())
        self._splits = splits | {TEST: test}


def check_leave_out(leave_out: Sequence[str] | None, domains: Sequence[str], place: str) -> None:
    """Checks that the domains to leave out exist, and are not all of the domains.

    Args:
        leave_out: As `data.leave_out`.
        domains: The domains of the data; empty if it has none.
        place: Name of the data, for errors.

    Raises:
        DataError: One does not exist, or none would be left.
    """
    if leave_out is None:
        return
    if not domains:
        raise DataError(
            f"data.leave_out: {listed(leave_out)} is not allowed: {place} has no domains; set it "
            "to null, or use a folder with data.domains: true"
        )
    for name in leave_out:
        if name not in domains:
            raise DataError(
                f"data.leave_out: {name!r} is not a domain of {place}{nearest(name, domains)}; "
                f"domains: {listed(domains)}"
            )
    if set(leave_out) == set(domains):
        raise DataError(
            f"data.leave_out: all domains of {place} are left out ({listed(domains)}), so there is "
            "nothing to train on"
        )


def check_classes(domains: Sequence[str], classes: Sequence[str], trained: Iterable[str]) -> None:
    """Checks that the classes of the domains left out also occur in the training data.

    Args:
        domains: The domain of each sample left out.
        classes: The class of each.
        trained: The classes that are trained on.

    Raises:
        DataError: A domain has a class that is not trained on.
    """
    seen = set(trained)
    strange = {pair for pair in zip(domains, classes, strict=True) if pair[1] not in seen}
    if strange:
        domain, _ = min(strange)
        names = sorted(name for each, name in strange if each == domain)
        raise DataError(
            f"data.leave_out: {domain!r} has the class {listed(names, 3)}, which the other "
            "domains do not have: a class that is never seen cannot be learned"
        )
