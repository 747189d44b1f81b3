"""Charts as inline SVG: lines, heat maps and small matrices. Colours are CSS variables of
`style.py`.

Numbers are written with few digits, so that a page of many charts stays small, and nothing depends
on a clock or on the order of a set: the same input gives the same bytes.
"""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NARROW, WIDE, HEIGHT = 640, 1060, 220
"""Pixels of a chart beside another, and of one as wide as the page: text is as large in both."""
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 10, 26
MOST_COLUMNS = WIDE - LEFT - RIGHT
"""Columns of a heat map: one for each of its pixels."""
RAMP = (
    *((228, 238, 234), (178, 210, 206), (116, 172, 181)),
    *((66, 125, 155), (38, 80, 120), (22, 34, 66)),
)
"""From little to much: monotone in lightness, so that it can be read without colours. The dark
scheme turns it over."""
OCTAVES = 4
"""A heat map's colours go from 1 / 2^OCTAVES of the mean load to 2^OCTAVES times it."""
NAMES, SLANTED = 170, 80
"""Pixels for the names of rows, and beside the last column for its name where that is slanted."""
ROW, WIDEST = 26, 76
"""Pixels of a row, and the most of a column."""
MOST_CHARACTERS, CHARACTER = 22, 6.5
"""Characters of a name, whose whole is in the tooltip; and pixels of one."""
ANGLE = 60
"""The slant of names, in degrees."""
NARROW_COLUMNS = 6
"""Up to so many columns a matrix stands beside another one."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve."""

    label: str
    values: Sequence[float | None]
    """None leaves a gap."""
    colour: str
    """A CSS colour."""
    with_points: bool = False
    """Whether the values are few: they are joined over gaps, and each is marked."""


def number(value: float, digits: int = 4) -> str:
    """A number for a person: few digits, thousands apart."""
    if not math.isfinite(value):
        return str(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e15):
        return f"{value:.2e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from low to high, about as many as are wanted."""
    raw = max(high - low, 1e-12) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    steps: Sequence[int],
    lines: Sequence[Line],
    *,
    title: str,
    low: float | None = None,
    high: float | None = None,
    width: int = NARROW,
) -> str:
    """Curves over steps, with a tooltip for each span of steps.

    Args:
        steps: of every value.
        lines: as many values each.
        title: what is drawn, for a screen reader.
        low: the lowest value of the axis; None: the lowest of all values.
        high: the highest; None: of all values.
        width: of the drawing.

    Returns:
        An SVG element.
    """
    known = [v for line in lines for v in line.values if v is not None and math.isfinite(v)]
    if not known:
        return '<p class="none">No numbers.</p>'
    bottom = min(known) if low is None else low
    top = max(known) if high is None else high
    if top - bottom < 1e-9 * max(1.0, abs(top)):
        bottom, top = (low, low + 1) if low is not None else (bottom - 0.5, top + 0.5)
    margin = 0.05 * (top - bottom)
    bottom, top = bottom - (low is None) * margin, top + (high is None) * margin
    x = _axis(steps[0], steps[-1], LEFT, width - RIGHT)
    y = _axis(bottom, top, HEIGHT - BOTTOM, TOP)
    parts = [frame(title, width), *_grid(steps, ticks(bottom, top), x, y, width)]
    for line in lines:
        parts.append(_curve(steps, line, x, y, bottom, top))
    parts += _tooltips(steps, lines, x, width)
    return "".join(parts) + "</svg>"


