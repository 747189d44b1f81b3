"""Heat maps of load over time, and small matrices.

Shapes: R rows, C columns.
"""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from polyad.train.page.charts import (
    BOTTOM,
    LEFT,
    NARROW,
    RIGHT,
    TOP,
    WIDE,
    Area,
    Chart,
    box,
    element,
    labels_below,
    step_labels,
    text,
)
from polyad.train.page.template import render

MOST_COLUMNS = WIDE - LEFT - RIGHT
"""Maximum number of columns of a heat map: one per pixel."""
RAMP = (
    *((228, 238, 234), (178, 210, 206), (116, 172, 181)),
    *((66, 125, 155), (38, 80, 120), (22, 34, 66)),
)
"""Color ramp from low to high, monotone in lightness, so that it can be read without colors. The
dark scheme reverses it."""
OCTAVES = 4
"""A heat map's colors range from 1 / 2^OCTAVES of the mean load to 2^OCTAVES times it."""
NAMES, SLANTED = 170, 80
"""Pixels for the names of rows, and beside the last column for its slanted name."""
ROW, WIDEST = 26, 76
"""Height of a row, and maximum width of a column, in pixels."""
MOST_CHARACTERS, CHARACTER = 22, 6.5
"""Maximum number of characters of a name, which is complete in the tooltip; and pixels per
character."""
ANGLE = 60
"""Slant of names, in degrees."""
NARROW_COLUMNS = 6
"""Maximum number of columns of a matrix that is placed beside another one."""


