"""A study's conclusions: a sentence for each variant, derived only from its interval; and notes
below tables.

A sentence says better or worse if the interval of the difference excludes 0, and otherwise that no
difference is shown. One pair has no interval, so there is no conclusion. Results for and against a
method are worded alike.
"""

import math

from polyad.launch.study.result import (
    Difference,
    Result,
    Score,
    StudyResult,
    TasksResult,
    VariantResult,
)

UNCORRECTED = (
    "The intervals are not corrected for multiple comparisons: out of twenty variants without a "
    "true difference, one would be called better or worse on average."
)

MEASURES = {
    "polysemanticity": "polysemanticity: 0 if each expert matters for only one class, averaged "
    "over experts that matter for any; experts_that_matter: the share of experts that matter for "
    "any class",
    "effective_classes_characters": "experts_that_matter: share of experts without which the loss "
    "on some token class rises beyond noise; effective_classes: for how many classes these experts "
    "matter, from 1 (only one) to the number of classes (all equally), weighted by the rise in "
    "loss without each",
    "entropy_bits": "entropy_bits: H_s, entropy of a token's routing probabilities; "
    "usage_entropy_bits: H_u, entropy of their mean; information_bits: I(E; Y), mutual information "
    "of experts and classes (for text, token classes); experts_used: experts with at least 1% of "
    "the tokens; expert_cosine, expert_cka: similarity of the outputs of two experts",
}
"""Notes below tables with a measure, by its name."""


def answers(result: Result) -> list[str]:
    """A sentence about the first score for each variant except the baseline; with tasks, about its
    mean over them."""
    if isinstance(result, TasksResult):
        title = f"mean {result.scores[0].title} over tasks"
        return [
            _answer(result, name, each.difference, title)
            for name, each in result.variants.items()
            if name != result.baseline
        ]
    title = result.scores[0].title
    return [
        said
        for name, each in result.variants.items()
        if name != result.baseline
        for said in (
            _answer(result, name, each.difference, title, each.point, leaks=bool(each.leak)),
            *_without_leak(result, name, each),
        )
    ]


def amount(value: float) -> str:
    """Formats a number of tokens or images, such as 410k or 2.62M."""
    if value < 1e4:
        return f"{value:,.0f}"
    value = float(f"{value:.3g}")
    if value >= 1e15:
        return "more than 1e15"
    power = int(math.log10(value) / 3)
    return f"{value / 1000**power:.3g}{' kMBT'[power]}"


def _answer(
    result: Result,
    name: str,
    found: Difference | None,
    title: str,
    point: str = "",
    *,
    leaks: bool = False,
) -> str:
    leaking, baseline = result.about.leaking, result.baseline
    named = name + (f" at {point}" if point else "")
    if leaks or name in leaking:
        named += ", in which tokens see later tokens,"
    theirs = f"{baseline}, in which tokens see later tokens" if baseline in leaking else baseline
    if found is None:
        return f"{named}: not yet compared with {baseline}, no pair of runs is finished"
    return f"{_verdict(result, named, theirs, found)}: {_numbers(found, title, result.scores[0])}"


def _verdict(result: Result, named: str, baseline: str, found: Difference) -> str:
    if found.pairs == 1:
        return f"{named} compared with {baseline}: one pair of runs, so there is no interval"
    if not found.excludes_zero:
        return f"no significant difference between {named} and {baseline}"
    better = (found.mean > 0) == result.higher_is_better
    return f"{named} is {'better' if better else 'worse'} than {baseline}"


def _numbers(found: Difference, title: str, score: Score) -> str:
    """The difference with its unit, interval and pairs."""
    unit, digits = f" {score.unit}" if score.unit else "", score.digits
    said = f"{title} {found.mean:+.{digits}f}{unit}"
    if found.pairs == 1:
        return said
    interval = f"95% interval {found.low:+.{digits}f} to {found.high:+.{digits}f}"
    return f"{said}, {interval}, {found.pairs} pairs"


