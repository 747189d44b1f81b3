"""Held-out images and patches with each expert's highest weights, and the experts of all patches in
a few images.

Shapes: B images, T tokens of an image, S experts of all levels side by side.
"""

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polyad.model.vision import ImageModelSettings
from polyad.train.experts.probing import Decision, RoutedLayer
from polyad.train.reading import ForwardPass, Subject
from polyad.train.report.top_tokens import Highest, ShownExpert, TopTokens
from polyad.train.tasks.samples import ImageSamples

MAPPED = 6
"""Number of images for which the page shows the experts of all patches."""
MOST_IMAGES = 20_000
"""Maximum number of images to read."""
WHOLE_IMAGE = 1 << 20
"""More tokens than an image has, so that only the highest of each image counts."""
SIDE, LOSSLESS_SIDE = 96, 48
"""Pixels of a picture; up to the second an image is not compressed: a JPEG would be blurred and no
smaller."""


class TopImage(NamedTuple):
    """An image with a high weight of an expert."""

    weight: float
    """Highest weight over its tokens."""
    number: int
    """The image's number in its split."""
    label: str
    patch: int | None
    """The patch with that weight, in row-major order; None for the class token, and if tokens are
    not patches."""


class RoutingMap(NamedTuple):
    """The experts of one image's patches in one layer."""

    number: int
    label: str
    first: list[int]
    """The expert with the highest weight for each patch, in row-major order."""


@dataclass(frozen=True, kw_only=True)
class ImagePass:
    """The pictures of a page, each of which is in the style sheet once and named by number."""

    grid: int
    """Number of patches per row."""
    maps: dict[str, list[RoutingMap]]
    """Maps by layer name; empty if tokens are not patches."""
    pixels: dict[int, np.ndarray[Any, Any]]
    """The images to show, [H, W, 3] uint8, by number."""

    def uris(self) -> dict[int, str]:
        """Data URIs of the pictures by number."""
        return {number: _data_uri(pixels) for number, pixels in self.pixels.items()}

    def frame(self, patch: int) -> str:
        """The position of a patch as CSS."""
        row, column = divmod(patch, self.grid)
        side = 100 / self.grid
        place = f"left:{column * side:.3g}%;top:{row * side:.3g}%"
        return f"{place};width:{side:.3g}%;height:{side:.3g}%"

    def runs(self, first: Sequence[int]) -> list[tuple[int, int, int, int, float]]:
        """Adjacent patches with the same first expert: row, column, number of patches, expert, and
        its hue, which is far from those of its neighbors."""
        runs, grid = [], self.grid
        for row in range(grid):
            column = 0
            for expert, run in groupby(first[row * grid : (row + 1) * grid]):
                width = len(list(run))
                runs.append((row, column, width, expert, expert * 137.508 % 360))
                column += width
        return runs


def _data_uri(pixels: np.ndarray[Any, Any]) -> str:
    from PIL import Image

    image, file, kind = Image.fromarray(pixels), io.BytesIO(), "png"
    if max(image.size) > LOSSLESS_SIDE:
        image.thumbnail((SIDE, SIDE))
        kind = "jpeg"
    image.save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _by_image(decision: Decision, images: int) -> Tensor:
    """Weights [B, T, S] of a layer."""
    a_MS = decision.coefficients()
    return a_MS.view(images, -1, a_MS.shape[-1])


def _tokens_before_patches(name: str, tokens: int, grid: int) -> int | None:
    """Number of class tokens, which precede the patches; None if the tokens are not patches."""
    before = tokens - grid * grid
    return None if name.endswith("token_feed_forward") or before not in (0, 1) else before


class TopImages:
    """Collects the top images of each expert.

    Args:
        layers: the layers whose experts are shown.
        samples: the samples to read.
        top: number of images per expert.
        device: the model's device.
    """

    def __init__(
        self, layers: Sequence[RoutedLayer], samples: ImageSamples, top: int, device: str
    ) -> None:
        self._layers, self._samples = layers, samples
        self._tops = {each.name: TopTokens(each, top, device, WHOLE_IMAGE) for each in layers}
        self._tokens: dict[str, int] = {}
        model = samples.task.model
        self._grid = 1
        if isinstance(model, ImageModelSettings):
            self._grid = model.image_size // model.patch_size
        self._in_words = samples.task.labels_in_words(samples.split)

    def add(self, forward_pass: ForwardPass) -> None:
        """Adds a batch."""
        number_R = forward_pass.number_R
        of_split_R = torch.tensor(self._samples.numbers, device=number_R.device)[number_R]
        for name, top in self._tops.items():
            a_BTS = _by_image(forward_pass.decisions[name], len(number_R))
            self._tokens[name] = length = a_BTS.shape[1]
            place_T = torch.arange(length, device=number_R.device)
            top.add(a_BTS, of_split_R.unsqueeze(-1) * length + place_T)

    def result(self, experts: Sequence[str]) -> dict[str, list[ShownExpert]]:
        """Returns the experts to show in each layer.

        Args:
            experts: names of experts to show in every layer; empty: some are picked.

        Raises:
            ConfigError: weights are not finite.
        """
        return {
            name: top.shown(experts, functools.partial(self._images, name))
            for name, top in self._tops.items()
        }

    def pictures(self, model: nn.Module, shown: Mapping[str, list[ShownExpert]]) -> ImagePass:
        """Returns the pictures of a page.

        Args:
            model: reads a few images again, to map their patches.
            shown: the experts to show in each layer.
        """
        task, split = self._samples.task, self._samples.split
        some, maps = ImageSamples(task, split, MAPPED), dict[str, list[RoutingMap]]()
        for forward_pass in Subject(model, self._layers, some, MAPPED).read():
            of_split = [some.numbers[number] for number in forward_pass.number_R.tolist()]
            for name, decision in forward_pass.decisions.items():
                a_BTS = _by_image(decision, len(of_split))
                before = _tokens_before_patches(name, a_BTS.shape[1], self._grid)
                if before is not None:
                    first_BT = a_BTS[:, before:].argmax(-1).tolist()
                    maps.setdefault(name, []).extend(
                        RoutingMap(number, self._in_words(number), first_T)
                        for number, first_T in zip(of_split, first_BT, strict=True)
                    )
        numbers = {image.number for each in shown.values() for e in each for image in e.top}
        numbers |= {each.number for of_layer in maps.values() for each in of_layer}
        images = task.held_out(split)
        pixels = {n: images[n].images_BCHW.permute(1, 2, 0).numpy() for n in sorted(numbers)}
        return ImagePass(grid=self._grid, maps=maps, pixels=pixels)

    def _images(self, name: str, highest: Highest) -> list[TopImage]:
        """The images with the highest weights of an expert of a layer."""
        tokens, images = self._tokens[name], []
        before = _tokens_before_patches(name, tokens, self._grid)
        for weight, position in highest:
            number, token = divmod(position, tokens)
            patch = None if before is None or token < before else token - before
            images.append(TopImage(weight, number, self._in_words(number), patch))
        return images
