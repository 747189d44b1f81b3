"""A study's comparison as tables, for a terminal or a page."""

import math
from collections.abc import Mapping, Sequence

from polyad.launch.output import align
from polyad.launch.study.result import (
    Difference,
    Relation,
    Result,
    Score,
    Spread,
    StudyResult,
    TasksResult,
    Validation,
    VariantResult,
)
from polyad.launch.study.sentences import amount, answers, notes, tasks_note

Row = tuple[str, ...]
Variants = Mapping[str, VariantResult]
MOST_STEPS = 8
"""Maximum number of training steps in a table."""


def result_table(result: Result, *, markdown: bool = False) -> str:
    """The comparison, for a terminal or in Markdown."""
    if isinstance(result, TasksResult):
        return _tasks_table(result, markdown=markdown)
    table = _markdown if markdown else align
    parts = [
        *(table(rows) for _, rows in tables_of(result)),
        _sentences(result, markdown=markdown),
        notes(result),
    ]
    return "\n\n".join(filter(None, parts))


def tables_of(result: StudyResult) -> list[tuple[str, list[Row]]]:
    """The tables of a study without tasks, or of one task: headings, and rows, the first with
    column names."""
    variants, score, beside = result.variants, result.scores[0], result.baseline
    found = {
        "Scores": _score_rows(result),
        "Points of the grid": _grid_rows(result),
        "On perturbed data": _attacked_rows(variants, result.scores),
        "Size and cost": _cost_rows(variants, result.unit),
        "Validation over training": _curve_rows(result),
        "Routing": _routing_rows(variants, score.name),
        f"Routing, difference from {beside}": _routing_difference_rows(variants, score.name),
        f"Correlation of measures with {score.title}": _relation_rows(result),
        "Effect of seeing later tokens": _leak_rows(variants),
        "Differences without the leak": _honest_rows(variants),
    }
    return [(heading, rows) for heading, rows in found.items() if len(rows) > 1]


def _sentences(result: Result, *, markdown: bool = False) -> str:
    """The conclusions, a line for each variant."""
    mark = "- " if markdown else ""
    return "\n".join(f"{mark}{sentence}" for sentence in answers(result))


def _tasks_table(result: TasksResult, *, markdown: bool) -> str:
    """The comparison over tasks: each variant's score on each, their mean, and its difference."""
    table = _markdown if markdown else align
    parts = [table(over_tasks_rows(result))]
    for task, found in result.tasks.items():
        shown = (_score_rows, _grid_rows, _curve_rows)
        first, *others = (rows(found) for rows in shown)
        if len(first) > 1:
            parts.append(f"{task}\n{table(first)}")
        parts += [table(rows) for rows in others if len(rows) > 1]
    return "\n\n".join([*parts, _sentences(result, markdown=markdown), tasks_note(result)])


def over_tasks_rows(result: TasksResult) -> list[Row]:
    """Each variant's score on each task, their mean, and its difference."""
    tasks, score = result.tasks, result.scores[0]
    name, digits = score.name, score.digits
    rows: list[Row] = [
        ("variant", *tasks, "mean", "difference", "95% interval", "pairs"),
    ]
    for variant in next(iter(tasks.values())).variants:
        of_tasks = [found.variants.get(variant) for found in tasks.values()]
        cells = [pm(found.scores[name], digits) if found else "" for found in of_tasks]
        over = result.variants.get(variant)
        mean = pm(over.mean, digits) if over else ""
        beside = difference_cells(over.difference if over else None, digits)
        rows.append((variant, *cells, mean, *beside))
    return rows


def _grid_rows(result: StudyResult) -> list[Row]:
    """The validation of each point of a grid, and which point was chosen by it."""
    grids = {name: of for name, of in result.grids.items() if name in result.variants}
    points = list(dict.fromkeys(point for of in grids.values() for point in of))
    # JSON has no infinity: in a stored result such a point is null, like an unfinished one.
    runs = [*result.runs, *result.swept]
    without = {(run.variant, run.point) for run in runs if run.validation is None}
    rows: list[Row] = [("grid, validation", *points)]
    for name, of in grids.items():
        best, digits = result.variants[name].point, result.scores[0].digits
        cells = []
        for point in points:
            score = "" if of.get(point) is None else f"{of[point]:.{digits}f}"
            if point in of and (name, point) in without:
                score = "not finite"
            cells.append(f"{score} best" if point == best else score)
        rows.append((name, *cells))
    return rows


