"""The pass over held-out images: which images and patches every expert gets most of, and which
patch of a few images goes to which expert.

Shapes: B images, T tokens of an image, S experts of all levels side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from polyad.data.evaluation import evaluation_batches
from polyad.model.vision import ImageModelSettings, ImageSettings
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import Decision, RoutedLayer, deciding
from polyad.train.experts.report.class_pass import ClassPass
from polyad.train.experts.report.image_classes import ImageClasses
from polyad.train.experts.report.top_tokens import TopTokens, choose_experts
from polyad.train.tasks.images import ImageClassification

MAPPED = 6
"""Images of which the page shows where their patches go."""
WHOLE_IMAGE = 1 << 20
"""More tokens than an image has: of each image only the highest counts."""


@dataclass(frozen=True, kw_only=True)
class TopImage:
    """An image of which an expert gets much."""

    coefficient: float
    """The highest of its tokens."""
    number: int
    """In its split."""
    label: str
    patch: int | None
    """The patch with that coefficient, by rows; None for the class token, and where tokens are no
    patches."""


@dataclass(frozen=True, kw_only=True)
class ImageExpert:
    """One expert's coefficients over the images that were read."""

    name: str
    load: float
    """Its mean coefficient, divided by that of its level."""
    active: float
    """Share of the tokens with a coefficient above 0."""
    dominant: float
    """Share of the tokens with a coefficient of at least 0.5."""
    top: list[TopImage]


@dataclass(frozen=True, kw_only=True)
class RoutingMap:
    """Where the patches of one image go in one layer."""

    number: int
    label: str
    first: list[int]
    """The expert with the highest coefficient of each patch, by rows."""


@dataclass(frozen=True, kw_only=True)
class ImagePass:
    """Top-activating images."""

    data: str
    split: str
    images: int
    """Images that were read."""
    of_images: int
    """Images of the whole split."""
    grid: int
    """Patches in a row."""
    layers: dict[str, list[ImageExpert]]
    """By the layer's name."""
    maps: dict[str, list[RoutingMap]]
    """By the layer's name; none where tokens are no patches."""
    pixels: dict[int, np.ndarray[Any, Any]]
    """The images that are shown, [H, W, 3] uint8, by their number."""
    classes: ClassPass | None = None
    """What the same pass finds of classes; None of images with attributes."""

    def to_json(self) -> dict[str, Any]:
        """JSON values, without pixels and classes."""
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
                        "top": [vars(image) for image in expert.top],
                    }
                    for expert in experts
                ]
                for name, experts in self.layers.items()
            },
            "maps": {name: [vars(each) for each in maps] for name, maps in self.maps.items()},
        }


@dataclass(frozen=True, kw_only=True)
class ImageChoice:
    """Which experts and how many images are shown."""

    top: int = 8
    """Images of an expert."""
    per_layer: int = 6
    """Experts that are picked in a layer, unless they are named."""
    experts: tuple[str, ...] = ()
    """By name, in every layer; see `RoutedLayer.expert_name`."""
    limit: int = 20_000
    """About how many images are read."""


