"""Scores of each domain, in a record of validation and for a person."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyad.train.results import aligned

PerDomain = Mapping[str, Mapping[str, float]]
"""How many samples of each domain were scored, and its scores, by their names."""


def domain_records(per_domain: PerDomain, names: Sequence[str]) -> dict[str, float]:
    """The keys of a record of validation, as `validation_loss/sketch`.

    Args:
        per_domain: The scores.
        names: Of those that are told.
    """
    return {
        f"validation_{name}/{domain}": scores[name]
        for domain, scores in per_domain.items()
        for name in names
    }


def domain_rows(
    result: Mapping[str, Any], counted: str, titles: Mapping[str, str]
) -> list[tuple[str, str]]:
    """A table of the domains, as names and values, below which domains are left out of training.

    Args:
        result: Of an evaluation, with `per_domain` and `left_out`.
        counted: What samples are called, and the key of their number.
        titles: Of the scores, by their names.
    """
    rows = []
    per_domain: PerDomain = result["per_domain"]
    if per_domain:
        table = [
            [counted, *titles.values()],
            *(
                [f"{scores[counted]:,}", *(f"{scores[name]:.4f}" for name in titles)]
                for scores in per_domain.values()
            ),
        ]
        names = ["by domain", *(f"  {name}" for name in per_domain)]
        rows = list(zip(names, aligned(table, ">"), strict=True))
    if result["left_out"]:
        rows.append(("left out", f"{', '.join(result['left_out'])}: the test split"))
    return rows
