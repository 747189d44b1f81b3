"""Held-out images and patches with each expert's highest coefficients, and the experts of all
patches in a few images.

Shapes: B images, T tokens of an image, S experts of all levels side by side.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyad.model.vision import ImageModelSettings, ImageSettings
from polyad.train.experts.probing import Decision, RoutedLayer
from polyad.train.reading import Reading, read
from polyad.train.report.top_tokens import ShownExpert, TopTokens, shown_experts
from polyad.train.tasks.samples import ImageSamples

MAPPED = 6
"""Number of images for which the page shows the experts of all patches."""
MOST_IMAGES = 20_000
"""Maximum number of images to read."""
WHOLE_IMAGE = 1 << 20
"""More tokens than an image has, so that only the highest of each image counts."""


@dataclass(frozen=True, kw_only=True)
class TopImage:
    """An image with a high coefficient of an expert."""

    coefficient: float
    """Highest coefficient over its tokens."""
    number: int
    """The image's number in its split."""
    label: str
    patch: int | None
    """The patch with that coefficient, in row-major order; None for the class token, and if tokens
    are not patches."""


@dataclass(frozen=True, kw_only=True)
class RoutingMap:
    """The experts of one image's patches in one layer."""

    number: int
    label: str
    first: list[int]
    """The expert with the highest coefficient for each patch, in row-major order."""


@dataclass(frozen=True, kw_only=True)
class ImagePass:
    """Top-activating images."""

    data: str
    split: str
    images: int
    """Number of images read."""
    of_images: int
    """Number of images in the whole split."""
    grid: int
    """Number of patches per row."""
    layers: dict[str, list[ShownExpert[TopImage]]]
    """Experts by layer name."""
    maps: dict[str, list[RoutingMap]]
    """Maps by layer name; empty if tokens are not patches."""
    pixels: dict[int, np.ndarray[Any, Any]]
    """The images to show, [H, W, 3] uint8, by number."""

    def to_json(self) -> dict[str, Any]:
        """JSON values without the pixels."""
        return {
            "data": self.data,
            "split": self.split,
            "images": self.images,
            "layers": {
                name: [
                    {
                        "expert": expert.name,
                        "load": expert.load,
                        "active": expert.active,
                        "dominant": expert.dominant,
                        "top": expert.top,
                    }
                    for expert in experts
                ]
                for name, experts in self.layers.items()
            },
            "maps": self.maps,
        }


def _by_image(decision: Decision, images: int) -> Tensor:
    """Coefficients [B, T, S] of a layer."""
    a_MS = decision.coefficients()
    return a_MS.view(images, -1, a_MS.shape[-1])


def _grid(model: ImageSettings) -> int:
    return model.image_size // model.patch_size if isinstance(model, ImageModelSettings) else 1


def _patch(token: int, tokens: int, grid: int) -> int | None:
    """The patch of a token; patches follow the class token, if there is one."""
    before = tokens - grid * grid
    return token - before if before in (0, 1) and token >= before else None


class TopImages:
    """Collects the top images of each expert.

    Args:
        layers: the layers whose experts are shown.
        samples: the samples to read.
        top: number of images per expert.
        device: the model's device.
    """

    blocks: Sequence[int] = ()

    def __init__(
        self, layers: Sequence[RoutedLayer], samples: ImageSamples, top: int, device: str
    ) -> None:
        self._layers, self._samples = layers, samples
        self._tops = {
            layer.name: TopTokens(layer.num_experts, top, device, WHOLE_IMAGE) for layer in layers
        }
        self._tokens: dict[str, int] = {}

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        number_R = reading.number_R
        of_split_R = torch.tensor(self._samples.numbers, device=number_R.device)[number_R]
        for layer in self._layers:
            a_BTS = _by_image(reading.decisions[layer.name], len(number_R))
            self._tokens[layer.name] = length = a_BTS.shape[1]
            place_T = torch.arange(length, device=number_R.device)
            self._tops[layer.name].add(a_BTS, of_split_R.unsqueeze(-1) * length + place_T)

    def result(
        self, model: nn.Module, experts: Sequence[str], also_shown: Collection[int]
    ) -> ImagePass:
        """Returns the result.

        Args:
            model: reads a few images again, to map their patches.
            experts: names of experts to show in every layer; empty: some are picked.
            also_shown: numbers of further images whose pixels are needed.

        Raises:
            ConfigError: coefficients are not finite.
        """
        samples, task, split = self._samples, self._samples.task, self._samples.split
        grid, total = _grid(task.model), task.units_of(split)
        reports = {layer.name: self._experts(layer, experts, grid) for layer in self._layers}
        maps: dict[str, list[RoutingMap]] = {}
        if self._layers:
            few = ImageSamples(task, split, MAPPED)
            mapped = _Maps(few, grid)
            read(model, self._layers, few, [mapped], batch_size=MAPPED)
            maps = mapped.found
        shown = {image.number for each in reports.values() for e in each for image in e.top}
        shown |= {each.number for of_layer in maps.values() for each in of_layer}
        images = task.held_out(split)
        return ImagePass(
            data=task.name,
            split=split,
            images=samples.rows,
            of_images=total,
            grid=grid,
            layers=reports,
            maps=maps,
            pixels={
                n: images[n].images_BCHW.permute(1, 2, 0).numpy()
                for n in sorted(shown | set(also_shown))
            },
        )

    def _experts(
        self, layer: RoutedLayer, experts: Sequence[str], grid: int
    ) -> list[ShownExpert[TopImage]]:
        top, tokens = self._tops[layer.name], self._tokens[layer.name]
        totals = top.totals()
        in_words = self._samples.task.labels_in_words(self._samples.split)
        patches = not layer.name.endswith("token_feed_forward")
        return [
            totals.shown(
                layer,
                column,
                [
                    TopImage(
                        coefficient=coefficient,
                        number=position // tokens,
                        label=in_words(position // tokens),
                        patch=_patch(position % tokens, tokens, grid) if patches else None,
                    )
                    for coefficient, position in top.highest(column)
                ],
            )
            for column in shown_experts(layer, totals, experts)
        ]


class _Maps:
    """Collects the experts of the patches of a few images, by layer.

    Args:
        samples: the samples to read.
        grid: number of patches per row.
    """

    blocks: Sequence[int] = ()

    def __init__(self, samples: ImageSamples, grid: int) -> None:
        self._samples, self._grid = samples, grid
        self._in_words = samples.task.labels_in_words(samples.split)
        self.found: dict[str, list[RoutingMap]] = {}

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        numbers = [self._samples.numbers[number] for number in reading.number_R.tolist()]
        for name, decision in reading.decisions.items():
            a_BTS = _by_image(decision, len(numbers))
            before = a_BTS.shape[1] - self._grid * self._grid
            if name.endswith("token_feed_forward") or before not in (0, 1):
                continue
            first_BT = a_BTS[:, before:].argmax(-1).tolist()
            self.found.setdefault(name, []).extend(
                RoutingMap(number=number, label=self._in_words(number), first=first_T)
                for number, first_T in zip(numbers, first_BT, strict=True)
            )
