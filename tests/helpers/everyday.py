"""Which cases of a parametrization run at all, and which of them are in the everyday suite."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Case = tuple[Any, ...]
"""One value of each factor."""


def pairwise(cases: Iterable[Case], first: Iterable[Case] = ()) -> list[Case]:
    """Chooses cases in which every pair of values that any case has stands together.

    Greedy and the same at each call: the case that adds most pairs comes next.

    Args:
        cases: All that are allowed: the product of all factors, or a part of it.
        first: Cases that are chosen in any event; they come first.

    Raises:
        ValueError: A case of `first` is not allowed.
    """
    cases, chosen = list(cases), list(first)
    if unknown := [case for case in chosen if case not in cases]:
        raise ValueError(f"no cases: {unknown}")
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs.values()).difference(*(pairs[case] for case in chosen))
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


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
