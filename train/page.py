"""Pages: self-contained HTML from templates in which all text is escaped, and charts as SVG.

A template is beside the code that fills it, and is named by its path in the package. Charts are
intervals on an axis, curves, and a matrix of loads. Their colors are the CSS variables of
`report.css`. Numbers have few digits, so that pages with many charts stay small, and output is
deterministic: the same input gives the same bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

ROOT = Path(__file__).resolve().parents[1]
"""The folder of the package."""
END = "⏎"
"""Symbol for the end of a line."""
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_PICTURES |= dict.fromkeys(range(127, 160), 0x2421)


def signs(text: str) -> str:
    """Makes line ends and control characters of a text visible.

    Args:
        text: text of a token or a class.
    """
    return text.replace("\r\n", "\n").translate(_PICTURES).replace("\n", f"{END}\n")


ENVIRONMENT = Environment(
    loader=FileSystemLoader(ROOT),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {"thousands": "{:,}".format, "signs": signs}


def render(template: str, **values: object) -> Markup:
    """Fills the template of a page, or of a part of one.

    Args:
        template: its path in the package, such as `train/experts/view.html`.
        values: its variables; escaped unless they are `Markup`, as charts are.
    """
    return Markup(ENVIRONMENT.get_template(template).render(values))


def number(value: float, digits: int = 4) -> str:
    """Formats a number with few digits and thousands separators.

    Args:
        value: any number.
        digits: significant digits of numbers below 1,000.
    """
    if not math.isfinite(value):
        return str(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e15):
        return f"{value:.2e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


WIDTH, HEIGHT = 520, 190
"""Size in pixels of a chart."""
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 8, 24
"""Margins in pixels around a chart's drawing, with numbers on the left and below."""
ROW, MOST_CELLS, MOST_NUMBERS = 20, 64, 12
"""Height in pixels of a layer's loads; maximum number of its cells, and of cells with a number."""
BAR = 200
"""Width in pixels of an interval's axis."""

Points = Sequence[tuple[float, float]]


def element(name: str, *inside: object, css: str | None = None, **attributes: object) -> Markup:
    """Makes an escaped SVG element.

    Args:
        name: the tag.
        inside: texts and elements.
        css: its classes.
        attributes: `_` in names is written as `-`; None values are omitted.
    """
    values = {"class": css} | {key.replace("_", "-"): each for key, each in attributes.items()}
    written = "".join(f' {k}="{_short(each)}"' for k, each in values.items() if each is not None)
    return Markup(f"<{name}{written}>{Markup().join(map(escape, inside))}</{name}>")


def _short(value: object) -> str:
    return f"{round(value, 1):g}" if isinstance(value, int | float) else escape(value)


def _drawing(title: str, width: float, height: float, parts: Sequence[Markup]) -> Markup:
    box = f"0 0 {width:g} {height:g}"
    return element("svg", element("title", title), *parts, viewBox=box, role="img")


