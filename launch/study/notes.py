"""What stands below a study's tables: what their columns are, and of what."""

from collections.abc import Mapping
from typing import Any


def notes(result: Mapping[str, Any]) -> str:
    """Those of a study without tasks, or of one task.

    Args:
        result: what `summarize` made.
    """
    variants, name = result["variants"].values(), result["baseline"]
    if not variants:
        return "nothing is compared yet: no point of a grid is known to be the best one"
    counts = {len(variant["seeds"]) for variant in variants}
    seeds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    score, units = result["scores"][0], f"{result['unit']}s"
    in_unit = f" in {score['unit']}" if score["unit"] else ""
    found = []
    if result["grids"]:
        swept = ", ".join(str(seed) for seed in result["swept_seeds"])
        found.append(f"grid: chosen by the mean on the validation split, seeds {swept}")
    found += [
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
        found.append(
            f"changed: share of the probe set's tokens with another first expert, or other "
            f"experts, than {steps} steps before the end"
        )
    if any(f"attacked_{score['name']}" in variant["measures"] for variant in variants):
        rate, seed = result["attack"]["rate"], result["attack"]["seed"]
        how = "words of the text became AAA at a rate of"
        if result["unit"] == "image":
            how = "pixels from 0 to 1 had Gaussian noise of"
        found.append(f"attacked: {how} {rate:g} (seed {seed})")
    if any("polysemanticity" in variant["measures"] for variant in variants):
        found.append(
            "polysemanticity: 0 where each expert matters to one class alone, mean over experts "
            "that matter to any; experts_that_matter: their share"
        )
    if any("effective_classes_characters" in variant["measures"] for variant in variants):
        found.append(
            "experts_that_matter: share without which a class of tokens is worse beyond noise; "
            "effective_classes of these: 1 where each is for one class, the number of classes "
            "where it is for all alike, experts weighing as much as the harm they do"
        )
    if any("entropy_bits" in variant["measures"] for variant in variants):
        found.append(
            "entropy_bits H_s, of a token's probabilities; usage_entropy_bits H_u, of their mean; "
            "information_bits I(E; Y), of experts and classes, or classes of tokens; experts_used: "
            "with 1% of all or more; expert_cosine, expert_cka: how alike outputs of two are"
        )
    if any(variant["curve"] for variant in variants):
        found.append(
            f"after {units}: {result['validation_score'].replace('_', ' ')} in training, and its "
            f"difference to {name}'s of the same seed at the same step"
        )
    if result["relations"]:
        found.append(
            "rank correlation: Spearman's over variants, within a seed; mean and interval over "
            "seeds. Variants are no sample of anything, and one measure of many goes with the "
            "score by chance"
        )
    leaks = [leak for variant in variants for leak in variant["leak"].values()]
    if leaks:
        tokens = sorted({leak["prefix_tokens"] for leak in leaks})
        error = max(leak["prefix_standard_error"] for leak in leaks)
        found.append(
            f"leak: the same weights on the same tokens, where no token sees later ones: with the "
            f"mask, the whole split; from the prefix, the text cut before each of a sample of "
            f"{tokens[0]:,} tokens a run, whose own standard error is at most {error:.4f}"
        )
    return "\n".join(found)


def tasks_note(result: Mapping[str, Any]) -> str:
    """That of a study of tasks.

    Args:
        result: what `over_tasks` made.
    """
    tasks, baseline = result["tasks"], result["baseline"]
    return (
        f"mean ± standard deviation over seeds, of the {result['scores'][0]['title']} on the "
        f"{next(iter(tasks.values()))['split']} split of each task\ndifference: the mean over "
        f"tasks less {baseline}'s of the same seed; interval: of its mean, by the t distribution "
        f"over pairs; * leaves 0 out"
    )
