"""The part of a page about single layers: load over time, and facts beside their experts."""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polyad.train.experts.probing import EVERY, RoutedLayer
from polyad.train.page.charts import WIDE, Line, line_chart
from polyad.train.page.html import Figure
from polyad.train.page.matrices import heat_map
from polyad.train.page.template import number
from polyad.train.report.content import Report
from polyad.train.report.history import History, LayerHistory, Series
from polyad.train.report.top_images import ImagePass

MAX_ROWS = 256
"""Maximum number of rows of a heat map; more experts share rows."""
IN_ORDER = 32
"""Up to this many experts are in numerical order, more are ordered by load."""
FEW_LAYERS = 4
"""Up to this many layers are all expanded; of more only the first."""
SIDE, SMALL_SIDE = 112, 72
"""Pixels of a picture; and if there are many."""
MANY = 400
"""Number of pictures above which they are small, so that a page stays below 5 MB."""
LOSSLESS_SIDE = 48
"""Up to this many pixels a picture is not compressed: a JPEG would be blurred and no smaller."""


@dataclass(frozen=True, kw_only=True)
class ShownLayer:
    """A layer as shown on a page, without its experts."""

    layer: RoutedLayer
    is_open: bool
    facts: Sequence[str]
    loads: Sequence[Figure]
    """Load over time for each level."""
    entropy: Figure | None
    name: str | int
    """Its name in `--layers`."""


def maximum_entropy(layer: RoutedLayer) -> float:
    """The largest entropy that a token's coefficients can have over all leaves, in nats."""
    return math.log(max(2, math.prod(layer.levels)))


def shown_layers(report: Report) -> list[ShownLayer]:
    """The layers with experts, in the model's order."""
    found = []
    for place, layer in enumerate(report.routed):
        history = report.history.layers.get(layer.name, LayerHistory())
        found.append(
            ShownLayer(
                layer=layer,
                is_open=place == 0 or len(report.routed) <= FEW_LAYERS,
                facts=_facts(layer, history),
                loads=load_figures(report.history, layer, history),
                entropy=_entropy_figure(report.history.steps, layer, history),
                name=layer.block if layer.in_block else EVERY,
            )
        )
    return found


def _facts(layer: RoutedLayer, history: LayerHistory) -> list[str]:
    said = [" × ".join(f"{size:,}" for size in layer.levels) + " experts"]
    for measure, factor, form in (
        ("entropy", 100 / maximum_entropy(layer), "entropy {:.0f}% of its maximum"),
        ("effective_experts", 1, "{:.1f} effective experts"),
        ("load_max", 1, "busiest expert {:.2f} times the mean load"),
        ("unused", 100, "{:.0f}% of the experts unused"),
    ):
        value = history.last(measure)
        if value is not None:
            said.append(form.format(value * factor))
    return said


def _entropy_figure(
    steps: Sequence[int], layer: RoutedLayer, history: LayerHistory
) -> Figure | None:
    """Entropy divided by its maximum; for each level if there are several."""
    lines = []
    if "entropy" in history.scalars:
        whole = history.scalars["entropy"]
        label = "all levels" if len(layer.levels) > 1 else "entropy"
        lines.append(_entropy_line(label, whole, maximum_entropy(layer), "var(--accent)"))
    rows = history.lists.get("level_entropy", [])
    for level, size in enumerate(layer.levels if rows else ()):
        values = [None if row is None else float(row[level]) for row in rows]
        share = round(100 * level / max(1, len(layer.levels) - 1))
        colour = f"color-mix(in oklab, var(--ink) {share}%, var(--second))"
        lines.append(_entropy_line(f"level {level}", values, math.log(max(2, size)), colour))
    if not lines:
        return None
    return Figure(
        heading="Entropy over time",
        body=line_chart(steps, lines, title="Entropy over time", low=0.0, high=1.0, width=WIDE),
        caption="Divided by its maximum, the logarithm of the number of experts.",
        legend=lines if len(lines) > 1 else (),
    )


def _entropy_line(label: str, values: Series, maximum: float, colour: str) -> Line:
    scaled = [None if value is None else min(1.0, value / maximum) for value in values]
    # Few steps may have routing records, so points are joined.
    return Line(label=label, values=scaled, colour=colour, with_points=None in scaled)


