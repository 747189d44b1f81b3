"""Rows of a study's tables that are about training as it goes on: curves, and what leaks."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyad.launch.study.answer import amount
from polyad.launch.study.cells import Row, difference_cells, mark, pm

MOST_STEPS = 8
"""Of training, in a table."""


def curve_rows(result: Mapping[str, Any]) -> list[Row]:
    """Validation over training: the baseline's score, and the others' differences to it."""
    baseline, unit = result["baseline"], result["unit"]
    curves = {name: v["curve"] for name, v in result["variants"].items() if v["curve"]}
    if curves.keys() <= {baseline}:
        return []
    steps = {each["step"]: each[f"{unit}s"] for curve in curves.values() for each in curve}
    shown = _evenly(sorted(steps), MOST_STEPS)
    rows: list[Row] = [(f"after {unit}s", *(amount(steps[step]) for step in shown))]
    for name, curve in curves.items():
        at = {each["step"]: each for each in curve}
        cells = [_curve_cell(at[step]) if step in at else "" for step in shown]
        rows.append((name if name == baseline else f"{name} - {baseline}", *cells))
    return rows


def _evenly(steps: Sequence[int], most: int) -> list[int]:
    """Some of the steps, the first and the last among them."""
    if len(steps) <= most:
        return [*steps]
    last = len(steps) - 1
    return [steps[round(i * last / (most - 1))] for i in range(most)]


def _curve_cell(at: Mapping[str, Any]) -> str:
    difference = at["difference"]
    if difference is None:
        return f"{at['score']['mean']:.4f}"
    return f"{difference['mean']:+.4f}" + mark(difference)


def leak_rows(variants: Mapping[str, Any]) -> list[Row]:
    """What later tokens are worth, at each checkpoint."""
    rows: list[Row] = [
        ("leak", "step", "as reported", "with the mask", "difference", "from the prefix",
         "difference", "95% interval"),
    ]  # fmt: skip
    for name, variant in variants.items():
        for step, leak in variant["leak"].items():
            masked, prefix = leak["masked_leak"], leak["prefix_leak"]
            rows.append(
                (
                    *(name, f"{int(step):,}", pm(leak["reported"], 4)),
                    *(pm(leak["masked"], 4), pm(masked, 4, sign="+") + mark(masked)),
                    pm(leak["prefix"], 4),
                    *difference_cells(prefix)[:2],
                )
            )
    return rows


def honest_rows(variants: Mapping[str, Any]) -> list[Row]:
    """What is left of the difference to the baseline without what leaks, at the end."""
    rows: list[Row] = [("without the leak", "as reported", "with the mask", "from the prefix")]
    for name, variant in variants.items():
        last = list(variant["leak"].values())[-1:]
        for leak in last:
            honest = [leak[f"{way}_beside_baseline"] for way in ("masked", "prefix")]
            if variant["difference"] is not None and all(honest):
                cells = [variant["difference"], *honest]
                rows.append((name, *(pm(c, 4, sign="+") + mark(c) for c in cells)))
    return rows
