"""Figures of several panels for plans, as a file or a part of a page."""

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from polyad.train.page.charts import (
    Area,
    Axis,
    Chart,
    Line,
    curves,
    element,
    text,
)
from polyad.train.page.template import COLOURS, render

WIDTH, MARGIN, GAP = 520, 16, 28
"""Pixels of a panel, around all panels, and between two."""
HEAD, FOOT = 44, 34
"""Pixels above and below a panel's drawing."""
NAMED, IN_A_ROW = 18, 3
"""Height in pixels of a row of curves' names, and number of names per row."""


def _heading(title: str, note: str) -> list[Markup]:
    """A panel's title, and the explanation of its marks."""
    return [text(0, 14, title, css="title"), *([text(0, 30, note)] if note else [])]


def curve_panel(
    title: str,
    note: str,
    xs: Sequence[float],
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    x_labels: Mapping[float, str],
    y_labels: Mapping[float, str] | None = None,
    height: int = 280,
) -> Chart:
    """A panel of curves, with their names above.

    Args:
        title: the title.
        note: explanation of the marks.
        xs: horizontal positions of all lines' values.
        lines: lines with equally many values; a line without a label has no name.
        x: the horizontal axis.
        y: the vertical axis.
        x_labels: labels below the panel, by position.
        y_labels: labels beside it, by position; None: round numbers.
        height: height in pixels.
    """
    named = [line for line in lines if line.label]
    above = HEAD + NAMED * math.ceil(len(named) / IN_A_ROW)
    area = Area(58, above, WIDTH - 12, height - FOOT)
    if y_labels is None:
        y_labels = {tick: f"{tick:g}" for tick in y.ticks(6)}
    parts = _heading(title, note) + curves(xs, lines, x, y, area, x_labels, y_labels)
    for number, line in enumerate(named):
        row, column = divmod(number, IN_A_ROW)
        parts.append(
            element(
                "text",
                line.label,
                css="name",
                x=area.left + 150 * column,
                y=HEAD + 4 + NAMED * row,
                style=f"fill:{line.colour}",
            )
        )
    return Chart(title=title, width=WIDTH, height=height, parts=parts)


def sheet(title: str, panels: Sequence[Chart], *, note: str = "", inline: bool = False) -> str:
    """A figure: its panels in rows of two.

    Args:
        title: description for screen readers.
        panels: panels of equal width.
        note: text above them.
        inline: whether it is for a page, which has the charts' style sheet, or for a file.

    Returns:
        The text of an SVG file, or an element.
    """
    y = float(MARGIN + 20 * bool(note))
    parts = [text(MARGIN, y - 8, note)] if note else []
    for first in range(0, len(panels), 2):
        pair = panels[first : first + 2]
        parts += [panel.at(MARGIN + column * (WIDTH + GAP), y) for column, panel in enumerate(pair)]
        y += max(panel.height for panel in pair) + GAP
    width = 2 * MARGIN + WIDTH + (WIDTH + GAP if len(panels) > 1 else 0)
    before = [element("title", title)]
    if not inline:
        style = element("style", render("train/page/chart.css"))
        before += [style, element("rect", width="100%", height="100%", fill="var(--card)")]
    drawn = element(
        "svg",
        *(*before, *parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {y:g}",
        width=width,
        height=y,
        style=f"max-width:{width}px;min-width:{0.65 * width:.0f}px" if inline else None,
        role="img",
        aria_label=title,
    )
    return str(drawn) if inline else f"{in_light(drawn)}\n"


def in_light(drawing: str) -> str:
    """Fills in the colors of the light scheme, since not every SVG viewer supports variables.

    Args:
        drawing: SVG.
    """
    for name, (light, _) in COLOURS.items():
        drawing = drawing.replace(f"var(--{name})", light)
    return drawing
