"""Which images of a source train, validate and test."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError
from polyad.data.errors import listed as quoted
from polyad.data.images.manifest import TEST_IS_VALIDATION
from polyad.data.images.shards import Rows

HELD_OUT = 0.01
"""Share of the training images that are held out where the data set has no validation split that
is not its test: big_vision's train[99%:]."""
_SEED = 0
"""Of the choice of held-out images: the same for everybody."""


class Listed(NamedTuple):
    """The images of a split."""

    rows: Rows
    names: list[str]
    attributes: npt.NDArray[np.uint8] | None = None
    """0 or 1 of each attribute of each image; None: images have one class."""
    domains: npt.NDArray[np.int32] | None = None
    """The number of each image's domain; None: there are none."""

    def take(self, numbers: npt.NDArray[np.integer]) -> "Listed":
        """Some of them."""
        attributes = None if self.attributes is None else self.attributes[numbers]
        domains = None if self.domains is None else self.domains[numbers]
        names = [self.names[number] for number in numbers]
        return Listed(self.rows[numbers], names, attributes, domains)

    def per_class(self, classes: int) -> list[int]:
        """Images of each class, or with each attribute."""
        if self.attributes is not None:
            return [int(count) for count in self.attributes.sum(0, dtype=np.int64)]
        return [int(count) for count in np.bincount(self.rows["label"], minlength=classes)]

    def per_domain(self, domains: int) -> list[int]:
        """Images of each domain; empty where there are none."""
        if self.domains is None:
            return []
        return [int(count) for count in np.bincount(self.domains, minlength=domains)]


def missing_classes(
    images: Listed, names: Sequence[str], domain_names: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """The domains that lack classes.

    Args:
        images: Of all domains.
        names: Of the classes.
        domain_names: In the order of their numbers.

    Yields:
        The name of a domain, and those of the classes that it has no image of.
    """
    for number, domain in enumerate(domain_names):
        here = set(images.rows["label"][images.domains == number].tolist())
        missing = [name for label, name in enumerate(names) if label not in here]
        if missing:
            yield domain, quoted(missing, 5)


def split_images(
    listed: dict[str, Listed], held_out: float | None, domain_names: Sequence[str]
) -> tuple[dict[str, Listed], str | None]:
    """The splits of the folder: what is validated with is never the data set's test.

    Args:
        listed: The splits of the source.
        held_out: Share of the training images that become the validation split, within each domain
            if there are any; None: 0.01 where the source lacks one of validation and test.
        domain_names: In the order of their numbers.

    Returns:
        The splits, and what was held out of what; None where nothing was.

    Raises:
        DataError: The share leaves nothing to train on.
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
