"""The panel of a study's picture that shows differences to the baseline over training."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

from polyad.launch.study.drawing import FOOT, HEAD, WIDTH, Scale, heading, scale, span
from polyad.launch.study.result import Difference, StudyResult, Validation
from polyad.launch.study.sentences import amount
from polyad.train.page.charts import ticks

CURVES_HEIGHT = 280
LEFT, RIGHT = 58, 12
"""Room for the numbers of the y axis; beside the last point."""
LOGARITHMIC = 8
"""The x axis is logarithmic where the most units are more than this times the fewest."""


def curves_of(result: StudyResult) -> dict[str, list[Validation]]:
    """The curves that are drawn: of variants that have one beside the baseline."""
    beside = {n: v for n, v in result.variants.items() if n != result.baseline}
    return {name: variant.curve for name, variant in beside.items() if variant.curve}


def draw_curves(
    result: StudyResult, colours: Mapping[str, str], title: str, x: float, y: float
) -> list[str]:
    """Draws the mean difference at each step, and its interval as a band.

    Args:
        result: of a study, with a curve at least.
        colours: of variants.
        title: of the panel.
        x: its left end.
        y: its upper end.

    Returns:
        Parts of an SVG file.
    """
    curves, units = curves_of(result), f"{result.unit}s"
    seen = sorted({each.seen for curve in curves.values() for each in curve})
    logarithmic = seen[-1] > LOGARITHMIC * seen[0] > 0
    low, high, beyond = _y_range([each for curve in curves.values() for each in curve])
    legend = 18 * math.ceil(len(curves) / 3)
    top, bottom = y + HEAD + legend, y + CURVES_HEIGHT - FOOT
    first, last = x + LEFT, x + WIDTH - RIGHT
    to_x, on_axis = _x_axis(seen, first, last, logarithmic), scale(low, high, bottom, top)

    def to_y(value: float) -> float:
        return on_axis(min(max(value, low), high))

    axis = ", logarithmic" if logarithmic else ""
    cut = "; cut at the edges" if beyond else ""
    share = f"{100 * result.confidence:.0f}%"
    note = f"by {units} seen{axis}; band: {share} interval of the mean{cut}"
    parts = heading(title, note, x, y)
    for tick in ticks(low, high, 6):
        css = "grid" if tick else "zero"
        parts.append(
            f'<line class="{css}" x1="{first}" x2="{last}" y1="{to_y(tick)}" y2="{to_y(tick)}"/>'
            f'<text class="note" x="{first - 6}" y="{to_y(tick) + 4:g}" text-anchor="end">'
            f"{tick:g}</text>"
        )
    for tick in _x_ticks(seen, logarithmic):
        parts.append(
            f'<text class="note units" x="{to_x(tick)}" y="{bottom + 16:g}" text-anchor="middle">'
            f"{amount(tick)}</text>"
        )
    for number, (name, curve) in enumerate(curves.items()):
        places = [(to_x(each.seen), each.difference) for each in curve if each.difference]
        parts += _draw_curve(name, places, to_y, colours[name])
        parts += [
            f'<circle class="mean" cx="{px}" cy="{to_y(mean)}" r="3" fill="{colours[name]}"/>'
            for px, mean in ((px, one.mean) for px, one in places)
            if low <= mean <= high
        ]
        place = f'x="{first + 150 * (number % 3):g}" y="{y + 48 + 18 * (number // 3):g}"'
        parts.append(
            f'<text {place} style="fill:{colours[name]};font-weight:600">{escape(name)}</text>'
        )
    return parts


def _y_range(steps: Sequence[Validation]) -> tuple[float, float, bool]:
    """The ends of the y axis, and whether anything lies beyond them.

    One spike at the start would press all that follows into a line: the axis has room for what
    comes after the first quarter of validations.
    """
    seen = sorted({each.seen for each in steps})
    start = seen[len(seen) // 4]
    low, high = span([*_numbers([each for each in steps if each.seen >= start]), 0.0])
    return low, high, any(not low <= number <= high for number in _numbers(steps))


def _numbers(steps: Sequence[Validation]) -> list[float]:
    """Means and ends of intervals that there are."""
    found = [each.difference for each in steps if each.difference is not None]
    numbers = (number for one in found for number in (one.mean, one.low, one.high))
    return [*filter(math.isfinite, numbers)]


def _draw_curve(
    name: str, places: Sequence[tuple[float, Difference]], to_y: Scale, colour: str
) -> list[str]:
    """One variant: its mean as a line, over the band of intervals."""
    parts = [f"<g><title>{escape(name)}</title>"]
    for has_interval, group in groupby(places, key=lambda at: math.isfinite(at[1].low)):
        if has_interval:
            found = [*group]
            upper = [f"{px},{to_y(one.high)}" for px, one in found]
            lower = [f"{px},{to_y(one.low)}" for px, one in reversed(found)]
            parts.append(
                f'<polygon class="band" points="{" ".join(upper + lower)}" fill="{colour}" '
                f'fill-opacity="0.14" stroke="{colour}" stroke-opacity="0.4" stroke-width="0.75"/>'
            )
    path = " ".join(f"{px},{to_y(one.mean)}" for px, one in places)
    parts.append(
        f'<polyline class="curve" points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    )
    return [*parts, "</g>"]


def _x_axis(seen: Sequence[float], first: float, last: float, logarithmic: bool) -> Scale:
    if not logarithmic:
        return scale(seen[0], seen[-1], first, last)
    on_logs = scale(math.log(seen[0]), math.log(seen[-1]), first, last)
    return lambda units: on_logs(math.log(units))


def _x_ticks(seen: Sequence[float], logarithmic: bool) -> list[float]:
    """Round numbers from the fewest to the most units."""
    if not logarithmic:
        return ticks(seen[0], seen[-1], 5)
    powers = range(math.floor(math.log10(seen[0])), math.ceil(math.log10(seen[-1])) + 1)
    factors = (1, 2, 5) if seen[-1] < 300 * seen[0] else (1,)
    places = [float(factor * 10**power) for power in powers for factor in factors]
    return [place for place in places if seen[0] <= place <= seen[-1]]