def read_images(
    model: nn.Module,
    layers: Sequence[RoutedLayer],
    task: ImageClassification,
    split: str,
    choice: ImageChoice,
    *,
    every_layer: Sequence[RoutedLayer],
    batch_size: int,
    progress: Callable[[float], None] = lambda share: None,
) -> ImagePass:
    """Reads images evenly over a split.

    Args:
        model: in evaluation mode, on one device.
        layers: those whose top images are kept.
        task: of the model.
        split: `train`, `validation` or `test`.
        choice: what is kept.
        every_layer: those whose experts are counted by class.
        batch_size: images in a forward pass.
        progress: is told the share done after each batch.

    Raises:
        ConfigError: coefficients are not finite.
    """
    device = next(model.parameters()).device
    held_out, total = task.held_out(split), task.units_of(split)
    count = min(total, choice.limit)
    numbers = [number * total // count for number in range(count)]
    tops = {x.name: TopTokens(x.num_experts, choice.top, device, WHOLE_IMAGE) for x in layers}
    classes = (
        None
        if task.has_attributes
        else ImageClasses(task, split, numbers, every_layer, batch_size, device)
    )
    tokens: dict[str, int] = {}
    done = 0
    with deciding(model, every_layer) as decisions, torch.inference_mode():
        for batch, counts_B in evaluation_batches(Subset(held_out, numbers), count, batch_size):
            # Without what only fills the last batch up.
            images_BCHW, labels_B = batch.images_BCHW[counts_B], batch.labels_B[counts_B]
            size = len(images_BCHW)
            logits_BK = model(task.inputs(images_BCHW.to(device))).logits
            number_B1 = torch.tensor(numbers[done : done + size]).unsqueeze(-1)
            for layer in layers:
                a_BTS = _by_image(decisions[layer.name], size)
                tokens[layer.name] = length = a_BTS.shape[1]
                position_BT = number_B1 * length + torch.arange(length)
                tops[layer.name].add(a_BTS, position_BT.to(device))
            if classes is not None:
                classes.add(logits_BK, labels_B.to(device), decisions, done)
            done += size
            progress(done / count)
    grid = _grid(task.model)
    reports = {
        layer.name: _experts(layer, tops[layer.name], tokens[layer.name], grid, task, split, choice)
        for layer in layers
    }
    of_classes = None if classes is None else classes.result(choice.top)
    few = min(MAPPED, total) if layers else 0
    mapped = [number * total // few for number in range(few)]
    maps = _maps(model, layers, task, split, mapped, grid)
    shown = {image.number for each in reports.values() for e in each for image in e.top}
    shown |= {each.number for of_layer in maps.values() for each in of_layer}
    shown |= {each.number for each in of_classes.examples} if of_classes is not None else set()
    return ImagePass(
        data=task.name,
        split=split,
        images=count,
        of_images=total,
        grid=grid,
        layers=reports,
        maps=maps,
        pixels={n: held_out[n].images_BCHW.permute(1, 2, 0).numpy() for n in sorted(shown)},
        classes=of_classes,
    )


def _by_image(decision: Decision, images: int) -> Tensor:
    """Coefficients [B, T, S] of a layer."""
    a_MS = decision.coefficients()
    return a_MS.view(images, -1, a_MS.shape[-1])


def _grid(model: ImageSettings) -> int:
    return model.image_size // model.patch_size if isinstance(model, ImageModelSettings) else 1


def _patch(token: int, tokens: int, grid: int) -> int | None:
    """The patch that a token is; tokens are patches, after a class token if there is one."""
    before = tokens - grid * grid
    return token - before if before in (0, 1) and token >= before else None


def _experts(
    layer: RoutedLayer,
    top: TopTokens,
    tokens: int,
    grid: int,
    task: ImageClassification,
    split: str,
    choice: ImageChoice,
) -> list[ImageExpert]:
    totals = top.totals()
    if not totals.load_S.isfinite().all():
        raise ConfigError(
            f"the coefficients of {layer.name} are not finite: its weights hold NaN or inf, or are "
            f"too large"
        )
    names = {layer.expert_name(column): column for column in range(layer.num_experts)}
    columns = [names[expert] for expert in choice.experts]
    columns = columns or choose_experts(totals, layer.levels, choice.per_layer)
    times_S = totals.times_mean(layer.levels)
    in_words = task.labels_in_words(split)
    patches = not layer.name.endswith("token_feed_forward")
    return [
        ImageExpert(
            name=layer.expert_name(column),
            load=float(times_S[column]),
            active=float(totals.active_S[column]),
            dominant=float(totals.dominant_S[column]),
            top=[
                TopImage(
                    coefficient=coefficient,
                    number=position // tokens,
                    label=in_words(position // tokens),
                    patch=_patch(position % tokens, tokens, grid) if patches else None,
                )
                for coefficient, position in top.highest(column)
            ],
        )
        for column in columns
    ]


def _maps(
    model: nn.Module,
    layers: Sequence[RoutedLayer],
    task: ImageClassification,
    split: str,
    numbers: Sequence[int],
    grid: int,
) -> dict[str, list[RoutingMap]]:
    if not numbers:
        return {}
    device = next(model.parameters()).device
    held_out = task.held_out(split)
    images = torch.stack([held_out[number].images_BCHW for number in numbers]).to(device)
    in_words = task.labels_in_words(split)
    found = {}
    with deciding(model, layers) as decisions, torch.inference_mode():
        model(task.inputs(images))
    for name, decision in decisions.items():
        a_BTS = _by_image(decision, len(images))
        before = a_BTS.shape[1] - grid * grid
        if name.endswith("token_feed_forward") or before not in (0, 1):
            continue
        first_BT = a_BTS[:, before:].argmax(-1).tolist()
        found[name] = [
            RoutingMap(number=number, label=in_words(number), first=first_T)
            for number, first_T in zip(numbers, first_BT, strict=True)
        ]
    return found
