"""Names of splits, classes and domains, as files and users write them.

A domain has samples of one kind, such as the sketches among pictures, and can be left out of
training: with `data.leave_out` a run trains and validates on the other domains, and its test split
is all of the data of those left out (Gulrajani & Lopez-Paz 2021, "In search of lost domain
generalization").
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from polyad.data.errors import DataError, listed, nearest

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    "test": "test",
}
"""Names of folders and files that hold a split, and the split that they mean."""


def each_once(names: Sequence[str]) -> list[str]:
    """Makes names unique by adding numbers: ImageNet has two classes named crane."""
    count = Counter(names)
    return [f"{name} ({number})" if count[name] > 1 else name for number, name in enumerate(names)]


def _sorted(names: list[str] | None) -> list[str] | None:
    return None if names is None else sorted(set(names))


LeaveOut = Annotated[list[str] | None, Field(min_length=1), AfterValidator(_sorted)]
"""Names of domains, sorted because their order has no meaning; or None."""


def check_leave_out(
    leave_out: Sequence[str] | None, domains: Sequence[str], place: str, made_by: str
) -> None:
    """Checks that the domains to leave out exist, and are not all of the domains.

    Args:
        leave_out: As `data.leave_out`.
        domains: The domains of the data; empty if it has none.
        place: Name of the data, for errors.
        made_by: What gives this kind of data its domains, for errors.

    Raises:
        DataError: One does not exist, or none would be left.
    """
    if leave_out is None:
        return
    if not domains:
        raise DataError(
            f"data.leave_out: {listed(leave_out)} is not allowed: {place} has no domains; set it "
            f"to null, or use {made_by}"
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
