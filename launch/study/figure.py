"""A study as a picture, in SVG: what `polyad study --figure` draws.

One panel for each measure that tells variants apart, with every seed as a dot, one for differences
over training, and one for what later tokens are worth over training. The same results give the
same bytes.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import NamedTuple

from polyad.launch.output import check_result_file
from polyad.launch.study.curve_panel import CURVES_HEIGHT, curves_of, draw_curves
from polyad.launch.study.drawing import (
    COLOURS,
    FOOT,
    GAP,
    HEAD,
    MARGIN,
    ROW,
    STYLE,
    WIDTH,
    Scale,
    heading,
    scale,
    span,
)
from polyad.launch.study.result import (
    Difference,
    Leak,
    Result,
    StudyResult,
    TasksResult,
    parts_of,
)
from polyad.launch.study.results import measures
from polyad.train.page.charts import ticks

NAMES = 140
"""Width of the variants' names."""
LEAK_HEIGHT = 260
WAYS = {"prefix": "", "masked": ' stroke-dasharray="5 4"'}
"""How a loss is found without later tokens, and the dashes of its line."""


class Panel(NamedTuple):
    """One measure of all variants: every seed's value, their mean, and its interval."""

    title: str
    note: str
    rows: list["PanelRow"]
    from_zero: bool
    """Whether 0 is on the axis."""


class PanelRow(NamedTuple):
    """One variant."""

    name: str
    colour: str
    values: Sequence[float]
    mean: float
    low: float
    """The lower end of the interval; NaN of one pair."""
    high: float


def check_figure(path: Path, *, dry_run: bool) -> None:
    """Checks, before any work is done, that a figure can be drawn there.

    Raises:
        UsageError: it cannot.
    """
    check_result_file("--figure", path, ".svg", dry_run=dry_run)


def figure(result: Result, *, inline: bool = False) -> str:
    """Draws a study.

    Args:
        result: of a study.
        inline: for a page that has the style for the class `study`, in place of a file.

    Returns:
        The text of an SVG file, or an element.
    """
    leaks: dict[str, Mapping[str, Leak]] = {}
    if isinstance(result, TasksResult):
        panels = _panels_of_tasks(result)
    else:
        panels = _panels(result)
        leaks = {name: each.leak for name, each in result.variants.items() if each.leak}
    drawings: list[tuple[float, Callable[[float, float], list[str]]]] = [
        (_panel_height(panel), partial(_draw_panel, panel)) for panel in panels
    ]
    for task, found in parts_of(result).items():
        if curves_of(found):
            title = (f"{task}: " if task else "") + (
                f"{found.validation_score.replace('_', ' ')} less that of {found.baseline}"
            )
            panel = partial(draw_curves, found, _colours(found), title[0].upper() + title[1:])
            drawings.append((CURVES_HEIGHT, panel))
    if leaks:
        drawings.append((LEAK_HEIGHT, partial(_draw_leaks, leaks, _colours(result))))
    parts: list[str] = []
    y = float(MARGIN)
    for first in range(0, len(drawings), 2):
        pair = drawings[first : first + 2]
        for column, (_, draw) in enumerate(pair):
            parts += draw(MARGIN + column * (WIDTH + GAP), y)
        y += max(height for height, _ in pair) + GAP
    width = 2 * MARGIN + WIDTH + (WIDTH + GAP if len(drawings) > 1 else 0)
    title = escape(f"{result.study}: {', '.join(result.variants)}")
    fits = f"max-width:{width}px;min-width:{0.65 * width:.0f}px"
    css = f' class="study" style="{fits}"' if inline else ""
    style = "" if inline else f"<style>{STYLE}</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg"{css} viewBox="0 0 {width} {y:g}" width="{width}" '
        f'height="{y:g}" role="img" aria-label="{title}"><title>{title}</title>'
        f'{style}<rect width="100%" height="100%" fill="#fff"/>' + "".join(parts) + "</svg>\n"
    )


def _colours(result: Result) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(result.variants)}


