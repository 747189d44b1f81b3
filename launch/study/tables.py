"""A study's comparison as tables, for a terminal or a page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from launch.output import align
from launch.study.answer import a_doubling, amount, answers
from launch.study.notes import notes, tasks_note

Row = tuple[str, ...]
MOST_STEPS = 8
"""Of training, in a table."""


def result_table(result: dict[str, Any], *, markdown: bool = False) -> str:
    """The comparison.

    Args:
        result: what `summarize` made, or `over_tasks`.
        markdown: for a page instead of a terminal.
    """
    if "tasks" in result:
        return tasks_table(result, markdown=markdown)
    table = _markdown if markdown else align
    parts = [
        *(table(rows) for _, rows in tables_of(result)),
        sentences(result, markdown=markdown),
        notes(result),
    ]
    return "\n\n".join(filter(None, parts))


def tables_of(result: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    """The tables of a study without tasks, or of one task.

    Args:
        result: what `summarize` made.

    Returns:
        Headings, and rows with the names of columns first.
    """
    variants, score, beside = result["variants"], result["scores"][0]["name"], result["baseline"]
    found = {
        "Scores": _score_rows(result),
        "Points of the grid": _grid_rows(result),
        "On attacked data": _attacked_rows(variants, result["scores"]),
        "Size and cost": _cost_rows(variants, result["unit"]),
        "Validation over training": curve_rows(result),
        "Lines through the differences": closing_rows(result),
        "Routing": _routing_rows(variants, score),
        f"Routing, less that of {beside}": _routing_difference_rows(variants, score),
        f"Measures and {result['scores'][0]['title']}": _relation_rows(result),
        "What later tokens are worth": _leak_rows(variants),
        "Differences without what leaks": _honest_rows(variants),
    }
    return [(heading, rows) for heading, rows in found.items() if len(rows) > 1]


def sentences(result: Mapping[str, Any], *, markdown: bool = False) -> str:
    """What the intervals come to, a line for each variant."""
    mark = "- " if markdown else ""
    return "\n".join(f"{mark}{sentence}" for sentence in answers(result))


def tasks_table(result: dict[str, Any], *, markdown: bool = False) -> str:
    """The comparison over tasks: each variant's score on each, their mean, and its difference.

    Args:
        result: what `over_tasks` made.
        markdown: for a page instead of a terminal.
    """
    table = _markdown if markdown else align
    parts = [table(over_tasks_rows(result))]
    for task, found in result["tasks"].items():
        shown = (_score_rows, _grid_rows, curve_rows, closing_rows)
        first, *others = (rows(found) for rows in shown)
        if len(first) > 1:
            parts.append(f"{task}\n{table(first)}")
        parts += [table(rows) for rows in others if len(rows) > 1]
    return "\n\n".join([*parts, sentences(result, markdown=markdown), tasks_note(result)])


def over_tasks_rows(result: Mapping[str, Any]) -> list[Row]:
    """Each variant's score on each task, their mean, and its difference.

    Args:
        result: what `over_tasks` made.
    """
    tasks, first = result["tasks"], result["scores"][0]
    name, digits = first["name"], first["digits"]
    rows: list[Row] = [
        ("variant", *tasks, "mean", "difference", "95% interval", "pairs"),
    ]
    for variant in next(iter(tasks.values()))["variants"]:
        of_tasks = [found["variants"].get(variant) for found in tasks.values()]
        cells = [_pm(found[name], digits) if found else "" for found in of_tasks]
        over = result["variants"].get(variant)
        mean = _pm(over["mean"], digits) if over else ""
        beside = _difference_cells(over["difference"] if over else None, digits)
        rows.append((variant, *cells, mean, *beside))
    return rows


def _grid_rows(result: Mapping[str, Any]) -> list[Row]:
    """The points of grids, with the validation that the best was chosen by."""
    rows: list[Row] = [("grid", "best", "validation of each point")]
    for name, points in result["grids"].items():
        if name in result["variants"]:
            digits = result["scores"][0]["digits"]
            said = ", ".join(
                f"{point}: {'none' if score is None else f'{score:.{digits}f}'}"
                for point, score in points.items()
            )
            rows.append((name, result["variants"][name]["point"], said))
    return rows


def _score_rows(result: Mapping[str, Any]) -> list[Row]:
    """The first two scores, and the difference of the first."""
    variants, scores = result["variants"], result["scores"]
    first, *others = scores[:2]
    titles = (score["title"] for score in scores[:2])
    rows: list[Row] = [("variant", *titles, "difference", "95% interval", "pairs")]
    for name, variant in variants.items():
        cells = [_pm(variant[first["name"]], first["digits"])]
        cells += [_pm(variant[score["name"]], 2) for score in others]
        rows.append((name, *cells, *_difference_cells(variant["difference"], first["digits"])))
    return rows


def _attacked_rows(variants: Mapping[str, Any], scores: Sequence[Mapping[str, Any]]) -> list[Row]:
    """As `_score_rows`, of attacked data."""
    names = [f"attacked_{score['name']}" for score in scores[:2]]
    titles = (score["title"] for score in scores[:2])
    rows: list[Row] = [("attacked", *titles, "difference", "95% interval", "pairs")]
    for name, variant in variants.items():
        known = variant["measures"]
        if all(each in known for each in names):
            digits = (scores[0]["digits"], 2)
            cells = [_pm(known[n], d) for n, d in zip(names, digits, strict=False)]
            beside = variant["differences"].get(names[0])
            rows.append((name, *cells, *_difference_cells(beside, digits[0])))
    return rows


def _difference_cells(difference: Mapping[str, Any] | None, digits: int = 4) -> Row:
    """The mean, its interval, and how many pairs."""
    if difference is None:
        return "", "", ""
    interval = "none of one pair"
    if difference["pairs"] > 1:
        interval = f"{difference['low']:+.{digits}f} to {difference['high']:+.{digits}f}"
        interval += _mark(difference)
    return _pm(difference, digits, sign="+"), interval, f"{difference['pairs']}"


def _mark(difference: Mapping[str, Any]) -> str:
    return " *" if difference["excludes_zero"] else ""


def _cost_rows(variants: Mapping[str, Any], unit: str) -> list[Row]:
    rows: list[Row] = [("variant", "parameters", f"of one {unit}", f"FLOPs/{unit}", f"{unit}s/s")]
    rows += [
        (
            name,
            f"{variant['parameters']:,}",
            f"{variant['active_parameters']:,}",
            f"{variant[f'flops_per_{unit}']:.3g}",
            f"{variant[f'{unit}s_per_second']['mean']:,.0f}",
        )
        for name, variant in variants.items()
    ]
    return rows


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
    return f"{difference['mean']:+.4f}" + _mark(difference)


def closing_rows(result: Mapping[str, Any]) -> list[Row]:
    """Lines through differences over the logarithm of what was seen."""
    units = f"{result['unit']}s"
    rows: list[Row] = [
        ("closing", "line at the end", "95% interval", "a doubling", "95% interval",
         "zero after", "95% interval", "seeds"),
    ]  # fmt: skip
    for name, variant in result["variants"].items():
        if (found := variant["closing"]) is not None:
            zero = found["crossing"]
            at = [amount(zero[key]) for key in ("units", "low", "high")] if zero else []
            where = (at[0], f"{at[1]} to {at[2]} {units}") if at else ("", "none is supported")
            end, doubling = found["at_end"], a_doubling(found)
            cells = (*_mean_cells(end), *_mean_cells(doubling), *where, f"{end['pairs']}")
            rows.append((name, *cells))
    return rows


def _mean_cells(found: Mapping[str, Any]) -> Row:
    interval = f"{found['low']:+.4f} to {found['high']:+.4f}{_mark(found)}"
    return f"{found['mean']:+.4f}", interval


def _routing_rows(variants: Mapping[str, Any], score: str) -> list[Row]:
    names = _routing_names(variants, score)
    rows: list[Row] = [("routing", *names)]
    for variant_name, variant in variants.items():
        known = variant["measures"]
        if any(name in known for name in names):
            cells = [_pm(known[name], 3) if name in known else "" for name in names]
            rows.append((variant_name, *cells))
    return rows


def _routing_difference_rows(variants: Mapping[str, Any], score: str) -> list[Row]:
    """What routers did, beside the baseline's; nothing if the baseline does not route."""
    beside_all = [variant["differences"] for variant in variants.values()]
    names = [name for name in _routing_names(variants, score) if any(name in b for b in beside_all)]
    rows: list[Row] = [("routing beside", *names)]
    for variant_name, variant in variants.items():
        beside = variant["differences"]
        if any(name in beside for name in names):
            cells = [
                _pm(beside[name], 3, sign="+") + _mark(beside[name]) if name in beside else ""
                for name in names
            ]
            rows.append((variant_name, *cells))
    return rows


