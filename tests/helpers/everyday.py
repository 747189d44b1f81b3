"""Selects which cases of a parametrization are in the everyday suite."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def everyday(
    names: str | Sequence[str],
    cases: Iterable[Any],
    keep: Iterable[Any],
    ids: Callable[[Any], str] | Iterable[str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrizes a test, marking all but a few named cases as slow.

    Args:
        names: of one argument, whose value a case is, or of several, for which it is a tuple.
        cases: all of them.
        keep: those of the everyday suite, by their value or by their name.
        ids: names of cases, or what makes a name of one; pytest's own if not given.

    Raises:
        ValueError: something to keep is not a case.
    """
    cases, keep = list(cases), list(keep)
    given = map(ids, cases) if callable(ids) else ids
    labels: list[str | None] = [None] * len(cases) if given is None else list(given)
    if unknown := [each for each in keep if each not in cases and each not in labels]:
        raise ValueError(f"no cases: {unknown}")
    single = isinstance(names, str)
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *([case] if single else case),
                id=label,
                marks=() if case in keep or (label and label in keep) else pytest.mark.slow,
            )
            for case, label in zip(cases, labels, strict=True)
        ],
    )