@dataclass(frozen=True, kw_only=True)
class HeatMap(Chart):
    """A chart on top of shaded cells."""

    indices_RC: npt.NDArray[np.uint8]
    """The shade of each cell: 0 is transparent (unused), 1 to 255 are the ramp's."""
    area: Area
    """The area of the cells."""

    def below(self, *, in_file: bool) -> list[Markup]:
        """The shades; in a page an image with one pixel per cell."""
        return [box(self.area, "unused"), *(self._paths() if in_file else [self._image()])]

    def _image(self) -> Markup:
        left, top, right, bottom = self.area
        return element(
            "image",
            x=left,
            y=top,
            width=right - left,
            height=bottom - top,
            preserveAspectRatio="none",
            href=f"data:image/png;base64,{base64.b64encode(_png(self.indices_RC)).decode()}",
        )

    def _paths(self) -> list[Markup]:
        """Runs of cells with approximately the same color."""
        rows, columns = self.indices_RC.shape
        wide, high = (self.area.right - LEFT) / columns, (self.area.bottom - TOP) / rows
        coarse_RC = np.where(self.indices_RC > 0, 1 + (self.indices_RC - 1) // 6 * 6, 0)
        boxes: dict[int, list[str]] = {}
        for row, shade_C in enumerate(coarse_RC.tolist()):
            column = 0
            for shade, run in groupby(shade_C):
                length = len(list(run))
                x, long = LEFT + column * wide, length * wide + 0.3  # without seams
                cell = f"M{x:.1f} {TOP + row * high:.0f}h{long:.1f}v{high:.0f}h-{long:.1f}z"
                boxes.setdefault(shade, []).append(cell)
                column += length
        boxes.pop(0, None)
        palette = _palette()
        return [
            element("path", fill=f"#{palette[3 * s : 3 * s + 3].hex()}", d="".join(found))
            for s, found in boxes.items()
        ]


def heat_map(
    steps: Sequence[int],
    relative_RC: npt.NDArray[np.float64],
    names: Sequence[str],
    *,
    title: str,
) -> Chart:
    """Draws load over time: a row per expert or a few experts, a column per span of steps.

    Args:
        steps: the step of every column; columns are equally wide whatever their distance.
        relative_RC: load divided by the mean load; NaN where unknown, 0 is transparent.
        names: the name of each row, for its tooltip.
        title: description for screen readers.
    """
    rows, columns = relative_RC.shape
    plot = max(96, min(256, rows * 12))
    area = Area(LEFT, TOP, WIDE - RIGHT, TOP + plot)
    each = plot / rows
    shown = max(1, math.ceil(18 / each))
    parts, tooltips = [], []
    for row, name in enumerate(names):
        y = TOP + row * each
        if row % shown == 0:
            label = name.partition(":")[0].removeprefix("expert ")
            parts.append(text(LEFT - 6, y + min(each, 14) / 2 + 4, label, "end"))
        tooltips.append(box(Area(area.left, y, area.right, y + each), "hit", name))
    # The centers of the columns, whatever their steps.
    middles = LEFT + (area.right - LEFT) * (np.arange(columns) + 0.5) / columns

    def x(step: float) -> float:
        return round(float(np.interp(step, steps, middles)), 1)

    return HeatMap(
        title=title,
        width=WIDE,
        height=plot + TOP + BOTTOM,
        parts=[*parts, *labels_below(step_labels(steps), x, area.bottom)],
        tooltips=tooltips,
        indices_RC=_indices(relative_RC),
        area=area,
    )


def heat_legend() -> Markup:
    """The legend of a heat map's colors."""
    return render("train/page/heat_legend.html", ramp=RAMP, times=2**OCTAVES)


def _indices(relative_RC: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """0 is transparent, 1 to 255 the ramp over octaves."""
    with np.errstate(divide="ignore", invalid="ignore"):
        octave_RC = np.clip(np.log2(relative_RC), -OCTAVES, OCTAVES)
    scaled_RC = 1 + 254 * (octave_RC + OCTAVES) / (2 * OCTAVES)
    return np.where(relative_RC > 0, np.nan_to_num(scaled_RC), 0).round().astype(np.uint8)


def _palette() -> bytes:
    """Red, green and blue of each index."""
    places = np.linspace(0, len(RAMP) - 1, 255)
    channels = [
        np.interp(places, range(len(RAMP)), [colour[c] for colour in RAMP]) for c in range(3)
    ]
    return bytes(3) + np.stack(channels, 1).round().astype(np.uint8).tobytes()


def _png(indices_RC: npt.NDArray[np.uint8]) -> bytes:
    """An indexed PNG image in which color 0 is transparent."""
    rows, columns = indices_RC.shape
    raw = b"".join(b"\0" + row.tobytes() for row in indices_RC)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", _palette()), (b"tRNS", b"\0"),
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
    """Strength of the color, from 0 to 1."""
    colour: str = "var(--accent)"


def matrix_chart(
    rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[Cell]], *, title: str
) -> Chart:
    """Draws a matrix.

    Args:
        rows: their names, from top to bottom.
        columns: their names.
        cells: for each row one cell per column.
        title: description for screen readers.
    """
    width = NARROW if len(columns) <= NARROW_COLUMNS else WIDE
    longest = min(MOST_CHARACTERS, max(map(len, columns))) * CHARACTER
    each, head = min(WIDEST, (width - NAMES - RIGHT) / len(columns)), 18.0
    slanted = longest > each
    if slanted:
        each = min(WIDEST, (width - NAMES - SLANTED) / len(columns))
        head = 12 + math.ceil(longest * math.sin(math.radians(ANGLE)))
    parts = []
    for number_, name in enumerate(columns):
        x, y = NAMES + (number_ + 0.5) * each, TOP + head - 6
        turned = f"rotate(-{ANGLE} {x:.1f} {y:g})" if slanted else None
        parts.append(_name(name, x, y, "start" if slanted else "middle", turned))
    for row, (name, of_row) in enumerate(zip(rows, cells, strict=True)):
        y = TOP + head + row * ROW
        parts.append(_name(name, NAMES - 8, y + 17, "end"))
        parts += [_cell(cell, NAMES + n * each, y, each) for n, cell in enumerate(of_row)]
    height = TOP + head + ROW * len(rows) + 6
    return Chart(title=title, width=width, height=height, parts=parts)


def _name(name: str, x: float, y: float, anchor: str, transform: str | None = None) -> Markup:
    """A name, truncated; the tooltip has it in full."""
    short = name if len(name) <= MOST_CHARACTERS else f"{name[: MOST_CHARACTERS - 1]}…"
    whole = element("title", name)
    return element(
        "text", short, whole, css="tick", x=x, y=y, text_anchor=anchor, transform=transform
    )


def _cell(cell: Cell, x: float, y: float, width: float) -> Markup:
    strength = min(1.0, max(0.0, cell.strength))
    css = "cell on" if strength > 0.6 else "cell"
    return element(
        "g",
        element("title", cell.title),
        element(
            "rect",
            css="cell",
            x=x,
            y=y,
            width=width - 2,
            height=ROW - 2,
            rx=2,
            fill=cell.colour,
            fill_opacity=0.04 + 0.86 * strength,
        ),
        text(x + width / 2 - 1, y + 16, cell.text, "middle", css),
    )
