"""What the results of finished runs come to: means, spread, differences of pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

from train.environment import describe_environment
from train.errors import RunError
from train.paired import CONFIDENCE, paired_difference, spread


def summarize(plan: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compares variants over the seeds that are finished.

    Args:
        plan: of the study: variants with their sizes, baseline and seeds.
        results: of finished runs, in the order of the study.

    Returns:
        JSON values: for each variant with a finished run its sizes, means and spread over seeds,
        and the difference to the baseline over the seeds that both have finished.

    Raises:
        RunError: runs were scored on different tokens.
    """
    scored = {result["tokens_scored"] for result in results}
    if len(scored) > 1:
        raise RunError(f"runs were scored on different numbers of tokens: {sorted(scored)}")
    by_variant = {
        name: {result["seed"]: result for result in results if result["variant"] == name}
        for name in plan["variants"]
    }
    baseline = by_variant[plan["baseline"]]
    environment = describe_environment(1)
    return {
        "study": plan["study"],
        "folder": plan["folder"],
        "baseline": plan["baseline"],
        "seeds": plan["seeds"],
        "finished": len(results) == len(plan["runs"]),
        "tokens_scored": min(scored, default=0),
        "confidence": CONFIDENCE,
        "variants": {
            name: {
                **plan["variants"][name],
                **_means(list(runs.values())),
                "difference": None if name == plan["baseline"] else _difference(runs, baseline),
            }
            for name, runs in by_variant.items()
            if runs
        },
        "runs": list(results),
        "environment": {
            key: environment[key] for key in ("git_commit", "versions", "platform", "gpus")
        },
    }


def _means(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means: dict[str, Any] = {"seeds": [run["seed"] for run in runs]}
    for key in ("loss", "perplexity", "bits_per_byte", "training_loss", "tokens_per_second"):
        means[key] = spread([run[key] for run in runs])._asdict()
    names = {name: None for run in runs for name in run["routing"]}
    means["routing"] = {
        name: spread([run["routing"][name] for run in runs if name in run["routing"]])._asdict()
        for name in names
    }
    return means


def _difference(
    runs: Mapping[int, Mapping[str, Any]], baseline: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Of the losses, in nats a token; None before a seed is finished by both."""
    seeds = [seed for seed in runs if seed in baseline]
    if not seeds:
        return None
    losses = [runs[seed]["loss"] for seed in seeds]
    theirs = [baseline[seed]["loss"] for seed in seeds]
    difference = paired_difference(losses, theirs)
    return difference._asdict() | {
        "seeds": seeds,
        "differences": [one - other for one, other in zip(losses, theirs, strict=True)],
        "excludes_zero": difference.excludes_zero,
    }
