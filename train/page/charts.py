"""Charts as SVG: lines, heat maps, matrices, and dots with intervals.

Used by reports, studies, plans and the README's figure. Colors are the CSS variables of
`template.COLOURS`. Numbers have few digits, so that pages with many charts stay small, and output
is deterministic: the same input gives the same bytes.

Shapes of heat maps: R rows, C columns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup, escape

from polyad.train.page.template import number

NARROW, WIDE, HEIGHT = 640, 1060, 220
"""Width in pixels of a chart beside another, and of a full-width one; text is equally large."""
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 10, 26
"""Margins in pixels around a chart's drawing, with numbers on the left and below."""

Place = Callable[[float], float]
"""Maps values to pixels."""


def element(name: str, *inside: object, css: str | None = None, **attributes: object) -> Markup:
    """Makes an escaped SVG element.

    Args:
        name: the tag.
        inside: texts and elements.
        css: its classes.
        attributes: `_` in names is written as `-`; None values are omitted.
    """
    given = {"class": css} | {key.replace("_", "-"): each for key, each in attributes.items()}
    said = "".join(f' {k}="{_short(each)}"' for k, each in given.items() if each is not None)
    content = "".join(map(escape, inside))
    return Markup(f"<{name}{said}>{content}</{name}>" if content else f"<{name}{said}/>")


def _short(value: object) -> str:
    return f"{round(value, 2):g}" if isinstance(value, int | float) else escape(value)


def text(x: float, y: float, content: str, anchor: str | None = None, css: str = "tick") -> Markup:
    """Text at a position; `anchor` is the part of it at that position: start, middle or end."""
    return element("text", content, css=css, x=x, y=y, text_anchor=anchor)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from low to high, approximately `wanted` of them."""
    raw = max(high - low, 1e-12) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1)]


def span(
    values: Sequence[float], low: float | None = None, high: float | None = None
) -> tuple[float, float]:
    """The limits of an axis: the smallest and largest value with some room, unless given."""
    bottom, top = min(values) if low is None else low, max(values) if high is None else high
    if top - bottom < 1e-9 * max(1.0, abs(top)):
        bottom, top = (low, low + 1) if low is not None else (bottom - 0.5, top + 0.5)
    beside = 0.05 * (top - bottom)
    return bottom - (low is None) * beside, top + (high is None) * beside


@dataclass(frozen=True)
class Axis:
    """An axis of a chart; values beyond its limits are drawn at the limits."""

    low: float
    high: float
    logarithmic: bool = False
    """Whether the axis is logarithmic."""

    def between(self, first: float, last: float) -> Place:
        """Maps values to pixels, with `low` at the first and `high` at the last."""
        form = math.log if self.logarithmic else float
        low, high = form(self.low), form(self.high)
        scale = (last - first) / ((high - low) or 1.0)

        def place(value: float) -> float:
            inside = min(max(value, self.low), self.high)
            return round(first + (form(inside) - low) * scale, 1)

        return place

    def holds(self, value: float) -> bool:
        """Whether a value is between the limits."""
        return self.low <= value <= self.high

    def ticks(self, wanted: int = 5) -> list[float]:
        """Round numbers on the axis."""
        if not self.logarithmic:
            return ticks(self.low, self.high, wanted)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        factors = (1, 2, 5) if self.high < 300 * self.low else (1,)
        places = [float(factor * 10**power) for power in powers for factor in factors]
        return [place for place in places if self.holds(place)]


class Area(NamedTuple):
    """The drawing area of a chart in pixels."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawing, used as an SVG element in a page or as a panel in a figure."""

    title: str
    """Description for screen readers."""
    width: float
    height: float
    parts: Sequence[Markup]
    tooltips: Sequence[Markup] = ()
    """Tooltips, which lie above the parts."""

    def __html__(self) -> str:
        """The element in a page."""
        return element(
            "svg",
            element("title", self.title),
            *(*self.below(in_file=False), *self.parts, *self.tooltips),
            css="wide" if self.width == WIDE else None,
            viewBox=f"0 0 {self.width:g} {self.height:g}",
            role="img",
            aria_label=self.title,
        )

    def below(self, *, in_file: bool) -> Sequence[Markup]:
        """Elements below the parts; not every viewer of SVG files shows embedded images."""
        return ()


class Dot(NamedTuple):
    """A single value."""

    x: float
    value: float
    css: str
    """`mean`, or `open`, a hollow dot."""
    title: str | None = None
    """Text of the tooltip."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve."""

    label: str
    values: Sequence[float | None]
    """None leaves a gap."""
    colour: str
    """A CSS colour."""
    with_points: bool = False
    """Whether to join values over gaps and mark each, for few values."""
    dots: Sequence[Dot] = ()
    is_dashed: bool = False


