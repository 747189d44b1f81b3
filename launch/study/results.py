"""What the results of finished runs come to: means, spread, differences of pairs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from polyad.launch.study.curves import curve
from polyad.launch.study.relations import relations
from polyad.train.config.environment import describe_environment
from polyad.train.errors import RunError
from polyad.train.study.paired import CONFIDENCE, paired_difference, spread

Run = Mapping[str, Any]
"""The result of a finished run, with what was measured of it."""
BySeed = Mapping[int, Run]


def summarize(
    plan: Mapping[str, Any], results: Sequence[Run], chosen: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Compares variants over the seeds that are finished.

    Args:
        plan: of the study: variants with their sizes, baseline and seeds.
        results: of finished runs, in the order of the study.
        chosen: the best point of each variant for which it is known; None: no variant has a grid.

    Returns:
        JSON values: for each variant with a finished run its sizes, means and spread over seeds,
        and the difference to the baseline over the seeds that both have finished. `runs` are those
        that are compared, `swept` those of other points of a grid; `relations` as the function of
        that name.

    Raises:
        RunError: runs were scored on different tokens.
    """
    units, scores = f"{plan['unit']}s", [score["name"] for score in plan["scores"]]
    known = (result[f"{units}_scored"] for result in results)
    scored = {each for each in known if each is not None}  # None: a point that diverged
    if len(scored) > 1:
        raise RunError(f"runs were scored on different numbers of {units}: {sorted(scored)}")
    averaged = [*scores, "training_loss", f"{units}_per_second"]
    points = dict.fromkeys(plan["groups"], "") if chosen is None else chosen
    compared = [result for result in results if points.get(result["variant"]) == result["point"]]
    by_variant = {
        name: {result["seed"]: result for result in compared if result["variant"] == name}
        for name in points
    }
    baseline = by_variant.get(plan["baseline"], {})
    environment = describe_environment(1)
    return {
        "study": plan["study"],
        "folder": plan["folder"],
        "baseline": plan["baseline"],
        "unit": plan["unit"],
        "scores": plan["scores"],
        "validation_score": plan["validation_score"],
        "higher_is_better": plan["higher_is_better"],
        "seeds": plan["seeds"],
        "swept_seeds": plan["swept_seeds"],
        "finished": len(results) == plan["num_runs"],
        f"{units}_scored": min(scored, default=0),
        "confidence": CONFIDENCE,
        "variants": {
            name: plan["variants"][f"{name}/{points[name]}".rstrip("/")]
            | {"point": points[name]}
            | _compared(runs, baseline, averaged)
            | {"curve": curve(runs, None if name == plan["baseline"] else baseline, units)}
            for name, runs in by_variant.items()
            if runs
        },
        "relations": _relations(by_variant, scores[0]),
        "runs": compared,
        "swept": [result for result in results if result not in compared],
        "environment": {
            key: environment[key] for key in ("git_commit", "versions", "platform", "gpus")
        },
    }


def over_tasks(results: Mapping[str, Mapping[str, Any]], tasks: Sequence[str]) -> dict[str, Any]:
    """Compares variants by the mean of their scores over tasks.

    Args:
        results: of each task that was begun, as `summarize` makes them.
        tasks: the names of all, in the order of the study.

    Returns:
        JSON values: `tasks` as they are, and of each variant that is finished on all of them the
        mean of the first score over tasks: its spread over seeds, and the difference to the
        baseline's of the same seeds.
    """
    first = results[tasks[0]]
    score, baseline = first["scores"][0]["name"], first["baseline"]
    of_seeds = {
        name: found
        for name in first["variants"]
        if (found := _means_over_tasks([results.get(task) for task in tasks], name, score))
    }
    variants, theirs = {}, of_seeds.get(baseline, {})
    for name, means in of_seeds.items():
        pairs = {seed: (mean, theirs[seed]) for seed, mean in means.items() if seed in theirs}
        variants[name] = {
            "mean": spread(list(means.values()))._asdict() | {"values": list(means.values())},
            "difference": _paired(pairs) if name != baseline and pairs else None,
        }
    return {
        **{key: first[key] for key in ("study", "baseline", "unit", "scores", "seeds")},
        "higher_is_better": first["higher_is_better"],
        "about": first.get("about"),
        "finished": len(results) == len(tasks) and all(r["finished"] for r in results.values()),
        "variants": variants,
        "tasks": dict(results),
    }


def _means_over_tasks(
    results: Sequence[Mapping[str, Any] | None], variant: str, score: str
) -> dict[int, float]:
    """By seed the mean over tasks; of seeds that are finished on all."""
    by_task = [
        {run["seed"]: run[score] for run in found["runs"] if run["variant"] == variant}
        for found in results
        if found is not None
    ]
    if len(by_task) < len(results):
        return {}
    seeds = [seed for seed in by_task[0] if all(seed in known for known in by_task)]
    return {seed: statistics.fmean(known[seed] for known in by_task) for seed in seeds}


def _relations(by_variant: Mapping[str, BySeed], score: str) -> dict[str, dict[str, Any]]:
    """Of the measures of all variants with the score."""
    seeds = {seed: None for runs in by_variant.values() for seed in runs}
    measured = {
        seed: {n: measures(runs[seed], score) for n, runs in by_variant.items() if seed in runs}
        for seed in seeds
    }
    return relations(measured, score)


