"""The part of a page about images: those that experts get most of, and where patches go."""

import base64
import io
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

import numpy as np

from polyad.train.page.charts import number
from polyad.train.report.top_images import ImageExpert, ImagePass, RoutingMap, TopImage

SIDE, SMALL_SIDE = 112, 72
"""Pixels of a picture; and where there are many."""
MANY = 400
"""Pictures from which they are small, so that a page stays below 5 MB."""
LOSSLESS_SIDE = 48
"""Up to so many pixels a picture is kept as it is: a JPEG would be no smaller, and blur it."""

IMAGE_CSS = """
.pictures { display: grid; gap: .5rem; grid-template-columns: repeat(auto-fill, minmax(104px, 1fr));
  list-style: none; margin: .3rem 0 0; padding: 0; }
.picture { position: relative; aspect-ratio: 1; background-size: 100% 100%; border-radius: 4px;
  image-rendering: auto; overflow: hidden; }
.picture.small { image-rendering: pixelated; }
.picture i { position: absolute; border: 2px solid rgb(255 255 255); outline: 1px solid #000;
  box-sizing: border-box; }
.picture svg { position: absolute; inset: 0; height: 100%; }
.pictures small { display: block; color: var(--soft); font-size: .76rem; overflow-wrap: anywhere; }
"""


def image_style(read: ImagePass) -> str:
    """The style sheet with every picture once.

    Args:
        read: what the page says of images.

    Returns:
        CSS.
    """
    side = SMALL_SIDE if len(read.pixels) > MANY else SIDE
    pictures = "\n".join(
        f".picture.n{number} {{ background-image: url({_data_uri(pixels, side)}); }}"
        for number, pixels in read.pixels.items()
    )
    return f"{IMAGE_CSS}{pictures}\n"


def image_note(read: ImagePass, word: str) -> str:
    """What was read, and what a frame means.

    Args:
        read: what the page says of images.
        word: what a coefficient is called.
    """
    return (
        f'<p class="note">Load over time is of training. Top images: of {read.images:,} of the '
        f"{read.of_images:,} images of the {escape(read.split)} split of {escape(read.data)}; an "
        f"image counts by its highest {word}, and the patch that has it stands in a frame. Unless "
        f"experts were named, half of those shown are the ones that most often have at least half "
        f"of a patch (a ≥ 0.5); the others stand at equal distances in the order of load, down to "
        f"a twentieth of the mean.</p>"
    )


def image_layer(read: ImagePass, layer: str) -> str:
    """The experts of a layer with their images, and the maps of routing.

    Args:
        read: what the page says of images.
        layer: its name.

    Returns:
        HTML; empty where the layer was not read.
    """
    experts = "".join(_expert(read, expert) for expert in read.layers.get(layer, []))
    maps = read.maps.get(layer, [])
    if not experts:
        return ""
    return f'{_maps(read, maps)}<div class="experts">{experts}</div>'


def _expert(read: ImagePass, expert: ImageExpert) -> str:
    facts = (
        f"load {number(expert.load, 3)} times the mean, in {100 * expert.active:.1f}% of the "
        f"patches, at least 0.5 in {100 * expert.dominant:.2f}%"
    )
    tops = "".join(_top(read, image) for image in expert.top)
    body = f'<ol class="pictures">{tops}</ol>' if tops else '<p class="note">No image used it.</p>'
    return (
        f'<div class="expert"><h3>Expert {escape(expert.name)}<span>{facts}</span></h3>{body}</div>'
    )


def _top(read: ImagePass, image: TopImage) -> str:
    frame = "" if image.patch is None else _frame(image.patch, read.grid)
    return (
        f"<li>{picture(read, image.number, frame)}<small><b>{image.coefficient:.3f}</b> "
        f"{escape(image.label)}</small></li>"
    )


def _frame(patch: int, grid: int) -> str:
    row, column = divmod(patch, grid)
    side = 100 / grid
    place = f"left:{column * side:.3g}%;top:{row * side:.3g}%"
    return f'<i style="{place};width:{side:.3g}%;height:{side:.3g}%"></i>'


def picture(read: ImagePass, image: int, over: str = "") -> str:
    """A picture of the style sheet, with what is drawn over it."""
    small = " small" if max(read.pixels[image].shape[:2]) <= LOSSLESS_SIDE else ""
    return f'<div class="picture n{image}{small}">{over}</div>'


def _maps(read: ImagePass, maps: Sequence[RoutingMap]) -> str:
    if not maps:
        return ""
    shown = "".join(
        f"<li>{picture(read, each.number, _map(each.first, read.grid))}"
        f"<small>{escape(each.label)}: {len(set(each.first))} experts</small></li>"
        for each in maps
    )
    return (
        "<h3>Where patches go</h3>"
        '<p class="note">The colour of a patch is its first expert; the pointer names it.</p>'
        f'<ol class="pictures">{shown}</ol>'
    )


def _map(first: Sequence[int], grid: int) -> str:
    rects = []
    for row in range(grid):
        column = 0
        for expert, run in groupby(first[row * grid : (row + 1) * grid]):
            width = len(list(run))
            rects.append(
                f'<rect x="{column}" y="{row}" width="{width}" height="1" fill="{_colour(expert)}" '
                f'fill-opacity=".55"><title>expert {expert}</title></rect>'
            )
            column += width
    return f'<svg viewBox="0 0 {grid} {grid}" preserveAspectRatio="none">{"".join(rects)}</svg>'


def _colour(expert: int) -> str:
    """Neighbouring numbers have hues far apart: steps of the golden angle."""
    return f"hsl({expert * 137.508 % 360:.0f} 75% 50%)"


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