def line_chart(
    steps: Sequence[int],
    lines: Sequence[Line],
    *,
    title: str,
    low: float | None = None,
    high: float | None = None,
    width: int = NARROW,
) -> Chart:
    """Draws curves over steps, with a tooltip for each span of steps.

    Args:
        steps: the step of every value.
        lines: lines with equally many values.
        title: description for screen readers.
        low: lower limit of the axis; None: the lowest value.
        high: upper limit; None: the highest value.
        width: width of the drawing in pixels.
    """
    known = [v for line in lines for v in line.values if v is not None and math.isfinite(v)]
    if not known:
        nothing = text(LEFT, 20, "No numbers.")
        return Chart(title=title, width=width, height=30, parts=[nothing])
    area = Area(LEFT, TOP, width - RIGHT, HEIGHT - BOTTOM)
    x, y = Axis(steps[0], steps[-1]), Axis(*span(known, low, high))
    y_labels = {tick: f"{tick:,.0f}" if abs(tick) >= 1000 else f"{tick:g}" for tick in y.ticks()}
    parts = curves(steps, lines, x, y, area, step_labels(steps), y_labels)
    tooltips = _tooltips(steps, lines, x.between(area.left, area.right), area)
    return Chart(title=title, width=width, height=HEIGHT, parts=parts, tooltips=tooltips)


def curves(
    xs: Sequence[float],
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    area: Area,
    x_labels: Mapping[float, str],
    y_labels: Mapping[float, str],
) -> list[Markup]:
    """Draws the parts of a line chart: a grid with numbers, and the curves.

    Args:
        xs: horizontal positions of all lines' values.
        lines: lines with equally many values.
        x: the horizontal axis.
        y: the vertical axis.
        area: the drawing area.
        x_labels: labels below the chart, by position.
        y_labels: labels beside it, by position.
    """
    to_x, to_y = x.between(area.left, area.right), y.between(area.bottom, area.top)
    parts = []
    for tick, label in y_labels.items():
        at, css = to_y(tick), "zero" if tick == 0 and y.low < 0 < y.high else "grid"
        parts += [
            element("line", css=css, x1=area.left, x2=area.right, y1=at, y2=at),
            text(area.left - 6, at + 4, label, "end"),
        ]
    parts += labels_below(x_labels, to_x, area.bottom)
    for line in lines:
        titled = [element("title", line.label)] if line.label else []
        shown = [value is not None and y.holds(value) for value in line.values]
        parts.append(element("g", *titled, *_curve(xs, line, to_x, to_y, shown)))
    return parts


def labels_below(labels: Mapping[float, str], x: Place, bottom: float) -> list[Markup]:
    """Labels below the bottom of a chart."""
    return [text(x(place), bottom + 17, label, "middle") for place, label in labels.items()]


def step_labels(steps: Sequence[int]) -> dict[float, str]:
    """Round numbers of steps, with their labels."""
    places = ticks(steps[0], steps[-1], 6) if len(steps) > 1 else [float(steps[0])]
    return {place: f"{place:,.0f}" for place in places if place == int(place)}


def _curve(
    xs: Sequence[float], line: Line, x: Place, y: Place, shown: Sequence[bool]
) -> list[Markup]:
    """A line's curve and its dots, except for values that are not `shown`."""
    path, pen, dots = [], "M", [*line.dots]
    for place, value, is_shown in zip(xs, line.values, shown, strict=True):
        if value is None or not math.isfinite(value):
            pen = pen if line.with_points else "M"
            continue
        path.append(f"{pen}{x(place):g} {y(value):g}")
        pen = "L"
        if (line.with_points or len(xs) == 1) and is_shown:
            dots.append(Dot(place, value, "mean"))
    dashes = "5 4" if line.is_dashed else None
    curve = element(
        "path", css="curve", stroke=line.colour, stroke_dasharray=dashes, d="".join(path)
    )
    return [curve, *(_dot(dot, line.colour, x, y) for dot in dots)]


def _dot(dot: Dot, colour: str, x: Place, y: Place) -> Markup:
    titled = [element("title", dot.title)] if dot.title else []
    at_x, at_y = x(dot.x), y(dot.value)
    return element(
        "circle", *titled, css=dot.css, cx=at_x, cy=at_y, r=3, fill=colour, stroke=colour
    )


def _tooltips(steps: Sequence[int], lines: Sequence[Line], x: Place, area: Area) -> list[Markup]:
    """A strip for each step with a tooltip of its values."""
    edges = [x(step) for step in steps]
    between = [(a + b) / 2 for a, b in pairwise(edges)]
    bounds = [area.left, *between, area.right]
    parts = []
    for i, step in enumerate(steps):
        said = [
            f"{line.label} {number(value)}"
            for line in lines
            if (value := line.values[i]) is not None
        ]
        width = max(bounds[i + 1] - bounds[i], 0.1)
        strip = Area(bounds[i], area.top, bounds[i] + width, area.bottom)
        parts.append(box(strip, "hit", f"step {step:,}: {', '.join(said)}"))
    return parts


def box(area: Area, css: str, title: str | None = None) -> Markup:
    """A rectangle; with the class `hit` it is invisible and has a tooltip."""
    titled = [element("title", title)] if title else []
    return element(
        "rect",
        *titled,
        css=css,
        x=area.left,
        y=area.top,
        width=area.right - area.left,
        height=area.bottom - area.top,
    )
