"""Fewer cases that still hold every pair of values of any two factors."""

import itertools
from collections.abc import Iterable
from typing import Any

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