def _text(x: float, y: float, content: str, anchor: str = "middle") -> Markup:
    return element("text", content, x=x, y=y, text_anchor=anchor)


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels, with `low` at the first and `high` at the last."""

    low: float
    high: float
    first: float
    last: float
    of_ratios: bool = False
    """Whether the axis is logarithmic."""

    def __call__(self, value: float) -> float:
        """The place of a value; values beyond the limits are at the limits."""
        form = math.log if self.of_ratios else float
        low, high = form(self.low), form(self.high)
        share = (form(min(max(value, self.low), self.high)) - low) / ((high - low) or 1.0)
        return self.first + share * (self.last - self.first)

    def ticks(self, count: int = 4) -> list[float]:
        """Round numbers on the axis, approximately `count` of them; of ratios powers of two."""
        if self.of_ratios:
            powers = range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)
            return [2.0**power for power in powers[:: max(1, len(powers) // count)]]
        raw = max(self.high - self.low, 1e-12) / count
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
        numbers = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
        return [round(n * step, 12) + 0.0 for n in numbers]


def interval_axis(values: Sequence[float], *, of_ratios: bool) -> Axis:
    """The axis that all intervals of a table share.

    Args:
        values: the values, and the ends of their intervals.
        of_ratios: whether they are ratios, around 1; else changes, around 0.
    """
    drawn = [value for value in values if math.isfinite(value) and (value > 0 or not of_ratios)]
    low, high = min([*drawn, float(of_ratios)]), max([*drawn, float(of_ratios)])
    return Axis(low, high if high > low else low + 1, 12, BAR - 12, of_ratios)


def axis_labels(axis: Axis) -> Markup:
    """The axis with its numbers, for the head of the column of intervals."""
    parts = [_text(axis(tick), 12, f"{tick:g}") for tick in axis.ticks()]
    parts += [element("line", x1=axis(t), x2=axis(t), y1=15, y2=18) for t in axis.ticks()]
    return _drawing("axis", BAR, 18, parts)


def interval(axis: Axis, value: float, low: float, high: float) -> Markup:
    """Draws a value as a dot and its interval as a bar; without known ends only the dot."""
    at_none = axis(float(axis.of_ratios))
    parts = [element("line", css="zero", x1=at_none, x2=at_none, y1=0, y2=16)]
    if math.isfinite(low) and math.isfinite(high):
        width = max(axis(high) - axis(low), 1.0)
        parts.append(element("rect", css="bar", x=axis(low), y=5, width=width, height=6))
    parts.append(element("circle", css="value", cx=axis(value), cy=8, r=3.5))
    return _drawing(f"{value:+.4f} [{low:+.4f}, {high:+.4f}]", BAR, 16, parts)


def line_chart(title: str, lines: Mapping[str, Points]) -> Markup:
    """Draws curves, each with a name at the upper right.

    Args:
        title: description for screen readers.
        lines: points of each curve, by its name; at least one has points.
    """
    every = [point for points in lines.values() for point in points]
    xs, ys = zip(*every, strict=True)
    room = 0.05 * (max(ys) - min(ys)) or 0.5
    x = Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y = Axis(min(ys) - room, max(ys) + room, HEIGHT - BOTTOM, TOP)
    parts = []
    for tick in y.ticks():
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick)))
        parts.append(_text(LEFT - 6, y(tick) + 4, f"{tick:,g}", "end"))
    parts += [_text(x(t), HEIGHT - 6, f"{t:,.0f}") for t in x.ticks() if t == int(t)]
    for number, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        css = f"curve-{number}"
        parts.append(element("polyline", css=css, points=path))
        if len(points) == 1:
            parts.append(element("circle", css=css, cx=x(points[0][0]), cy=y(points[0][1]), r=3))
        label = _text(WIDTH - RIGHT - 4, TOP + 14 * (number + 1), name, "end")
        parts.append(element("g", label, css=css))
    return _drawing(title, WIDTH, HEIGHT, parts)


def load_matrix(title: str, rows: Mapping[str, Sequence[float]]) -> Markup:
    """Draws the loads of layers, a row for each; many experts are sorted and share cells.

    Args:
        title: description for screen readers.
        rows: loads of a layer's experts as multiples of their mean, by the layer's name.
    """
    parts = []
    for number, (name, loads) in enumerate(rows.items()):
        y, few = TOP + number * ROW, len(loads) <= MOST_CELLS
        parts.append(_text(LEFT + 30, y + 14, name, "end"))
        cells = list(loads) if few else sorted(loads, reverse=True)
        count = min(len(cells), MOST_CELLS)
        width = (WIDTH - RIGHT - LEFT - 36) / count
        for place in range(count):
            first, stop = (each * len(cells) // count for each in (place, place + 1))
            load = sum(cells[first:stop]) / (stop - first)
            strength = min(1.0, abs(math.log2(load)) / 3) if load > 0 else 1.0
            rect = element(
                "rect", css="more" if load >= 1 else "less", x=LEFT + 36 + place * width, y=y,
                width=max(width - 1, 1), height=ROW - 3, fill_opacity=f"{strength:.2f}",
            )  # fmt: skip
            which = f"expert {place}" if few else f"experts {first} to {stop - 1} by load"
            tip = element("title", f"{name}, {which}: {load:.2f} times the mean load")
            shown = [_text(LEFT + 36 + (place + 0.5) * width, y + 13, f"{load:.2f}")]
            parts.append(element("g", tip, rect, *(shown if count <= MOST_NUMBERS else ())))
    return _drawing(title, WIDTH, TOP + len(rows) * ROW + 4, parts)
