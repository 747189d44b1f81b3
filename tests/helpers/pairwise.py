"""Fewer cases that still hold every pair of values of any two factors."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows, one value of each factor, in which every pair of values stands together at least once.

    Greedy and the same at each call: the row that adds most pairs comes next.
    """
    rows = list(itertools.product(*factors))
    places = list(itertools.combinations(range(len(factors)), 2))

    def pairs(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return {(a, b, row[a], row[b]) for a, b in places}

    missing = set().union(*(pairs(row) for row in rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