def _score_rows(result: StudyResult) -> list[Row]:
    """The first two scores, and the difference of the first."""
    variants, scores = result.variants, result.scores
    first, *others = scores[:2]
    titles = (score.title for score in scores[:2])
    rows: list[Row] = [("variant", *titles, "difference", "95% interval", "pairs")]
    for name, variant in variants.items():
        cells = [pm(variant.scores[first.name], first.digits)]
        cells += [pm(variant.scores[score.name], 2) for score in others]
        rows.append((name, *cells, *difference_cells(variant.difference, first.digits)))
    return rows


def _attacked_rows(variants: Variants, scores: Sequence[Score]) -> list[Row]:
    """The rows of `_score_rows` for attacked data."""
    names = [f"attacked_{score.name}" for score in scores[:2]]
    titles = (score.title for score in scores[:2])
    rows: list[Row] = [("attacked", *titles, "difference", "95% interval", "pairs")]
    for name, variant in variants.items():
        known = variant.measures
        if all(each in known for each in names):
            digits = (scores[0].digits, 2)
            cells = [pm(known[n], d) for n, d in zip(names, digits, strict=False)]
            beside = variant.differences.get(names[0])
            rows.append((name, *cells, *difference_cells(beside, digits[0])))
    return rows


def _cost_rows(variants: Variants, unit: str) -> list[Row]:
    rows: list[Row] = [("variant", "parameters", "active per token", f"FLOPs/{unit}", f"{unit}s/s")]
    rows += [
        (
            name,
            f"{variant.parameters:,}",
            f"{variant.active_parameters:,}",
            f"{variant.flops:.3g}",
            f"{variant.rate.mean:,.0f}",
        )
        for name, variant in variants.items()
    ]
    return rows


def _routing_rows(variants: Variants, score: str) -> list[Row]:
    names = _routing_names(variants, score)
    rows: list[Row] = [("routing", *names)]
    for variant_name, variant in variants.items():
        known = variant.measures
        if any(name in known for name in names):
            cells = [pm(known[name], 3) if name in known else "" for name in names]
            rows.append((variant_name, *cells))
    return rows


def _routing_difference_rows(variants: Variants, score: str) -> list[Row]:
    """Routing statistics compared with the baseline's; empty if the baseline does not route."""
    beside_all = [variant.differences for variant in variants.values()]
    names = [name for name in _routing_names(variants, score) if any(name in b for b in beside_all)]
    rows: list[Row] = [("routing beside", *names)]
    for variant_name, variant in variants.items():
        beside = variant.differences
        if any(name in beside for name in names):
            cells = [
                pm(beside[name], 3, sign="+") + mark(beside[name]) if name in beside else ""
                for name in names
            ]
            rows.append((variant_name, *cells))
    return rows


def _routing_names(variants: Variants, score: str) -> list[str]:
    """Names of routing statistics, except those that are 0 for all, as dropped tokens usually
    are."""
    known = [variant.measures for variant in variants.values()]
    names = {
        name: None
        for each in known
        for name in each
        if name != score and not name.startswith("attacked_")
    }
    return [name for name in names if any(each[name].mean for each in known if name in each)]


def _relation_rows(result: StudyResult) -> list[Row]:
    """Rank correlations of measures with the score, the strongest first."""
    title = result.scores[0].title
    rows: list[Row] = [(f"with {title}", "rank correlation", "95% interval", "seeds")]
    known = result.relations.items()
    for name, found in sorted(known, key=lambda item: -abs(item[1].mean)):
        several = found.pairs > 1
        interval = f"{found.low:+.2f} to {found.high:+.2f}{mark(found)}"
        cells = (f"{found.mean:+.2f}", interval if several else "none of one seed")
        rows.append((name, *cells, f"{found.pairs}"))
    return rows


