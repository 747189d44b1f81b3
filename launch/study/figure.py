"""`polyad study --figure`: a study as an SVG figure.

It has a panel for each measure that distinguishes variants, with a dot per seed, one for
differences over training, and one for the leak of later tokens over training. The same results give
the same bytes.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyad.launch.output import check_result_file
from polyad.launch.study.result import (
    Difference,
    Leak,
    Result,
    StudyResult,
    TasksResult,
    Validation,
    parts_of,
)
from polyad.launch.study.results import measures
from polyad.launch.study.sentences import amount
from polyad.train.page.charts import Axis, Chart, Dot, Line, span
from polyad.train.page.panels import ROOM, DotRow, curve_panel, dot_panel, sheet
from polyad.train.page.template import SERIES

LOGARITHMIC = 8
"""The x axis is logarithmic if the most units exceed this many times the fewest."""


def check_figure(path: Path, *, dry_run: bool) -> None:
    """Checks, before any work is done, that a figure can be drawn there.

    Raises:
        UsageError: it cannot.
    """
    check_result_file("--figure", path, ".svg", dry_run=dry_run)


def figure(result: Result, *, inline: bool = False) -> str:
    """Draws a study.

    Args:
        result: a study's result.
        inline: whether it is for a page, not a file.

    Returns:
        The text of an SVG file, or an element; empty for a page if there is nothing to draw.
    """
    leaks: dict[str, Mapping[str, Leak]] = {}
    if isinstance(result, TasksResult):
        panels = _panels_of_tasks(result)
    else:
        panels = _panels(result)
        leaks = {name: each.leak for name, each in result.variants.items() if each.leak}
    for task, found in parts_of(result).items():
        beside = {n: v for n, v in found.variants.items() if n != found.baseline}
        if curves := {name: each.curve for name, each in beside.items() if each.curve}:
            score = found.validation_score.replace("_", " ")
            title = (f"{task}: " if task else "") + f"{score} minus that of {found.baseline}"
            panels.append(_curves(found, curves, title[0].upper() + title[1:]))
    if leaks:
        panels.append(_leaks(leaks, _colours(result), 260))
    if inline and not panels:
        return ""
    return sheet(f"{result.study}: {', '.join(result.variants)}", panels, inline=inline)


def _colours(result: Result) -> dict[str, str]:
    return {name: SERIES[i % len(SERIES)] for i, name in enumerate(result.variants)}


def _panels(result: StudyResult) -> list[Chart]:
    """Panels of loss differences, and of routing measures without differences, where known."""
    beside, share = result.baseline, f"{100 * result.confidence:.0f}%"
    score = result.scores[0]
    unit = f", {score.unit}" if score.unit else ""
    head = f"{score.title.capitalize()} minus that of {beside}{unit}"
    what = "text" if result.unit == "token" else "data"
    attacked = f"On perturbed {what}, minus that of {beside}"
    interval = f"dots: seeds; bar: {share} interval of the mean"
    plain = "dots: seeds; line: their mean"
    panels = [
        _differences(result, score.name, head, interval),
        _differences(result, f"attacked_{score.name}", attacked, interval),
        _values(result, "changed_set", "Share of tokens whose experts changed at the end", plain),
        _values(result, "effective_neighbours", "Effective neighbours in the graph", plain),
        _values(result, "entropy", "Routing entropy, nats", plain),
        _values(result, "polysemanticity", "Polysemanticity of experts", plain),
    ]
    return [panel for panel in panels if panel is not None]


def _panels_of_tasks(result: TasksResult) -> list[Chart]:
    """The difference of the mean over tasks, and of each task."""
    score, beside = result.scores[0], result.baseline
    note = "dots: seeds; bar: 95% interval of the mean"
    rows = [
        _difference_row(name, colour, found)
        for name, colour in _colours(result).items()
        if (found := result.variants[name].difference) is not None
    ]
    title = f"Mean {score.title} over tasks minus that of {beside}"
    panels = [dot_panel(title, note, rows, from_zero=True) if rows else None]
    panels += [
        _differences(found, score.name, f"{task}: {score.title} minus that of {beside}", note)
        for task, found in result.tasks.items()
    ]
    return [panel for panel in panels if panel is not None]


def _difference_row(name: str, colour: str, found: Difference) -> DotRow:
    return DotRow(name, colour, found.differences, found.mean, found.low, found.high)


def _differences(result: StudyResult, measure: str, title: str, note: str) -> Chart | None:
    rows = []
    for name, colour in _colours(result).items():
        found = result.variants[name].differences.get(measure)
        if found is not None:
            rows.append(_difference_row(name, colour, found))
    return dot_panel(title, note, rows, from_zero=True) if rows else None


def _values(result: StudyResult, measure: str, title: str, note: str) -> Chart | None:
    rows = []
    for name, colour in _colours(result).items():
        known = (measures(run, result.scores[0].name) for run in result.runs if run.variant == name)
        values = [found[measure] for found in known if measure in found]
        if values:
            mean = statistics.fmean(values)
            rows.append(DotRow(name, colour, values, mean, math.nan, math.nan))
    return dot_panel(title, note, rows, from_zero=False) if rows else None


def _curves(result: StudyResult, curves: Mapping[str, Sequence[Validation]], title: str) -> Chart:
    """The mean difference of each variant at each step, and its interval as a band."""
    colours, units = _colours(result), f"{result.unit}s"
    seen = sorted({each.seen for curve in curves.values() for each in curve})
    x = Axis(seen[0], seen[-1], logarithmic=seen[-1] > LOGARITHMIC * seen[0] > 0)
    y, beyond = _y_axis([each for curve in curves.values() for each in curve])
    axis = ", logarithmic" if x.logarithmic else ""
    cut = "; cut at the edges" if beyond else ""
    share = f"{100 * result.confidence:.0f}%"
    lines = []
    for name, curve in curves.items():
        known = {each.seen: each.difference for each in curve}
        found = [known.get(each) for each in seen]
        lines.append(
            Line(
                label=name,
                values=[None if one is None else one.mean for one in found],
                colour=colours[name],
                with_points=True,
                band=[
                    (one.low, one.high) if one is not None and math.isfinite(one.low) else None
                    for one in found
                ],
            )
        )
    return curve_panel(
        title,
        f"by {units} seen{axis}; band: {share} interval of the mean{cut}",
        seen,
        lines,
        x,
        y,
        x_labels={tick: amount(tick) for tick in x.ticks()},
    )


def _y_axis(steps: Sequence[Validation]) -> tuple[Axis, bool]:
    """The y axis, and whether anything lies beyond it.

    A spike at the start would flatten all later values, so the axis covers only values after the
    first quarter of validations.
    """
    seen = sorted({each.seen for each in steps})
    start = seen[len(seen) // 4]
    axis = Axis(*span([*_numbers([each for each in steps if each.seen >= start]), 0.0], room=ROOM))
    return axis, any(not axis.holds(number) for number in _numbers(steps))


def _numbers(steps: Sequence[Validation]) -> list[float]:
    """Existing means and ends of intervals."""
    found = [each.difference for each in steps if each.difference is not None]
    numbers = (number for one in found for number in (one.mean, one.low, one.high))
    return [*filter(math.isfinite, numbers)]


def _leaks(
    leaks: Mapping[str, Mapping[str, Leak]], colours: Mapping[str, str], height: int
) -> Chart:
    """The leak of later tokens: a solid line from the prefix, a dashed one with the mask."""
    steps = sorted({int(step) for leak in leaks.values() for step in leak})
    lines, numbers = [], [0.0]
    for name, leak in leaks.items():
        found = [leak.get(str(step)) for step in steps]
        prefix = [None if each is None else each.prefix_leak for each in found]
        masked = [None if each is None else each.masked_leak for each in found]
        numbers += [
            value for one in (*prefix, *masked) if one for value in (one.mean, *one.differences)
        ]
        dots = [
            Dot(step, value, "seed")
            for step, one in zip(steps, prefix, strict=True)
            for value in (one.differences if one else ())
        ]
        means = [one.mean if one else None for one in prefix]
        lines.append(Line(label=name, values=means, colour=colours[name], dots=dots))
        means = [one.mean if one else None for one in masked]
        lines.append(Line(label="", values=means, colour=colours[name], is_dashed=True))
    return curve_panel(
        "Effect of seeing later tokens, nats per token",
        "solid (dots: seeds): text cut before each token; dashed: with the mask; by step",
        steps,
        lines,
        Axis(0, steps[-1]),
        Axis(*span([*filter(math.isfinite, numbers)], room=ROOM)),
        x_labels={step: f"{step:,}" for step in steps},
        height=height,
    )
