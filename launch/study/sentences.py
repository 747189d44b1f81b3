"""What a study says: a sentence for each variant, made of its interval and of nothing else.

A sentence says better or worse where the interval of the difference leaves 0 out, and that no
difference is shown where it does not. One pair has no interval, so nothing is said of it. What
speaks for a method and what speaks against it is worded alike. And what stands below its tables.
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
    "Each interval stands by itself: nothing is corrected for their number, and of twenty "
    "differences that are none, one would be called better or worse on average."
)

MEASURES = {
    "polysemanticity": "polysemanticity: 0 where each expert matters to one class alone, mean over "
    "experts that matter to any; experts_that_matter: their share",
    "effective_classes_characters": "experts_that_matter: share without which a class of tokens is "
    "worse beyond noise; effective_classes of these: 1 where each is for one class, the number of "
    "classes where it is for all alike, experts weighing as much as the harm they do",
    "entropy_bits": "entropy_bits H_s, of a token's probabilities; usage_entropy_bits H_u, of "
    "their mean; information_bits I(E; Y), of experts and classes, or classes of tokens; "
    "experts_used: with 1% of all or more; expert_cosine, expert_cka: how alike outputs of two are",
}
"""What stands below tables that have a measure, by its name."""


def answers(result: Result) -> list[str]:
    """A sentence for each variant but the baseline, about the first score; of a study with tasks
    about its mean over them."""
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
    """A number of tokens or images, as 410k or 2.62M."""
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
        named += ", whose tokens see later ones,"
    theirs = f"{baseline}, whose tokens see later ones" if baseline in leaking else baseline
    if found is None:
        return f"{named}: no pair with {baseline} is finished"
    return f"{_verdict(result, named, theirs, found)}: {_numbers(found, title, result.scores[0])}"


def _verdict(result: Result, named: str, baseline: str, found: Difference) -> str:
    if found.pairs == 1:
        return f"{named} beside {baseline}, one pair: no interval"
    if not found.excludes_zero:
        return f"no difference between {named} and {baseline} is shown"
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
    """The same of a variant whose tokens see later ones, without what those tell."""
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
    """What the columns of tables are, of a study without tasks or of one task."""
    variants, name = result.variants.values(), result.baseline
    if not variants:
        return "nothing is compared yet: no point of a grid is known to be the best one"
    counts = {len(variant.seeds) for variant in variants}
    seeds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    score, units = result.scores[0], f"{result.unit}s"
    in_unit = f" in {score.unit}" if score.unit else ""
    found = []
    if result.grids:
        swept = ", ".join(str(seed) for seed in result.swept_seeds)
        found.append(f"grid: chosen by the mean on the validation split, seeds {swept}")
    found += [
        f"mean ± standard deviation over {seeds} seeds; {score.title}{in_unit} on the "
        f"{result.scored:,} {units} of the {result.split} split",
        f"difference: {score.title} less {name}'s of the same seed, which saw the same batches; "
        f"interval: of its mean, by the t distribution over pairs; * leaves 0 out",
        f"{units}/s: of the median step, and of what else the machine did; routing: over all "
        f"layers and the last 10 steps",
    ]
    if any("changed_set" in variant.measures for variant in variants):
        apart = {
            run.measured.fluctuation.steps
            for run in result.runs
            if run.measured.fluctuation is not None
        }
        steps = " or ".join(f"{step:g}" for step in sorted(apart))
        found.append(
            f"changed: share of the probe set's tokens with another first expert, or other "
            f"experts, than {steps} steps before the end"
        )
    attacked = any(f"attacked_{score.name}" in variant.measures for variant in variants)
    if attacked and result.attack is not None:
        rate, seed = result.attack.rate, result.attack.seed
        how = "words of the text became AAA at a rate of"
        if result.unit == "image":
            how = "pixels from 0 to 1 had Gaussian noise of"
        found.append(f"attacked: {how} {rate:g} (seed {seed})")
    known = {measure for variant in variants for measure in variant.measures}
    found += [note for measure, note in MEASURES.items() if measure in known]
    if any(variant.curve for variant in variants):
        found.append(
            f"after {units}: {result.validation_score.replace('_', ' ')} in training, and its "
            f"difference to {name}'s of the same seed at the same step"
        )
    if result.relations:
        found.append(
            "rank correlation: Spearman's over variants, within a seed; mean and interval over "
            "seeds. Variants are no sample of anything, and one measure of many goes with the "
            "score by chance"
        )
    leaks = [leak for variant in variants for leak in variant.leak.values()]
    if leaks:
        tokens = sorted({leak.prefix_tokens for leak in leaks})
        error = max(leak.prefix_standard_error for leak in leaks)
        found.append(
            f"leak: the same weights on the same tokens, where no token sees later ones: with the "
            f"mask, the whole split; from the prefix, the text cut before each of a sample of "
            f"{tokens[0]:,} tokens a run, whose own standard error is at most {error:.4f}"
        )
    return "\n".join(found)


def tasks_note(result: TasksResult) -> str:
    """What the columns of the table over tasks are."""
    tasks, baseline = result.tasks, result.baseline
    return (
        f"mean ± standard deviation over seeds, of the {result.scores[0].title} on the "
        f"{next(iter(tasks.values())).split} split of each task\ndifference: the mean over "
        f"tasks less {baseline}'s of the same seed; interval: of its mean, by the t distribution "
        f"over pairs; * leaves 0 out"
    )