def load_figures(times: History, layer: RoutedLayer, history: LayerHistory) -> list[Figure]:
    """Heat maps of the load of each level; empty without records."""
    width = sum(layer.levels)
    known = [row for row in history.load if row is not None and row.size == width]
    if not known:
        return []
    unknown = np.full(width, np.nan)
    table = []
    for row in history.load:  # columns without a record of this layer repeat the last one
        unknown = row if row is not None and row.size == width else unknown
        table.append(unknown)
    load_SC = np.stack(table, axis=1)
    if np.isnan(load_SC[:, 0]).all():
        load_SC = np.where(np.isnan(load_SC), known[0][:, None], load_SC)
    figures, first = [], 0
    for level, size in enumerate(layer.levels):
        relative_RC = size * load_SC[first : first + size]
        heading = "Load over time" if len(layer.levels) == 1 else f"Load over time, level {level}"
        figures.append(_load_figure(times, relative_RC, heading))
        first += size
    return figures


def _load_figure(times: History, relative_RC: npt.NDArray[np.float64], heading: str) -> Figure:
    size = relative_RC.shape[0]
    order = np.arange(size)
    if size > IN_ORDER:
        order = np.argsort(-relative_RC[:, -1], kind="stable")
    groups = np.array_split(order, min(size, MAX_ROWS))
    names = [_row_name([int(e) for e in group], relative_RC[group, -1].mean()) for group in groups]
    shown_RC = np.stack([relative_RC[group].mean(0) for group in groups])
    sorted_by = "by number" if size <= IN_ORDER else "by latest load, busiest first"
    shared = f" ({math.ceil(size / MAX_ROWS)} experts share a row)" if size > MAX_ROWS else ""
    column = "step" if times.load_width == 1 else f"{times.load_width:,} steps"
    return Figure(
        heading=heading,
        body=heat_map(times.load_steps, shown_RC, names, title=heading),
        caption=f"One row per expert{shared}, sorted {sorted_by}; one column per {column} whose "
        "record "
        "has the load of single experts (log.every).",
    )


def _row_name(experts: Sequence[int], load: float) -> str:
    which = f"expert {experts[0]}" if len(experts) == 1 else f"experts {experts[0]}, ..."
    return f"{which}: latest load {number(float(load), 3)} times the mean"


class Run(NamedTuple):
    """Adjacent patches that go to the same expert."""

    row: int
    column: int
    width: int
    expert: int

    @property
    def colour(self) -> str:
        """A color whose hues for adjacent numbers are far apart, by steps of the golden angle."""
        return f"hsl({self.expert * 137.508 % 360:.0f} 75% 50%)"


class Pictures:
    """The pictures of a page, each of which is in the style sheet once and named by number.

    Args:
        read: results on images.
    """

    def __init__(self, read: ImagePass) -> None:
        self._read = read

    def uris(self) -> dict[int, str]:
        """Data URIs of the pictures by number."""
        side = SMALL_SIDE if len(self._read.pixels) > MANY else SIDE
        return {number: _data_uri(pixels, side) for number, pixels in self._read.pixels.items()}

    def is_small(self, image: int) -> bool:
        """Whether a picture has so few pixels that they are shown as squares."""
        height, width, _ = self._read.pixels[image].shape
        return bool(max(height, width) <= LOSSLESS_SIDE)

    def frame(self, patch: int) -> str:
        """The position of a patch as CSS."""
        row, column = divmod(patch, self._read.grid)
        side = 100 / self._read.grid
        place = f"left:{column * side:.3g}%;top:{row * side:.3g}%"
        return f"{place};width:{side:.3g}%;height:{side:.3g}%"

    def runs(self, first: Sequence[int]) -> list[Run]:
        """Runs of patches of an image, from the first expert of each."""
        found, grid = [], self._read.grid
        for row in range(grid):
            column = 0
            for expert, run in groupby(first[row * grid : (row + 1) * grid]):
                width = len(list(run))
                found.append(Run(row, column, width, expert))
                column += width
        return found


def _data_uri(pixels: np.ndarray[Any, Any], side: int) -> str:
    from PIL import Image

    image = Image.fromarray(pixels)
    file = io.BytesIO()
    if max(image.size) <= LOSSLESS_SIDE:
        image.save(file, "PNG", optimize=True)
        kind = "png"
    else:
        image.thumbnail((side, side))
        image.save(file, "JPEG", quality=80)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