def _panels(result: StudyResult) -> list[Panel]:
    """Differences of losses, and what routers did as it is: those that are known."""
    beside, share = result.baseline, f"{100 * result.confidence:.0f}%"
    score = result.scores[0]
    unit = f", {score.unit}" if score.unit else ""
    head = f"{score.title.capitalize()} less that of {beside}{unit}"
    what = "text" if result.unit == "token" else "data"
    attacked = f"On attacked {what}, less that of {beside}"
    interval = f"dots: seeds; bar: {share} interval of the mean"
    plain = "dots: seeds; line: their mean"
    panels = [
        _differences(result, score.name, head, interval),
        _differences(result, f"attacked_{score.name}", attacked, interval),
        _values(result, "changed_set", "Share of tokens that changed experts at the end", plain),
        _values(result, "effective_neighbours", "Effective neighbours in the graph", plain),
        _values(result, "entropy", "Entropy of routing, nats", plain),
        _values(result, "polysemanticity", "Polysemanticity of experts", plain),
    ]
    return [panel for panel in panels if panel.rows]


def _panels_of_tasks(result: TasksResult) -> list[Panel]:
    """The difference of the mean over tasks, and of each task."""
    score, beside = result.scores[0], result.baseline
    note = "dots: seeds; bar: 95% interval of the mean"
    rows = [
        _difference_row(name, colour, found)
        for name, colour in _colours(result).items()
        if (found := result.variants[name].difference) is not None
    ]
    title = f"Mean {score.title} over tasks less that of {beside}"
    panels = [Panel(title, note, rows, from_zero=True)]
    panels += [
        _differences(found, score.name, f"{task}: {score.title} less that of {beside}", note)
        for task, found in result.tasks.items()
    ]
    return [panel for panel in panels if panel.rows]


def _difference_row(name: str, colour: str, found: Difference) -> PanelRow:
    return PanelRow(name, colour, found.differences, found.mean, found.low, found.high)


def _differences(result: StudyResult, measure: str, title: str, note: str) -> Panel:
    rows = []
    for name, colour in _colours(result).items():
        found = result.variants[name].differences.get(measure)
        if found is not None:
            rows.append(_difference_row(name, colour, found))
    return Panel(title, note, rows, from_zero=True)


def _values(result: StudyResult, measure: str, title: str, note: str) -> Panel:
    rows = []
    for name, colour in _colours(result).items():
        known = (measures(run, result.scores[0].name) for run in result.runs if run.variant == name)
        values = [found[measure] for found in known if measure in found]
        if values:
            mean = statistics.fmean(values)
            rows.append(PanelRow(name, colour, values, mean, math.nan, math.nan))
    return Panel(title, note, rows, from_zero=False)


def _panel_height(panel: Panel) -> float:
    return HEAD + ROW * len(panel.rows) + FOOT


def _draw_panel(panel: Panel, x: float, y: float) -> list[str]:
    numbers = [v for row in panel.rows for v in (*row.values, row.mean, row.low, row.high)]
    known = [value for value in numbers if math.isfinite(value)]
    low, high = span(known + [0.0] * panel.from_zero)
    top, bottom = y + HEAD, y + HEAD + ROW * len(panel.rows)
    to_x = scale(low, high, x + NAMES, x + WIDTH - 12)
    parts = heading(panel.title, panel.note, x, y)
    for tick in ticks(low, high, 5):
        css = "zero" if tick == 0 and panel.from_zero else "grid"
        parts.append(
            f'<line class="{css}" x1="{to_x(tick)}" x2="{to_x(tick)}" y1="{top}" y2="{bottom}"/>'
            f'<text class="note" x="{to_x(tick)}" y="{bottom + 16}" text-anchor="middle">'
            f"{tick:g}</text>"
        )
    for number, row in enumerate(panel.rows):
        parts += _draw_row(row, to_x, x, top + ROW * (number + 0.5))
    return parts