class _axis:
    """From values to pixels."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self._low, self._scale, self._first = low, (last - first) / ((high - low) or 1.0), first

    def __call__(self, value: float) -> float:
        return round(self._first + (value - self._low) * self._scale, 1)


def _columns_axis(steps: Sequence[int], first: float, last: float) -> Callable[[float], float]:
    """From steps to pixels where every step has a column of its own: between the columns' middles,
    wherever the steps stand."""
    middles = first + (last - first) * (np.arange(len(steps)) + 0.5) / len(steps)
    return lambda step: round(float(np.interp(step, steps, middles)), 1)


def frame(title: str, width: int, height: float = HEIGHT) -> str:
    """The beginning of an SVG element, with its title for a screen reader."""
    css = ' class="wide"' if width == WIDE else ""
    return (
        f'<svg{css} viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>"
    )


def _grid(
    steps: Sequence[int], values: Sequence[float], x: _axis, y: _axis, width: int
) -> list[str]:
    parts = []
    for value in values:
        label = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y(value) + 4:g}" text-anchor="end">'
            f"{label}</text>"
        )
    return parts + step_ticks(steps, x, HEIGHT)


def step_ticks(steps: Sequence[int], x: Callable[[float], float], height: float) -> list[str]:
    """The numbers below a chart."""
    places = ticks(steps[0], steps[-1], 6) if len(steps) > 1 else [float(steps[0])]
    return [
        f'<text class="tick" x="{x(place)}" y="{height - 8:g}" text-anchor="middle">'
        f"{place:,.0f}</text>"
        for place in places
        if place == int(place)
    ]


def _curve(steps: Sequence[int], line: Line, x: _axis, y: _axis, bottom: float, top: float) -> str:
    path, pen, dots = [], "M", []
    for step, value in zip(steps, line.values, strict=True):
        if value is None or not math.isfinite(value):
            pen = pen if line.with_points else "M"
            continue
        place = f"{x(step)} {y(min(max(value, bottom), top))}"
        path.append(f"{pen}{place}")
        pen = "L"
        if line.with_points or len(steps) == 1:
            cx, cy = place.split()
            dots.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{line.colour}"/>')
    return f'<path class="curve" stroke="{line.colour}" d="{"".join(path)}"/>' + "".join(dots)


def _tooltips(steps: Sequence[int], lines: Sequence[Line], x: _axis, width: int) -> list[str]:
    """A strip for each step that says its values."""
    edges = [x(step) for step in steps]
    between = [(a + b) / 2 for a, b in pairwise(edges)]
    bounds = [LEFT, *between, width - RIGHT]
    parts = []
    for i, step in enumerate(steps):
        said = [
            f"{line.label} {number(value)}"
            for line in lines
            if (value := line.values[i]) is not None
        ]
        wide = max(bounds[i + 1] - bounds[i], 0.1)
        parts.append(
            f'<rect class="hit" x="{bounds[i]:.1f}" y="{TOP}" width="{wide:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>'
            f"{escape(f'step {step:,}: ' + ', '.join(said))}</title></rect>"
        )
    return parts


def legend(lines: Sequence[Line]) -> str:
    """Names beside colours."""
    items = "".join(
        f'<li><i style="background:{line.colour}"></i>{escape(line.label)}</li>' for line in lines
    )
    return f'<ul class="legend">{items}</ul>'


def heat_map(
    steps: Sequence[int],
    relative_RC: npt.NDArray[np.float64],
    names: Sequence[str],
    *,
    title: str,
) -> str:
    """Load over time: a row an expert, or a few; a column a span of steps.

    Args:
        steps: of every column; at any distances, the columns are equally wide.
        relative_RC: load over the mean load; NaN where nothing is known, 0 is left transparent.
        names: of each row, for its tooltip.
        title: for a screen reader.

    Returns:
        An SVG element around an indexed PNG.
    """
    rows = relative_RC.shape[0]
    plot = max(96, min(256, rows * 12))
    height = plot + TOP + BOTTOM
    x = _columns_axis(steps, LEFT, WIDE - RIGHT)
    data = base64.b64encode(_png(_indices(relative_RC))).decode()
    parts = [
        frame(title, WIDE, height),
        f'<rect class="unused" x="{LEFT}" y="{TOP}" width="{WIDE - RIGHT - LEFT}" '
        f'height="{plot}"/>',
        f'<image x="{LEFT}" y="{TOP}" width="{WIDE - RIGHT - LEFT}" height="{plot}" '
        f'preserveAspectRatio="none" href="data:image/png;base64,{data}"/>',
    ]
    each = plot / rows
    shown = max(1, math.ceil(18 / each))
    for row, name in enumerate(names):
        y = TOP + row * each
        if row % shown == 0:
            label = name.partition(":")[0].removeprefix("expert ")
            parts.append(
                f'<text class="tick" x="{LEFT - 6}" y="{y + min(each, 14) / 2 + 4:.1f}" '
                f'text-anchor="end">{escape(label)}</text>'
            )
        parts.append(
            f'<rect class="hit" x="{LEFT}" y="{y:.1f}" width="{WIDE - RIGHT - LEFT}" '
            f'height="{each:.1f}"><title>{escape(name)}</title></rect>'
        )
    return "".join([*parts, *step_ticks(steps, x, height)]) + "</svg>"


def heat_legend() -> str:
    """What the colours of a heat map mean."""
    stops = ",".join(f"rgb({r},{g},{b})" for r, g, b in RAMP)
    return (
        f'<div class="ramp"><span class="key unused-key"></span><span>unused (0)</span>'
        f"<span>1/{2**OCTAVES} of the mean load or less</span>"
        f'<i style="background:linear-gradient(90deg,{stops})"></i><span>{2**OCTAVES} times or '
        f"more</span></div>"
    )


def _indices(relative_RC: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """0 is transparent, 1 to 255 the ramp over octaves."""
    with np.errstate(divide="ignore", invalid="ignore"):
        octave_RC = np.clip(np.log2(relative_RC), -OCTAVES, OCTAVES)
    scaled_RC = 1 + 254 * (octave_RC + OCTAVES) / (2 * OCTAVES)
    return np.where(relative_RC > 0, np.nan_to_num(scaled_RC), 0).round().astype(np.uint8)


def _png(indices_RC: npt.NDArray[np.uint8]) -> bytes:
    """An indexed image whose colour 0 is transparent."""
    rows, columns = indices_RC.shape
    places = np.linspace(0, len(RAMP) - 1, 255)
    channels = [
        np.interp(places, range(len(RAMP)), [colour[c] for colour in RAMP]) for c in range(3)
    ]
    palette = bytes(3) + np.stack(channels, 1).round().astype(np.uint8).tobytes()
    raw = b"".join(b"\0" + row.tobytes() for row in indices_RC)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette), (b"tRNS", b"\0"),
              (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


class Cell(NamedTuple):
    """A number of a matrix."""

    text: str
    title: str
    """What a tooltip says."""
    strength: float = 0.0
    """The strength of the colour, from 0 to 1."""
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