def _compared(runs: BySeed, baseline: BySeed, averaged: Sequence[str]) -> dict[str, Any]:
    """Of a variant; the first of what is averaged is the score to look at."""
    score = averaged[0]
    beside = {} if runs is baseline else _differences(runs, baseline, score)
    return {
        **_means(list(runs.values()), averaged),
        "difference": beside.get(score),
        "differences": beside,
        "leak": _leaks(runs, baseline),
    }


def _means(runs: Sequence[Run], averaged: Sequence[str]) -> dict[str, Any]:
    means: dict[str, Any] = {"seeds": [run["seed"] for run in runs]}
    for key in averaged:
        means[key] = spread([run[key] for run in runs if run[key] is not None])._asdict()
    return means | {
        "routing": {
            name: _spread_of(runs, name, averaged[0])
            for name in {name: None for run in runs for name in run["routing"]}
        },
        "measures": {
            name: _spread_of(runs, name, averaged[0])
            for name in {n: None for r in runs for n in measures(r, averaged[0])}
        },
    }


def measures(run: Run, score: str = "loss") -> dict[str, float]:
    """All numbers of a run by which variants are compared.

    Args:
        run: a result, with what was measured of it.
        score: the one to look at.

    Returns:
        That score; those of attacked data, as `attacked_loss`; what routers did, by name;
        polysemanticity; `changed_first` and `changed_set`, the fluctuation; `head_changes`, how
        often the head of an attention graph changed. What is not known, or not finite, is left out.
    """
    found = {score: run[score], **run["routing"]}
    for name, value in run.get("attack", {}).items():
        if name in run and not name.endswith("_scored"):
            found[f"attacked_{name}"] = value
    found |= run.get("specialization", {}) | run.get("knockout", {})
    if fluctuation := run.get("fluctuation"):
        found |= {"changed_first": fluctuation["top1"], "changed_set": fluctuation["set"]}
    if "head_changes" in run:
        found["head_changes"] = run["head_changes"]
    return {name: value for name, value in found.items() if value is not None}


def _spread_of(runs: Sequence[Run], name: str, score: str) -> dict[str, Any]:
    return spread([m[name] for run in runs if name in (m := measures(run, score))])._asdict()


def _differences(runs: BySeed, baseline: BySeed, score: str) -> dict[str, Any]:
    """Of every measure, over the seeds for which both know it."""
    of_runs, of_baseline = (
        {seed: measures(run, score) for seed, run in of.items()} for of in (runs, baseline)
    )
    names = {name: None for each in of_runs.values() for name in each}
    found = {}
    for name in names:
        ours, theirs = (
            {seed: each[name] for seed, each in known.items() if name in each}
            for known in (of_runs, of_baseline)
        )
        pairs = {seed: (ours[seed], theirs[seed]) for seed in ours if seed in theirs}
        if pairs:
            found[name] = _paired(pairs)
    return found


def _paired(pairs: Mapping[int, tuple[float, float]]) -> dict[str, Any]:
    """One less the other, by seed."""
    ours, theirs = ([pair[i] for pair in pairs.values()] for i in (0, 1))
    difference = paired_difference(ours, theirs)
    return difference._asdict() | {
        "seeds": list(pairs),
        "differences": [one - other for one, other in zip(ours, theirs, strict=True)],
        "excludes_zero": difference.excludes_zero,
    }


def _leaks(runs: BySeed, baseline: BySeed) -> dict[str, Any]:
    """What later tokens are worth to a variant, by step, and what is left beside the baseline.

    The loss from the prefix is that of the split with the difference of the sample added, which
    spreads far less than the sample's own loss.
    """
    steps = sorted({int(step) for run in runs.values() for step in run.get("leak", {})})
    return {f"{step}": _leak(runs, baseline, f"{step}") for step in steps}


def _leak(runs: BySeed, baseline: BySeed, step: str) -> dict[str, Any]:
    known = {seed: run["leak"][step] for seed, run in runs.items() if step in run.get("leak", {})}
    reported = {seed: leak["loss"] for seed, leak in known.items()}
    without = {
        "masked": {seed: leak["masked_loss"] for seed, leak in known.items()},
        "prefix": {s: leak["loss"] + leak["prefix_difference"] for s, leak in known.items()},
    }
    errors = [leak["prefix_standard_error"] for leak in known.values()]
    found: dict[str, Any] = {
        "seeds": list(known),
        "reported": spread(list(reported.values()))._asdict(),
        "prefix_tokens": min(leak["prefix_tokens"] for leak in known.values()),
        # Root mean square: of one run's sample.
        "prefix_standard_error": math.sqrt(statistics.fmean(error**2 for error in errors)),
    }
    # Of a checkpoint on the way a baseline that does not leak has no loss.
    beside = {
        seed: baseline[seed] for seed in known
        if seed in baseline and runs[seed]["step"] == int(step)
    }  # fmt: skip
    for name, losses in without.items():
        theirs = {
            seed: loss for seed, run in beside.items()
            if (loss := _without_later(run, step, name)) is not None
        }  # fmt: skip
        found[name] = spread(list(losses.values()))._asdict()
        found[f"{name}_leak"] = _paired({s: (losses[s], reported[s]) for s in losses})
        found[f"{name}_beside_baseline"] = (
            _paired({s: (losses[s], theirs[s]) for s in theirs}) if theirs else None
        )
    return found


def _without_later(run: Run, step: str, way: str) -> float | None:
    """The loss of a baseline's run without what later tokens tell; None: it was not measured."""
    if (leak := run.get("leak", {}).get(step)) is not None:
        masked, prefix = leak["masked_loss"], leak["loss"] + leak["prefix_difference"]
        return float(masked if way == "masked" else prefix)
    return None if run.get("leaks") else float(run["loss"])