def _routing_names(variants: Mapping[str, Any], score: str) -> list[str]:
    """What routers did; no line for what was 0 with all, as tokens dropped are mostly."""
    known = [variant["measures"] for variant in variants.values()]
    names = {
        name: None
        for each in known
        for name in each
        if name != score and not name.startswith("attacked_")
    }
    return [name for name in names if any(each[name]["mean"] for each in known if name in each)]


def _relation_rows(result: Mapping[str, Any]) -> list[Row]:
    """Rank correlations of measures with the score, the strongest first."""
    title = result["scores"][0]["title"]
    rows: list[Row] = [(f"with {title}", "rank correlation", "95% interval", "seeds")]
    known = result["relations"].items()
    for name, found in sorted(known, key=lambda item: -abs(item[1]["mean"])):
        several = found["pairs"] > 1
        interval = f"{found['low']:+.2f} to {found['high']:+.2f}{_mark(found)}"
        cells = (f"{found['mean']:+.2f}", interval if several else "none of one seed")
        rows.append((name, *cells, f"{found['pairs']}"))
    return rows


def _leak_rows(variants: Mapping[str, Any]) -> list[Row]:
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
                    *(name, f"{int(step):,}", _pm(leak["reported"], 4)),
                    *(_pm(leak["masked"], 4), _pm(masked, 4, sign="+") + _mark(masked)),
                    _pm(leak["prefix"], 4),
                    *_difference_cells(prefix)[:2],
                )
            )
    return rows


def _honest_rows(variants: Mapping[str, Any]) -> list[Row]:
    """What is left of the difference to the baseline without what leaks, at the end."""
    rows: list[Row] = [("without the leak", "as reported", "with the mask", "from the prefix")]
    for name, variant in variants.items():
        last = list(variant["leak"].values())[-1:]
        for leak in last:
            honest = [leak[f"{way}_beside_baseline"] for way in ("masked", "prefix")]
            if variant["difference"] is not None and all(honest):
                cells = [variant["difference"], *honest]
                rows.append((name, *(_pm(c, 4, sign="+") + _mark(c) for c in cells)))
    return rows


def _pm(values: Mapping[str, Any], digits: int, sign: str = "") -> str:
    mean, deviation = f"{values['mean']:{sign}.{digits}f}", values["deviation"]
    return mean if math.isnan(deviation) else f"{mean} ± {deviation:.{digits}f}"


def _markdown(rows: list[Row]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(rows[0]))) + "|"
    return "\n".join([head, rule, *body])
