"""Console output of a running study: its plan, and a line for each start and end."""

import math
from collections.abc import Collection, Sequence

from polyad.launch.output import align
from polyad.launch.study.measures import Measure
from polyad.launch.study.plan import Estimate
from polyad.launch.study.result import RunResult, StudyPlan, StudyPlans
from polyad.train.console import counted, duration
from polyad.train.study.study import Run, Study

Row = tuple[str, ...]


def plans_table(plans: StudyPlans) -> str:
    """One plan, or those of all tasks."""
    tables = [
        f"task {name}\n{plan_table(plan)}" if name else plan_table(plan)
        for name, plan in plans.plans.items()
    ]
    return "\n".join(["\n\n".join(tables), plans.time]).rstrip()


def plan_table(plan: StudyPlan) -> str:
    """Formats the variants and the remaining work."""
    unit = plan.unit
    variants = {name: plan.variants[points[0]] for name, points in plan.groups.items()}
    base = variants[plan.baseline]
    has_grid = any(len(points) > 1 for points in plan.groups.values())
    head = ("parameters", "active per token", "beside", f"FLOPs/{unit}", "beside")
    rows: list[Row] = [("variant", *(("points",) if has_grid else ()), *head)]
    for name, variant in variants.items():
        rows.append(
            (
                name,
                *((f"{len(plan.groups[name])}",) if has_grid else ()),
                f"{variant.parameters:,}",
                f"{variant.active_parameters:,}",
                _share(variant.parameters, base.parameters),
                f"{variant.flops:.3g}",
                _share(variant.flops, base.flops),
            )
        )
    finished = sum(run.finished for run in plan.runs)
    begun = sum(run.step > 0 and not run.finished for run in plan.runs)
    wanted, taken = plan.measures.wanted, plan.measures.taken
    also = f"{wanted} measures of them: {taken} taken, {wanted - taken} to take\n" if wanted else ""
    swept = ", ".join(str(seed) for seed in plan.swept_seeds)
    swept = f", all points with {swept}" if has_grid else ""
    count, training = plan.num_runs, base.training
    return (
        f"{align(rows)}\n{_from_runs(plan)}"
        f"{count} runs ({len(variants)} variants, seeds "
        f"{', '.join(str(seed) for seed in plan.seeds)}{swept}) of {training['steps']:,} steps "
        f"of {training[f'{unit}s_per_step']:,} {unit}s: {finished} finished, {begun} to continue, "
        f"{count - finished - begun} to start\n{also}"
        f"beside: {plan.baseline}; in {plan.folder}"
    )


def _from_runs(plan: StudyPlan) -> str:
    """A line for each key of a variant that names another's run."""
    return "".join(
        f"{name}: {key} is the run of {other} with the same seed\n"
        for name, keys in plan.from_runs.items()
        for key, other in keys.items()
    )


def _share(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.1f}%"


def nothing_left(study: Study, finished: Collection[tuple[str, int]]) -> list[str]:
    """A line for each variant with finished runs."""
    lines = []
    for name, variant in study.variants.items():
        seeds = [f"{seed}" for seed in study.config.seeds if (name, seed) in finished]
        if seeds and not variant.point:
            each = study.folder / "runs" / name / "seed-N"
            done = f"all {variant.config.train.steps:,} steps are done"
            if variant.config.evaluation.patience is not None:
                done = "training has ended"
            lines.append(
                f"{name}: seed{'s' * (len(seeds) > 1)} {', '.join(seeds)} already finished: "
                f"{done}, in "
                f"{(each if len(seeds) > 1 else each.with_name(f'seed-{seeds[0]}'))}/checkpoints"
            )
    return lines


def estimate_line(estimates: Sequence[Estimate], jobs: int) -> str:
    """Formats the estimated time for the rest.

    Returns:
        A line; empty if nothing is left.
    """
    runs, measures = sum(e.runs for e in estimates), sum(e.measures for e in estimates)
    unknown = [*dict.fromkeys(name for each in estimates for name in each.unknown)]
    parts = [counted(runs, "run")] if runs else []
    parts += [counted(measures, "measure")] if measures else []
    if not parts:
        return ""
    what, seconds = " and ".join(parts), sum(each.seconds for each in estimates)
    if not seconds:
        return f"{what} to do; the time is estimated once one of them is finished"
    without = f", not counting {', '.join(unknown)}, whose time is unknown" if unknown else ""
    took = f"about {spoken(seconds)} with {counted(jobs, 'job')}, estimated from the finished ones"
    return f"{what} to do, {took}{without}"


def spoken(seconds: float) -> str:
    """Formats a duration: 40 s, 3 min 5 s, 42 min, 3 h 10 min."""
    minutes, rest = divmod(round(seconds), 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 10:
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def trained_line(run: Run, step: int) -> str:
    """The line about a run that is trained (perhaps stopped early) but not scored yet."""
    place = run.folder / "checkpoints" / f"step-{step:08d}"
    done = f"all {step:,} steps are done"
    if step < run.variant.config.train.steps:
        done = f"training has ended early, after step {step:,}"
    return f"nothing left to train: {done}, see {place}"


def progress_line(run: Run, number: int, count: int, seconds_left: float) -> str:
    """The line about the next run, with the time left for all."""
    left = f"{duration(seconds_left)} left in total" if math.isfinite(seconds_left) else ""
    return f"run {number} of {count}: {run}" + (f"; {left}" if left else "")


def measure_line(measure: Measure, number: int, count: int, seconds_left: float) -> str:
    """The line about the next measure of a finished run, with the time left for all."""
    left = f"; {duration(seconds_left)} left in total" if math.isfinite(seconds_left) else ""
    return f"measure {number} of {count}: {measure}{left}"


def finished_line(run: Run, result: RunResult, baseline: RunResult | None) -> str:
    """The line with a run's result, compared with the baseline's of the same seed if finished."""
    name, beside = run.study.config.baseline, ""
    first, *others = run.study.task.scores[:2]
    if (score := result.scores[first.name]) is None:
        return f"{run}: diverged at step {result.step}; this point of the grid is discarded"
    theirs = None if baseline is None else baseline.scores[first.name]
    if theirs is not None and run.variant.group != name:
        beside = f" ({score - theirs:+.{first.digits}f} compared with {name})"
    known = [(each, value) for each in others if (value := result.scores[each.name]) is not None]
    more = "".join(f", {each.title} {value:.2f}" for each, value in known)
    return (
        f"{run}: {first.title} {score:.{first.digits}f}{beside}{more} on "
        f"{result.scored:,} {run.study.task.unit.name}s"
    )
