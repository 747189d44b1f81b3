"""What a study shows to a person: its plan, its progress, its comparison."""

import math
from collections.abc import Mapping
from typing import Any

from launch.output import align
from train.metrics import duration
from train.study import Run

Row = tuple[str, ...]


def plan_table(plan: Mapping[str, Any]) -> str:
    """The variants and what is to be done.

    Args:
        plan: of the study.
    """
    variants = plan["variants"]
    base = variants[plan["baseline"]]
    rows: list[Row] = [("variant", "parameters", "of a token", "beside", "FLOPs/token", "beside")]
    for name, variant in variants.items():
        size, flops = variant["parameters"], variant["flops_per_token"]
        rows.append(
            (
                name,
                f"{size:,}",
                f"{variant['active_parameters']:,}",
                _share(size, base["parameters"]),
                f"{flops:.3g}",
                _share(flops, base["flops_per_token"]),
            )
        )
    runs = plan["runs"]
    finished = sum(run["finished"] for run in runs)
    begun = sum(run["step"] > 0 and not run["finished"] for run in runs)
    training = base["training"]
    return (
        f"{align(rows)}\n"
        f"{len(runs)} runs ({len(variants)} variants, seeds "
        f"{', '.join(str(seed) for seed in plan['seeds'])}) of {training['steps']:,} steps of "
        f"{training['tokens_per_step']:,} tokens: {finished} finished, {begun} to go on, "
        f"{len(runs) - finished - begun} to begin\n"
        f"beside: {plan['baseline']}; in {plan['folder']}"
    )


def _share(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.1f}%"


def progress_line(run: Run, number: int, count: int, seconds_left: float) -> str:
    """Which run begins, and when all are done."""
    left = f"{duration(seconds_left)} left for all" if math.isfinite(seconds_left) else ""
    return f"run {number} of {count}: {run}" + (f"; {left}" if left else "")


def finished_line(run: Run, result: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> str:
    """What a run came to, beside the baseline's of the same seed where that is finished."""
    name, beside = run.study.config.baseline, ""
    if baseline is not None and run.variant.name != name:
        beside = f" ({result['loss'] - baseline['loss']:+.4f} beside {name})"
    return (
        f"{run}: loss {result['loss']:.4f}{beside}, perplexity {result['perplexity']:.2f} on "
        f"{result['tokens_scored']:,} tokens"
    )


def result_table(result: Mapping[str, Any], *, markdown: bool = False) -> str:
    """The comparison.

    Args:
        result: what `summarize` made.
        markdown: for a page instead of a terminal.
    """
    table = _markdown if markdown else align
    variants = result["variants"]
    parts = [table(_loss_rows(variants)), table(_cost_rows(variants))]
    if any(variant["routing"] for variant in variants.values()):
        parts.append(table(_routing_rows(variants)))
    return "\n\n".join([*parts, _notes(result)])


def _loss_rows(variants: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = [("variant", "loss", "perplexity", "difference", "95% interval", "pairs")]
    for name, variant in variants.items():
        cells = (_pm(variant["loss"], 4), _pm(variant["perplexity"], 2))
        difference = variant["difference"]
        if difference is None:
            rows.append((name, *cells, "", "", ""))
            continue
        interval = "none of one pair"
        if difference["pairs"] > 1:
            mark = " *" if difference["excludes_zero"] else ""
            interval = f"{difference['low']:+.4f} to {difference['high']:+.4f}{mark}"
        rows.append(
            (name, *cells, _pm(difference, 4, sign="+"), interval, f"{difference['pairs']}")
        )
    return rows


def _cost_rows(variants: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = [("variant", "parameters", "of a token", "FLOPs/token", "tokens/s")]
    rows += [
        (
            name,
            f"{variant['parameters']:,}",
            f"{variant['active_parameters']:,}",
            f"{variant['flops_per_token']:.3g}",
            f"{variant['tokens_per_second']['mean']:,.0f}",
        )
        for name, variant in variants.items()
    ]
    return rows


def _routing_rows(variants: Mapping[str, Any]) -> list[Row]:
    names = list({name: None for variant in variants.values() for name in variant["routing"]})
    rows: list[Row] = [("routing", *names)]
    for variant_name, variant in variants.items():
        if variant["routing"]:
            cells = [
                _pm(variant["routing"][name], 3) if name in variant["routing"] else ""
                for name in names
            ]
            rows.append((variant_name, *cells))
    return rows


def _pm(values: Mapping[str, Any], digits: int, sign: str = "") -> str:
    mean, deviation = f"{values['mean']:{sign}.{digits}f}", values["deviation"]
    return mean if math.isnan(deviation) else f"{mean} ± {deviation:.{digits}f}"


def _notes(result: Mapping[str, Any]) -> str:
    counts = {len(variant["seeds"]) for variant in result["variants"].values()}
    seeds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    return (
        f"mean ± standard deviation over {seeds} seeds; loss in nats a token on the "
        f"{result['tokens_scored']:,} tokens of the {result['split']} split\n"
        f"difference: loss less {result['baseline']}'s of the same seed, which saw the same "
        f"batches; interval: of its mean, by the t distribution over pairs; * leaves 0 out\n"
        f"tokens/s: of the median step, and of what else the machine did; routing: over all "
        f"layers and the last 10 steps"
    )


def _markdown(rows: list[Row]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(rows[0]))) + "|"
    return "\n".join([head, rule, *body])