def _draw_row(row: PanelRow, to_x: Scale, x: float, y: float) -> list[str]:
    said = ", ".join(f"{value:.4g}" for value in row.values)
    parts = [
        f"<g><title>{escape(f'{row.name}: mean {row.mean:.4g}; {said}')}</title>",
        f'<text x="{x + NAMES - 8:g}" y="{y + 4:g}" text-anchor="end">{escape(row.name)}</text>',
    ]
    if math.isfinite(row.low) and math.isfinite(row.high):
        parts.append(
            f'<line class="interval" x1="{to_x(row.low)}" x2="{to_x(row.high)}" y1="{y}" y2="{y}" '
            f'stroke="{row.colour}" stroke-width="2"/>'
        )
    parts.append(
        f'<line class="mean" x1="{to_x(row.mean)}" x2="{to_x(row.mean)}" y1="{y - 8}" '
        f'y2="{y + 8}" stroke="{row.colour}" stroke-width="3"/>'
    )
    parts += [
        f'<circle class="seed" cx="{to_x(value)}" cy="{y}" r="4" fill="{row.colour}" '
        f'fill-opacity="0.6" stroke="#fff"/>'
        for value in row.values
    ]
    return [*parts, "</g>"]


def _draw_leaks(
    leaks: Mapping[str, Mapping[str, Leak]], colours: Mapping[str, str], x: float, y: float
) -> list[str]:
    """What later tokens are worth: from the prefix a full line, with the mask a dashed one."""
    steps = sorted({int(step) for leak in leaks.values() for step in leak})
    found = [each for leak in leaks.values() for one in leak.values() for each in _ways(one)]
    numbers = [value for one in found for value in (one.mean, *one.differences)]
    low, high = span([*(value for value in numbers if math.isfinite(value)), 0.0])
    top, bottom = y + HEAD + 18 * math.ceil(len(leaks) / 3), y + LEAK_HEIGHT - FOOT
    to_x = scale(0, steps[-1], x + 50, x + WIDTH - 12)
    to_y = scale(low, high, bottom, top)
    note = "full, dots seeds: text cut before each token; dashed: with the mask; by step"
    parts = heading("What later tokens are worth, nats a token", note, x, y)
    for tick in ticks(low, high, 6):
        css = "grid" if tick else "zero"
        parts.append(
            f'<line class="{css}" x1="{x + 50}" x2="{x + WIDTH - 12}" y1="{to_y(tick)}" '
            f'y2="{to_y(tick)}"/><text class="note" x="{x + 44}" y="{to_y(tick) + 4:g}" '
            f'text-anchor="end">{tick:g}</text>'
        )
    for step in steps:
        parts.append(
            f'<text class="note" x="{to_x(step)}" y="{bottom + 16}" text-anchor="middle">'
            f"{step:,}</text>"
        )
    for number, (name, leak) in enumerate(leaks.items()):
        parts += _draw_leak(leak, colours[name], to_x, to_y)
        place = f'x="{x + 50 + 155 * (number % 3)}" y="{y + 48 + 18 * (number // 3)}"'
        parts.append(
            f'<text {place} style="fill:{colours[name]};font-weight:600">{escape(name)}</text>'
        )
    return parts


def _ways(leak: Leak) -> tuple[Difference, Difference]:
    """What later tokens are worth, by each of `WAYS`."""
    return leak.prefix_leak, leak.masked_leak


def _draw_leak(leak: Mapping[str, Leak], colour: str, to_x: Scale, to_y: Scale) -> list[str]:
    parts = []
    for number, (way, dashes) in enumerate(WAYS.items()):
        points = [(to_x(int(step)), to_y(_ways(one)[number].mean)) for step, one in leak.items()]
        path = " ".join(f"{px},{py}" for px, py in points)
        parts.append(
            f'<polyline class="{way}" points="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="2"{dashes}/>'
        )
    parts += [
        f'<circle class="seed" cx="{to_x(int(step))}" cy="{to_y(value)}" r="3" fill="{colour}" '
        f'fill-opacity="0.6"/>'
        for step, one in leak.items()
        for value in one.prefix_leak.differences
    ]
    return parts
