"""Statistics over the results of finished runs: means, spread, paired differences.

Runs with one seed read the same batches, so differences are paired: at the end of training, and at
each step at which both were validated. Likewise the rank correlation between a measure and the
score over variants is computed within each seed: its mean over seeds has an interval; a single
correlation does not.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scipy.stats import spearmanr

from polyad.launch.study.result import (
    Difference,
    Leak,
    MeanOverTasks,
    Relation,
    RunResult,
    RunValidation,
    Spread,
    StudyFacts,
    StudyPlan,
    StudyResult,
    TasksResult,
    Validation,
    VariantOverTasks,
    VariantResult,
    VariantSize,
)
from polyad.train.config.environment import describe_environment
from polyad.train.errors import RunError
from polyad.train.study import paired
from polyad.train.study.paired import CONFIDENCE, interval

LEAST = 5
"""Minimum number of variants for a rank correlation: with four, even perfect order is likely by
chance."""

BySeed = Mapping[int, RunResult]
Measures = Mapping[int, Mapping[str, Mapping[str, float]]]
"""The measures of runs by name, for each seed and variant."""


def summarize(
    plan: StudyPlan, results: Sequence[RunResult], chosen: Mapping[str, str] | None = None
) -> StudyResult:
    """Compares variants over the finished seeds.

    Args:
        plan: the study's plan.
        results: results of finished runs, in the study's order.
        chosen: the best point of each variant, if known; None: no variant has a grid.

    Returns:
        The comparison of variants with a finished run, without facts about the study itself.

    Raises:
        RunError: runs were scored on different tokens.
    """
    known = (result.scored for result in results)
    scored = {each for each in known if each is not None}  # None: a diverged point
    if len(scored) > 1:
        raise RunError(f"runs were scored on different numbers of {plan.unit}s: {sorted(scored)}")
    points = dict.fromkeys(plan.groups, "") if chosen is None else chosen
    compared = [result for result in results if points.get(result.variant) == result.point]
    by_variant = {
        name: {result.seed: result for result in compared if result.variant == name}
        for name in points
    }
    environment = describe_environment(1)
    return StudyResult(
        **{name: getattr(plan, name) for name in StudyFacts.model_fields},
        finished=len(results) == plan.num_runs,
        scored=min(scored, default=0),
        confidence=CONFIDENCE,
        variants={
            name: _variant(plan, name, points[name], by_variant)
            for name, runs in by_variant.items()
            if runs
        },
        relations=_relations(by_variant, plan.scores[0].name),
        runs=compared,
        swept=[result for result in results if result not in compared],
        environment={
            key: environment[key] for key in ("git_commit", "versions", "platform", "gpus")
        },
    )


def _variant(
    plan: StudyPlan, name: str, point: str, by_variant: Mapping[str, BySeed]
) -> VariantResult:
    """The result of one variant, from its runs and the baseline's."""
    size = plan.variants[f"{name}/{point}".rstrip("/")]
    scores = [score.name for score in plan.scores]
    by_seed, baseline = by_variant[name], by_variant.get(plan.baseline, {})
    is_baseline = name == plan.baseline
    differences = {} if is_baseline else _differences(by_seed, baseline, scores[0])
    runs = list(by_seed.values())
    measured = [measures(run, scores[0]) for run in runs]
    return VariantResult(
        **{name: getattr(size, name) for name in VariantSize.model_fields},
        point=point,
        seeds=[run.seed for run in runs],
        scores={score: _spread([run.scores[score] for run in runs]) for score in scores},
        training_loss=_spread([run.training_loss for run in runs]),
        rate=_spread([run.rate for run in runs]),
        routing={key: _spread_of(measured, key) for key in _keys(run.routing for run in runs)},
        measures={key: _spread_of(measured, key) for key in _keys(measured)},
        difference=differences.get(scores[0]),
        differences=differences,
        leak=_leaks(by_seed, baseline),
        curve=curve(by_seed, None if is_baseline else baseline),
    )


