"""Domains: samples of one kind, as the sketches among pictures, that can be left out of training.

With `data.leave_out` a run trains on and validates with the other domains, and its test split is
all that there is of those left out (Gulrajani & Lopez-Paz 2021, "In search of lost domain
generalization").
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from polyad.data.errors import DataError, listed, nearest


def _each_once(names: list[str] | None) -> list[str] | None:
    if names is None:
        return None
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ValueError(f"{name!r} stands there twice; each domain once is")
    return sorted(names)


LeaveOut = Annotated[list[str] | None, Field(min_length=1), AfterValidator(_each_once)]
"""Names of domains, sorted, as their order means nothing; or None."""


def check_leave_out(
    leave_out: Sequence[str] | None, domains: Sequence[str], place: str, made_by: str
) -> None:
    """Checks that the domains to leave out are there, and not all that there are.

    Args:
        leave_out: As `data.leave_out`.
        domains: Of the data; empty: it has none.
        place: The data, for errors.
        made_by: What gives data of this kind domains, for errors.

    Raises:
        DataError: They are not.
    """
    if leave_out is None:
        return
    if not domains:
        raise DataError(
            f"data.leave_out: {listed(leave_out)} is not allowed: {place} has no domains; null is, "
            f"or {made_by}"
        )
    for name in leave_out:
        if name not in domains:
            raise DataError(
                f"data.leave_out: {name!r} is no domain of {place}{nearest(name, domains)}; "
                f"domains: {listed(domains)}"
            )
    if set(leave_out) == set(domains):
        raise DataError(
            f"data.leave_out: all domains of {place} are left out ({listed(domains)}), which "
            f"leaves none to train on"
        )


def check_classes(domain: str, classes: Iterable[str], trained: Iterable[str]) -> None:
    """Checks that what is left out can be learned from the rest.

    Args:
        domain: One that is left out.
        classes: Names of those that it has.
        trained: Names of those that are trained on.

    Raises:
        DataError: It has more.
    """
    missing = sorted(set(classes) - set(trained))
    if missing:
        raise DataError(
            f"data.leave_out: {domain!r} has {listed(missing, 3)}, of which the domains that are "
            f"trained on have nothing: a class that is never seen cannot be learned"
        )