def _without_leak(result: StudyResult, name: str, variant: VariantResult) -> list[str]:
    """The same for a variant in which tokens see later ones, without that leak."""
    score, baseline = result.scores[0], result.variants.get(result.baseline)
    leaks = baseline is not None and bool(baseline.leak)
    said = []
    for leak in [*variant.leak.values()][-1:]:
        for way, found in (
            ("with the mask", leak.masked_beside_baseline),
            ("from the prefix", leak.prefix_beside_baseline),
        ):
            if found is not None:
                theirs = f"{result.baseline} {way}" if leaks else result.baseline
                verdict = _verdict(result, f"{name} {way}", theirs, found)
                said.append(f"{verdict}: {_numbers(found, score.title, score)}")
    return said


def notes(result: StudyResult) -> str:
    """Explains the columns of tables, for a study without tasks or for one task."""
    variants, name = result.variants.values(), result.baseline
    if not variants:
        return "nothing is compared yet: the best point of the grid is not known"
    counts = {len(variant.seeds) for variant in variants}
    seeds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    score, units = result.scores[0], f"{result.unit}s"
    in_unit = f" in {score.unit}" if score.unit else ""
    found = []
    if result.grids:
        swept = ", ".join(str(seed) for seed in result.swept_seeds)
        found.append(
            "grid: the best point, chosen by the mean score on the validation split over seeds "
            f"{swept}"
        )
    found += [
        f"mean ± standard deviation over {seeds} seeds; {score.title}{in_unit} on the "
        f"{result.scored:,} {units} of the {result.split} split",
        f"difference: {score.title} minus that of {name} with the same seed, which saw the same "
        "batches; interval: 95% interval of its mean over pairs (t distribution); * excludes 0",
        f"{units}/s: of the median step, and affected by whatever else ran on the machine; "
        "routing: over all layers and the last 10 steps",
    ]
    if any("changed_set" in variant.measures for variant in variants):
        apart = {
            run.measured.fluctuation.steps
            for run in result.runs
            if run.measured.fluctuation is not None
        }
        steps = " or ".join(f"{step:g}" for step in sorted(apart))
        found.append(
            "changed: share of the probe tokens with a different first expert, or different "
            f"experts, than {steps} steps before the end"
        )
    attacked = any(f"attacked_{score.name}" in variant.measures for variant in variants)
    if attacked and result.attack is not None:
        rate, seed = result.attack.rate, result.attack.seed
        how = "words were replaced with AAA at a rate of"
        if result.unit == "image":
            how = "Gaussian noise was added to pixels from 0 to 1, standard deviation"
        found.append(f"attacked: {how} {rate:g} (seed {seed})")
    known = {measure for variant in variants for measure in variant.measures}
    found += [note for measure, note in MEASURES.items() if measure in known]
    if any(variant.curve for variant in variants):
        found.append(
            f"after {units}: {result.validation_score.replace('_', ' ')} during training, and its "
            f"difference from that of {name} with the same seed at the same step"
        )
    if result.relations:
        found.append(
            "rank correlation: Spearman, over variants within a seed; mean and interval over "
            "seeds. Variants are not a random sample, and among many measures one correlates with "
            "the score by chance"
        )
    leaks = [leak for variant in variants for leak in variant.leak.values()]
    if leaks:
        tokens = sorted({leak.prefix_tokens for leak in leaks})
        error = max(leak.prefix_standard_error for leak in leaks)
        found.append(
            "leak: the same weights on the same tokens, but no token sees later tokens. With the "
            "mask: over the whole split; from the prefix: the text is cut off before each of a "
            f"sample of {tokens[0]:,} tokens per run, with a standard error of at most {error:.4f}"
        )
    return "\n".join(found)


def tasks_note(result: TasksResult) -> str:
    """Explains the columns of the table over tasks."""
    tasks, baseline = result.tasks, result.baseline
    return (
        f"mean ± standard deviation over seeds, of the {result.scores[0].title} on the "
        f"{next(iter(tasks.values())).split} split of each task\ndifference: the mean over tasks "
        f"minus that of {baseline} with the same seed; interval: 95% interval of its mean over "
        "pairs (t distribution); * excludes 0"
    )