def _keys(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of all, in their order."""
    return list({key: None for each in found for key in each})


def _spread_of(runs: Sequence[Mapping[str, Any]], key: str) -> Spread:
    """A number of the runs that have it."""
    return _spread([run.get(key) for run in runs])


def _spread(values: Sequence[float | None]) -> Spread:
    """The spread of those that are known."""
    return Spread(**paired.spread([each for each in values if each is not None])._asdict())


def curve(runs: BySeed, baseline: BySeed | None) -> list[Validation]:
    """Returns a variant's validations during training, by step.

    Args:
        runs: the variant's runs by seed.
        baseline: the baseline's runs, whose steps are used; None: this is the baseline.

    Returns:
        Validations; empty if runs were validated only at their end.
    """
    pairs = _validated(runs, runs if baseline is None else baseline)
    steps = sorted({step for of_seed in pairs.values() for step in of_seed})
    found = []
    for step in steps if len(steps) > 1 else ():
        known = {seed: of_seed[step] for seed, of_seed in pairs.items() if step in of_seed}
        scores = {seed: (ours, theirs) for seed, (_, ours, theirs) in known.items()}
        found.append(
            Validation(
                step=step,
                seen=round(statistics.fmean(seen for seen, _, _ in known.values())),
                score=_spread([ours for ours, _ in scores.values()]),
                difference=None if baseline is None else _paired(scores),
            )
        )
    return found


def _validated(runs: BySeed, baseline: BySeed) -> dict[int, dict[int, tuple[int, float, float]]]:
    """Units seen and both scores, by seed and step, where both runs have them."""
    found = {}
    for seed in runs:
        ours, theirs = (
            {each.step: each for each in _validations(by_seed, seed)}
            for by_seed in (runs, baseline)
        )
        found[seed] = {
            step: (each.seen, each.score, theirs[step].score)
            for step, each in ours.items()
            if step in theirs
        }
    return found


def _validations(runs: BySeed, seed: int) -> list[RunValidation]:
    """The validations during training of the run with a seed."""
    return (runs[seed].measured.validations or []) if seed in runs else []


def over_tasks(results: Mapping[str, StudyResult], tasks: Sequence[str]) -> TasksResult:
    """Compares variants by the mean of their first scores over tasks.

    Args:
        results: results of each started task.
        tasks: the names of all tasks, in the study's order.

    Returns:
        The comparison of variants that are finished on all tasks.
    """
    first = results[tasks[0]]
    score, baseline = first.scores[0].name, first.baseline
    of_seeds = {
        name: found
        for name in first.variants
        if (found := _means_over_tasks([results.get(task) for task in tasks], name, score))
    }
    variants, theirs = {}, of_seeds.get(baseline, {})
    for name, means in of_seeds.items():
        pairs = {seed: (mean, theirs[seed]) for seed, mean in means.items() if seed in theirs}
        values = list(means.values())
        variants[name] = VariantOverTasks(
            mean=MeanOverTasks(**paired.spread(values)._asdict(), values=values),
            difference=_paired(pairs) if name != baseline and pairs else None,
        )
    return TasksResult(
        study=first.study,
        baseline=baseline,
        unit=first.unit,
        scores=first.scores,
        seeds=first.seeds,
        higher_is_better=first.higher_is_better,
        about=first.about,
        finished=len(results) == len(tasks) and all(r.finished for r in results.values()),
        variants=variants,
        tasks=dict(results),
    )


def _means_over_tasks(
    results: Sequence[StudyResult | None], variant: str, score: str
) -> dict[int, float]:
    """The mean over tasks of each seed that is finished on all of them."""
    by_task = [
        {run.seed: run.scores[score] for run in found.runs if run.variant == variant}
        for found in results
        if found is not None
    ]
    if len(by_task) < len(results):
        return {}
    found = {}
    for seed in by_task[0]:
        scores = [known.get(seed) for known in by_task]
        finite = [each for each in scores if each is not None]
        if len(finite) == len(scores):
            found[seed] = statistics.fmean(finite)
    return found


def _relations(by_variant: Mapping[str, BySeed], score: str) -> dict[str, Relation]:
    """Relations of all variants' measures to the score."""
    seeds = {seed: None for runs in by_variant.values() for seed in runs}
    measured = {
        seed: {n: measures(runs[seed], score) for n, runs in by_variant.items() if seed in runs}
        for seed in seeds
    }
    return relations(measured, score)


def relations(measured: Measures, score: str) -> dict[str, Relation]:
    """Correlates every measure with the score, within each seed.

    Args:
        measured: measures of the compared runs, including the score.
        score: the score to use.

    Returns:
        By measure, Spearman's rank correlation for each seed, their mean and its interval by the t
        distribution over seeds, clipped to -1 to 1. Only measures that at least `LEAST` variants
        have, and that are not equal for all. Seeds with unfinished runs of these variants are left
        out.
    """
    names = {name: None for known in measured.values() for each in known.values() for name in each}
    found = {name: _relation(measured, name, score) for name in names if name != score}
    return {name: relation for name, relation in found.items() if relation is not None}


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Spearman's rank correlation; ties get the mean of their ranks.

    Args:
        ours: one number of each variant.
        theirs: the other, in the same order.

    Returns:
        From -1 to 1; NaN if one of them is constant, or not finite.
    """
    alike = min(ours) == max(ours) or min(theirs) == max(theirs)
    return math.nan if alike else float(spearmanr(ours, theirs).statistic)


def _relation(measured: Measures, name: str, score: str) -> Relation | None:
    """The correlation of one measure; None if too few variants have it."""
    having = {v for known in measured.values() for v, each in known.items() if name in each}
    if len(having) < LEAST:
        return None
    values = {}
    for seed, known in measured.items():
        pairs = [(known[v][name], known[v][score]) for v in known if name in known[v]]
        if len(pairs) == len(having):
            correlation = rank_correlation(*zip(*pairs, strict=True))
            if math.isfinite(correlation):
                values[seed] = correlation
    if not values:
        return None
    mean = interval(list(values.values()))
    return Relation(
        mean=mean.mean,
        deviation=mean.deviation,
        low=max(mean.low, -1.0),
        high=min(mean.high, 1.0),
        pairs=mean.pairs,
        variants=len(having),
        seeds=list(values),
        values=list(values.values()),
        excludes_zero=mean.excludes_zero,
    )


def measures(run: RunResult, score: str = "loss") -> dict[str, float]:
    """Returns all numbers of a run by which variants are compared.

    Args:
        run: a result with its measures.
        score: the score to use.

    Returns:
        That score; scores on attacked data, such as `attacked_loss`; routing statistics by name;
        polysemanticity; `changed_first` and `changed_set`, the fluctuation; `head_changes`, how
        often the head of an attention graph changed. Unknown or non-finite values are left out.
    """
    found, known = {score: run.scores[score], **run.routing}, run.measured
    for name, value in (known.attack or {}).items():
        if name in run.scores:
            found[f"attacked_{name}"] = value
    for numbers in known.experts.values():
        found |= numbers
    if (changed := known.fluctuation) is not None:
        found |= {"changed_first": changed.top1, "changed_set": changed.set}
    found["head_changes"] = known.head_changes
    return {name: value for name, value in found.items() if value is not None}


def _differences(runs: BySeed, baseline: BySeed, score: str) -> dict[str, Difference]:
    """The differences of every measure, over the seeds for which both have it."""
    of_runs, of_baseline = (
        {seed: measures(run, score) for seed, run in of.items()} for of in (runs, baseline)
    )
    found = {}
    for name in _keys(of_runs.values()):
        ours, theirs = (
            {seed: each[name] for seed, each in known.items() if name in each}
            for known in (of_runs, of_baseline)
        )
        pairs = {seed: (ours[seed], theirs[seed]) for seed in ours if seed in theirs}
        if pairs:
            found[name] = _paired(pairs)
    return found


def _paired(pairs: Mapping[int, tuple[float, float]]) -> Difference:
    """One less the other, by seed."""
    ours, theirs = ([pair[i] for pair in pairs.values()] for i in (0, 1))
    difference = paired.paired_difference(ours, theirs)
    return Difference(
        **difference._asdict(),
        seeds=list(pairs),
        differences=[one - other for one, other in zip(ours, theirs, strict=True)],
        excludes_zero=difference.excludes_zero,
    )


def _leaks(runs: BySeed, baseline: BySeed) -> dict[str, Leak]:
    """The leak of later tokens for a variant, by step, and the difference from the baseline without
    it.

    The loss from the prefix is the split's loss plus the sample's difference, which varies far less
    than the sample's own loss.
    """
    steps = sorted({int(step) for run in runs.values() for step in run.measured.leak})
    return {f"{step}": _leak(runs, baseline, f"{step}") for step in steps}


def _leak(runs: BySeed, baseline: BySeed, step: str) -> Leak:
    leaks = {seed: run.measured.leak for seed, run in runs.items()}
    known = {seed: leak[step] for seed, leak in leaks.items() if step in leak}
    reported = {seed: leak.loss for seed, leak in known.items()}
    masked = {seed: leak.masked_loss for seed, leak in known.items()}
    prefix = {seed: leak.loss_from_prefix for seed, leak in known.items()}
    errors = [leak.prefix_standard_error for leak in known.values()]
    # A baseline without a leak has no loss at intermediate checkpoints.
    beside = {
        seed: baseline[seed] for seed in known
        if seed in baseline and runs[seed].step == int(step)
    }  # fmt: skip

    def less_reported(losses: Mapping[int, float]) -> Difference:
        return _paired({seed: (losses[seed], reported[seed]) for seed in losses})

    def less_baseline(losses: Mapping[int, float], way: str) -> Difference | None:
        theirs = {
            seed: loss for seed, run in beside.items()
            if (loss := _without_later(run, step, way)) is not None
        }  # fmt: skip
        pairs = {seed: (losses[seed], loss) for seed, loss in theirs.items()}
        return _paired(pairs) if pairs else None

    return Leak(
        seeds=list(known),
        reported=_spread(list(reported.values())),
        prefix_tokens=min(leak.prefix_tokens for leak in known.values()),
        # Root mean square: that of one run's sample.
        prefix_standard_error=math.sqrt(statistics.fmean(error**2 for error in errors)),
        masked=_spread(list(masked.values())),
        masked_leak=less_reported(masked),
        masked_beside_baseline=less_baseline(masked, "masked"),
        prefix=_spread(list(prefix.values())),
        prefix_leak=less_reported(prefix),
        prefix_beside_baseline=less_baseline(prefix, "prefix"),
    )


def _without_later(run: RunResult, step: str, way: str) -> float | None:
    """The loss of a baseline's run without later tokens; None if not measured."""
    if (leak := run.measured.leak.get(step)) is not None:
        return leak.masked_loss if way == "masked" else leak.loss_from_prefix
    return None if run.measured.leaks else run.scores["loss"]
