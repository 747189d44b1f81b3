"""A small matrix as inline SVG: a coloured cell with a number in it for each row and column."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from polyad.train.page.charts import NARROW, RIGHT, TOP, WIDE, frame

NAMES, SLANTED = 170, 80
"""Pixels for the names of rows, and beside the last column for its name where that is slanted."""
ROW, WIDEST = 26, 76
"""Pixels of a row, and the most of a column."""
MOST_CHARACTERS, CHARACTER = 22, 6.5
"""Of a name, whose whole is in the tooltip; and pixels of one."""
ANGLE = 60
"""Of slanted names, in degrees."""
NARROW_COLUMNS = 6
"""Up to so many columns a matrix stands beside another one."""


class Cell(NamedTuple):
    """A number of a matrix."""

    text: str
    title: str
    """What a tooltip says."""
    strength: float = 0.0
    """Of the colour, from 0 to 1."""
    colour: str = "var(--accent)"


def matrix_chart(
    rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[Cell]], *, title: str
) -> str:
    """Draws a matrix.

    Args:
        rows: their names, from top to bottom.
        columns: their names.
        cells: of each row as many as there are columns.
        title: for a screen reader.

    Returns:
        An SVG element.
    """
    width = NARROW if len(columns) <= NARROW_COLUMNS else WIDE
    longest = min(MOST_CHARACTERS, max(map(len, columns))) * CHARACTER
    each, head = min(WIDEST, (width - NAMES - RIGHT) / len(columns)), 18.0
    slanted = longest > each
    if slanted:
        each = min(WIDEST, (width - NAMES - SLANTED) / len(columns))
        head = 12 + math.ceil(longest * math.sin(math.radians(ANGLE)))
    parts = [frame(title, width, TOP + head + ROW * len(rows) + 6)]
    for number, name in enumerate(columns):
        x, y = NAMES + (number + 0.5) * each, TOP + head - 6
        turned = f' transform="rotate(-{ANGLE} {x:.1f} {y:g})"' if slanted else ""
        anchor = "start" if slanted else "middle"
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{y:g}" text-anchor="{anchor}"{turned}>'
            f"{_short(name)}<title>{escape(name)}</title></text>"
        )
    for row, (name, of_row) in enumerate(zip(rows, cells, strict=True)):
        y = TOP + head + row * ROW
        parts.append(
            f'<text class="tick" x="{NAMES - 8}" y="{y + 17:g}" text-anchor="end">{_short(name)}'
            f"<title>{escape(name)}</title></text>"
        )
        parts += [_cell(cell, NAMES + n * each, y, each) for n, cell in enumerate(of_row)]
    return "".join(parts) + "</svg>"


def _cell(cell: Cell, x: float, y: float, width: float) -> str:
    strength = min(1.0, max(0.0, cell.strength))
    css = "cell on" if strength > 0.6 else "cell"
    return (
        f'<g><title>{escape(cell.title)}</title><rect class="cell" x="{x:.1f}" y="{y:g}" '
        f'width="{width - 2:.1f}" height="{ROW - 2}" rx="2" fill="{cell.colour}" '
        f'fill-opacity="{0.04 + 0.86 * strength:.2f}"/><text class="{css}" '
        f'x="{x + width / 2 - 1:.1f}" y="{y + 16:g}" text-anchor="middle">{escape(cell.text)}'
        f"</text></g>"
    )


def _short(name: str) -> str:
    return escape(name if len(name) <= MOST_CHARACTERS else f"{name[: MOST_CHARACTERS - 1]}…")