def _markdown(rows: list[Row]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(rows[0]))) + "|"
    return "\n".join([head, rule, *body])


def _curve_rows(result: StudyResult) -> list[Row]:
    """Validation during training: the baseline's score, and the others' differences from it."""
    baseline, units = result.baseline, f"{result.unit}s"
    curves = {name: v.curve for name, v in result.variants.items() if v.curve}
    if curves.keys() <= {baseline}:
        return []
    steps = {each.step: each.seen for curve in curves.values() for each in curve}
    shown = _evenly(sorted(steps), MOST_STEPS)
    rows: list[Row] = [(f"after {units}", *(amount(steps[step]) for step in shown))]
    for name, curve in curves.items():
        at = {each.step: each for each in curve}
        cells = [_curve_cell(at[step]) if step in at else "" for step in shown]
        rows.append((name if name == baseline else f"{name} - {baseline}", *cells))
    return rows


def _evenly(steps: Sequence[int], most: int) -> list[int]:
    """A selection of the steps, including the first and the last."""
    if len(steps) <= most:
        return [*steps]
    last = len(steps) - 1
    return [steps[round(i * last / (most - 1))] for i in range(most)]


def _curve_cell(at: Validation) -> str:
    if at.difference is None:
        return f"{at.score.mean:.4f}"
    return f"{at.difference.mean:+.4f}" + mark(at.difference)


def _leak_rows(variants: Variants) -> list[Row]:
    """The leak of later tokens at each checkpoint."""
    rows: list[Row] = [
        ("leak", "step", "as reported", "with the mask", "difference", "from the prefix",
         "difference", "95% interval"),
    ]  # fmt: skip
    for name, variant in variants.items():
        for step, leak in variant.leak.items():
            masked, prefix = leak.masked_leak, leak.prefix_leak
            rows.append(
                (
                    *(name, f"{int(step):,}", pm(leak.reported, 4)),
                    *(pm(leak.masked, 4), pm(masked, 4, sign="+") + mark(masked)),
                    pm(leak.prefix, 4),
                    *difference_cells(prefix)[:2],
                )
            )
    return rows


def _honest_rows(variants: Variants) -> list[Row]:
    """The final difference from the baseline without the leak."""
    rows: list[Row] = [("without the leak", "as reported", "with the mask", "from the prefix")]
    for name, variant in variants.items():
        last = list(variant.leak.values())[-1:]
        for leak in last:
            differences = (
                variant.difference,
                leak.masked_beside_baseline,
                leak.prefix_beside_baseline,
            )
            known = [each for each in differences if each is not None]
            if len(known) == len(differences):
                rows.append((name, *(pm(each, 4, sign="+") + mark(each) for each in known)))
    return rows


def difference_cells(difference: Difference | None, digits: int = 4) -> Row:
    """The mean, its interval, and the number of pairs; empty cells without a difference."""
    if difference is None:
        return "", "", ""
    interval = "none of one pair"
    if difference.pairs > 1:
        interval = f"{difference.low:+.{digits}f} to {difference.high:+.{digits}f}"
        interval += mark(difference)
    return pm(difference, digits, sign="+"), interval, f"{difference.pairs}"


def mark(difference: Difference | Relation) -> str:
    """A star if an interval excludes 0."""
    return " *" if difference.excludes_zero else ""


def pm(values: Spread | Difference, digits: int, sign: str = "") -> str:
    """Formats a mean and its standard deviation (none for one run); empty if not finite.

    Args:
        values: the values to show.
        digits: digits after the decimal point.
        sign: `+` also shows the sign of positive numbers.
    """
    if math.isnan(values.mean):
        return ""
    mean, deviation = f"{values.mean:{sign}.{digits}f}", values.deviation
    return mean if math.isnan(deviation) else f"{mean} ± {deviation:.{digits}f}"
