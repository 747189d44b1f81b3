"""A study's comparison as tables, for a terminal or a page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from launch.output import align

Row = tuple[str, ...]


def result_table(result: dict[str, Any], *, markdown: bool = False) -> str:
    """The comparison.

    Args:
        result: what `summarize` made, or `over_tasks`.
        markdown: for a page instead of a terminal.
    """
    if "tasks" in result:
        return tasks_table(result, markdown=markdown)
    table = _markdown if markdown else align
    variants, score = result["variants"], result["scores"][0]["name"]
    found = [
        _score_rows(variants, result["scores"]),
        _grid_rows(result),
        _attacked_rows(variants, result["scores"]),
        _cost_rows(variants, result["unit"]),
        _routing_rows(variants, score),
        _routing_difference_rows(variants, score),
        _leak_rows(variants),
        _honest_rows(variants),
    ]
    return "\n\n".join([*(table(rows) for rows in found if len(rows) > 1), _notes(result)])


def tasks_table(result: dict[str, Any], *, markdown: bool = False) -> str:
    """The comparison over tasks: each variant's score on each, their mean, and its difference.

    Args:
        result: what `over_tasks` made.
        markdown: for a page instead of a terminal.
    """
    table = _markdown if markdown else align
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
    parts = [table(rows)]
    for task, found in tasks.items():
        if len(differences := _score_rows(found["variants"], found["scores"])) > 1:
            parts.append(f"{task}\n{table(differences)}")
        if len(grids := _grid_rows(found)) > 1:
            parts.append(table(grids))
    baseline = result["baseline"]
    return "\n\n".join(parts) + (
        f"\n\nmean ± standard deviation over seeds, of the {first['title']} on the "
        f"{next(iter(tasks.values()))['split']} split of each task\ndifference: the mean over "
        f"tasks less {baseline}'s of the same seed; interval: of its mean, by the t distribution "
        f"over pairs; * leaves 0 out"
    )


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


def _score_rows(variants: Mapping[str, Any], scores: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The first two scores, and the difference of the first."""
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


def _notes(result: Mapping[str, Any]) -> str:
    variants, name = result["variants"].values(), result["baseline"]
    counts = {len(variant["seeds"]) for variant in variants}
    seeds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    score, units = result["scores"][0], f"{result['unit']}s"
    in_unit = f" in {score['unit']}" if score["unit"] else ""
    notes = []
    if result["grids"]:
        swept = ", ".join(str(seed) for seed in result["swept_seeds"])
        notes.append(f"grid: chosen by the mean on the validation split, seeds {swept}")
    notes += [
        f"mean ± standard deviation over {seeds} seeds; {score['title']}{in_unit} on the "
        f"{result[f'{units}_scored']:,} {units} of the {result['split']} split",
        f"difference: {score['title']} less {name}'s of the same seed, which saw the same batches; "
        f"interval: of its mean, by the t distribution over pairs; * leaves 0 out",
        f"{units}/s: of the median step, and of what else the machine did; routing: over all "
        f"layers and the last 10 steps",
    ]
    if any("changed_set" in variant["measures"] for variant in variants):
        apart = {run["fluctuation"]["steps"] for run in result["runs"] if "fluctuation" in run}
        steps = " or ".join(f"{step:g}" for step in sorted(apart))
        notes.append(
            f"changed: share of the probe set's tokens with another first expert, or other "
            f"experts, than {steps} steps before the end"
        )
    if any(f"attacked_{score['name']}" in variant["measures"] for variant in variants):
        rate, seed = result["attack"]["rate"], result["attack"]["seed"]
        how = "words of the text became AAA at a rate of"
        if result["unit"] == "image":
            how = "pixels from 0 to 1 had Gaussian noise of"
        notes.append(f"attacked: {how} {rate:g} (seed {seed})")
    if any("polysemanticity" in variant["measures"] for variant in variants):
        notes.append(
            "polysemanticity: 0 where each expert matters to one class alone, mean over experts "
            "that matter to any; experts_that_matter: their share"
        )
    if any("entropy_bits" in variant["measures"] for variant in variants):
        notes.append(
            "entropy_bits H_s, of a token's probabilities; usage_entropy_bits H_u, of their mean; "
            "information_bits I(E; Y), of experts and classes, or classes of tokens; experts_used: "
            "with 1% of all or more; expert_cosine, expert_cka: how alike outputs of two are"
        )
    leaks = [leak for variant in variants for leak in variant["leak"].values()]
    if leaks:
        tokens = sorted({leak["prefix_tokens"] for leak in leaks})
        error = max(leak["prefix_standard_error"] for leak in leaks)
        notes.append(
            f"leak: the same weights on the same tokens, where no token sees later ones: with the "
            f"mask, the whole split; from the prefix, the text cut before each of a sample of "
            f"{tokens[0]:,} tokens a run, whose own standard error is at most {error:.4f}"
        )
    return "\n".join(notes)


def _markdown(rows: list[Row]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(rows[0]))) + "|"
    return "\n".join([head, rule, *body])
