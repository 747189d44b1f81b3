"""A study's comparison as tables, for a terminal or a page."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyad.launch.output import align
from polyad.launch.study.answer import answers
from polyad.launch.study.cells import Row, difference_cells, mark, pm
from polyad.launch.study.notes import notes, tasks_note
from polyad.launch.study.training_rows import curve_rows, honest_rows, leak_rows


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
        "Routing": _routing_rows(variants, score),
        f"Routing, less that of {beside}": _routing_difference_rows(variants, score),
        f"Measures and {result['scores'][0]['title']}": _relation_rows(result),
        "What later tokens are worth": leak_rows(variants),
        "Differences without what leaks": honest_rows(variants),
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
        shown = (_score_rows, _grid_rows, curve_rows)
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
        cells = [pm(found[name], digits) if found else "" for found in of_tasks]
        over = result["variants"].get(variant)
        mean = pm(over["mean"], digits) if over else ""
        beside = difference_cells(over["difference"] if over else None, digits)
        rows.append((variant, *cells, mean, *beside))
    return rows


def _grid_rows(result: Mapping[str, Any]) -> list[Row]:
    """The validation of each point of a grid, and which point was chosen by it."""
    grids = {name: of for name, of in result["grids"].items() if name in result["variants"]}
    points = list(dict.fromkeys(point for of in grids.values() for point in of))
    # JSON has no infinity: in a result that was kept such a point is null, as an unfinished one.
    runs = [*result["runs"], *result["swept"]]
    without = {(run["variant"], run["point"]) for run in runs if run.get("validation", 0.0) is None}
    rows: list[Row] = [("grid, validation", *points)]
    for name, of in grids.items():
        best, digits = result["variants"][name]["point"], result["scores"][0]["digits"]
        cells = []
        for point in points:
            score = "" if of.get(point) is None else f"{of[point]:.{digits}f}"
            if point in of and (name, point) in without:
                score = "not finite"
            cells.append(f"{score} best" if point == best else score)
        rows.append((name, *cells))
    return rows


def _score_rows(result: Mapping[str, Any]) -> list[Row]:
    """The first two scores, and the difference of the first."""
    variants, scores = result["variants"], result["scores"]
    first, *others = scores[:2]
    titles = (score["title"] for score in scores[:2])
    rows: list[Row] = [("variant", *titles, "difference", "95% interval", "pairs")]
    for name, variant in variants.items():
        cells = [pm(variant[first["name"]], first["digits"])]
        cells += [pm(variant[score["name"]], 2) for score in others]
        rows.append((name, *cells, *difference_cells(variant["difference"], first["digits"])))
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
            cells = [pm(known[n], d) for n, d in zip(names, digits, strict=False)]
            beside = variant["differences"].get(names[0])
            rows.append((name, *cells, *difference_cells(beside, digits[0])))
    return rows


def _cost_rows(variants: Mapping[str, Any], unit: str) -> list[Row]:
    rows: list[Row] = [
        ("variant", "parameters", f"active per {unit}", f"FLOPs/{unit}", f"{unit}s/s")
    ]
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


def _routing_rows(variants: Mapping[str, Any], score: str) -> list[Row]:
    names = _routing_names(variants, score)
    rows: list[Row] = [("routing", *names)]
    for variant_name, variant in variants.items():
        known = variant["measures"]
        if any(name in known for name in names):
            cells = [pm(known[name], 3) if name in known else "" for name in names]
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
                pm(beside[name], 3, sign="+") + mark(beside[name]) if name in beside else ""
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
        interval = f"{found['low']:+.2f} to {found['high']:+.2f}{mark(found)}"
        cells = (f"{found['mean']:+.2f}", interval if several else "none of one seed")
        rows.append((name, *cells, f"{found['pairs']}"))
    return rows


def _markdown(rows: list[Row]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(rows[0]))) + "|"
    return "\n".join([head, rule, *body])
