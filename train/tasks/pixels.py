"""Preprocessing of pixels, here and as the files of other libraries describe it.

    preprocessor_config.json        transformers
    config.json, pretrained_cfg     timm

Here the shorter side of an image is resized by `data.evaluation_resize` (bicubic), the center is
cropped, and pixels from 0 to 1 are normalized by `data.normalization`. In training, image b of a
micro-batch may be mixed with its neighbour b xor 1. Share and box are drawn with the sample, from
the run's seed and the sample's number, so mixed images do not depend on the number of processes.

Shapes: B images of a micro-batch, C channels, H x W pixels, K classes.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from polyad.data.images.config import NORMALIZATIONS, ImageDataConfig
from polyad.model.config_yaml import load
from polyad.model.families.family import CONFIG_FILE
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.tensor_folder import read_json
from polyad.parallel.weights import Weights


def normalize(images_BCHW: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtracts each channel's mean and divides by its standard deviation.

    Args:
        images_BCHW: Pixels from 0 to 255.
        mean: Means of pixels from 0 to 1.
        std: Standard deviations of pixels from 0 to 1.

    Returns:
        fp32.
    """
    mean_C11, std_C11 = _on_device(mean, std, images_BCHW.device)
    return (images_BCHW.float() - mean_C11) / std_C11


@functools.cache
def _on_device(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Both in units of pixels from 0 to 255; cached, because copying to a GPU synchronizes."""
    of_each = ([255 * x for x in values] for values in (mean, std))
    with torch.inference_mode(False):  # cached tensors must be usable in training, too
        mean_C11, std_C11 = (torch.tensor(x, device=device).view(-1, 1, 1) for x in of_each)
    return mean_C11, std_C11


def mix_images(images_BCHW: Tensor, mix_B: Tensor, box_B4: Tensor) -> Tensor:
    """Mixes each image with its neighbour.

    Args:
        images_BCHW: Pixels; B is even.
        mix_B: Share of each image in the result; 1 leaves it unchanged.
        box_B4: Top, left, bottom and right of the box taken from the neighbour (CutMix, Yun et al.
            2019). If it is empty, all pixels are weighted means (mixup, Zhang et al. 2018).

    Returns:
        fp32 of the same shape.
    """
    images_BCHW = images_BCHW.float()
    others_BCHW = neighbours(images_BCHW)
    top, left, bottom, right = box_B4.to(torch.int64).unbind(-1)
    rows_H = torch.arange(images_BCHW.shape[-2], device=images_BCHW.device)
    columns_W = torch.arange(images_BCHW.shape[-1], device=images_BCHW.device)
    in_rows_BH = (rows_H >= top.unsqueeze(-1)) & (rows_H < bottom.unsqueeze(-1))
    in_columns_BW = (columns_W >= left.unsqueeze(-1)) & (columns_W < right.unsqueeze(-1))
    in_box_BHW = in_rows_BH.unsqueeze(-1) & in_columns_BW.unsqueeze(-2)
    boxed_B = (bottom > top) & (right > left)
    share_B = torch.where(boxed_B, torch.ones_like(mix_B), mix_B).view(-1, 1, 1, 1)
    blended_BCHW = torch.lerp(others_BCHW, images_BCHW, share_B)
    return torch.where(in_box_BHW.unsqueeze(1), others_BCHW, blended_BCHW)


def soft_targets(labels_B: Tensor, mix_B: Tensor | None, classes: int, smoothing: float) -> Tensor:
    """Returns the share of each class in each image's target.

    Args:
        labels_B: Class of each image; for attributes 0 or 1 [B, K].
        mix_B: Share of each image's own label; the rest is its neighbour's. None: not mixed.
        classes: K.
        smoothing: Share that is spread evenly over all classes (Szegedy et al. 2016); for
            attributes over yes and no.

    Returns:
        fp32 [B, K]; for classes each row sums to 1.
    """
    has_attributes = labels_B.dim() == 2
    targets_BK = (labels_B if has_attributes else one_hot(labels_B, classes)).float()
    if mix_B is not None:
        targets_BK = torch.lerp(neighbours(targets_BK), targets_BK, mix_B.unsqueeze(-1))
    even = 1 / 2 if has_attributes else 1 / classes
    return targets_BK * (1 - smoothing) + smoothing * even if smoothing else targets_BK


def neighbours(x: Tensor) -> Tensor:
    """Swaps the rows of each pair: row b is row b xor 1 of x [B, ...], B even."""
    return x.view(-1, 2, *x.shape[1:]).flip(1).view_as(x)


PREPROCESSOR_FILE = "preprocessor_config.json"
BICUBIC = 3
"""Pillow's code for bicubic resampling, which transformers writes."""
_USUAL = {"vit": "half", "deit": "imagenet", "clip": "clip", "bit": "clip"}
"""Default normalization of transformers' image processors, by prefix of their names."""
MOST_RESIZE = 4.0
"""Upper limit of `data.evaluation_resize`."""


class Pixels(NamedTuple):
    """Preprocessing that a folder describes."""

    keys: dict[str, Any]
    """The keys of `data:` that it sets."""
    notes: list[str]
    """Differences that these keys cannot express, a line each."""


def read_pixels(folder: Path, image_size: int) -> Pixels:
    """Reads a folder's preprocessing of pixels.

    Raises:
        WeightsError: Its file is not JSON.
    """
    if (folder / PREPROCESSOR_FILE).is_file():
        tree = read_json(folder / PREPROCESSOR_FILE)
        return _read(_Transformers(tree), PREPROCESSOR_FILE, image_size)
    if (folder / CONFIG_FILE).is_file():
        about = read_json(folder / CONFIG_FILE).get("pretrained_cfg")
        if isinstance(about, dict):
            return _read(_Timm(about), f"pretrained_cfg of {CONFIG_FILE}", image_size)
    return Pixels({}, [])


def normalization_of(weights: Weights, image_size: int) -> str | None:
    """The `data.normalization` that weights were trained with; None if they do not record it."""
    if isinstance(weights, Checkpoint):
        data = load(weights.config_yaml).get("data")
        normalization = data.get("normalization") if isinstance(data, dict) else None
        return normalization if isinstance(normalization, str) else None
    normalization = read_pixels(weights.folder, image_size).keys.get("normalization")
    return str(normalization) if normalization else None


def transformers_file(settings: ImageDataConfig, image_size: int) -> dict[str, Any]:
    """Returns the content of preprocessor_config.json."""
    side = {"height": image_size, "width": image_size}
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": _shorter(settings, image_size)},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": side,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(settings.mean),
        "image_std": list(settings.std),
    }


def timm_keys(settings: ImageDataConfig, image_size: int) -> dict[str, Any]:
    """Returns the same settings as keys of timm's `pretrained_cfg`."""
    shorter = _shorter(settings, image_size)
    crop = image_size / shorter
    while math.floor(image_size / crop) < shorter:  # timm rounds down
        crop = math.nextafter(crop, 0)
    return {
        "mean": list(settings.mean),
        "std": list(settings.std),
        "crop_pct": crop,
        "crop_mode": "center",
        "interpolation": "bicubic",
    }


def _shorter(settings: ImageDataConfig, image_size: int) -> int:
    return max(image_size, round(image_size * settings.evaluation_resize))


class _Transformers:
    """A preprocessor_config.json of current or older versions."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        kind = tree.get("image_processor_type") or tree.get("feature_extractor_type") or ""
        self._tree, self._kind = tree, str(kind).lower()
        self._crops = tree.get("do_center_crop", "crop_size" in tree) is not False

    def statistics(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Mean and standard deviation of pixels from 0 to 1; None if not given."""
        tree = self._tree
        factor = _number(tree.get("rescale_factor", 1 / 255)) or 1 / 255
        scale = 255 * factor if tree.get("do_rescale", True) is not False else 255
        if tree.get("do_normalize", True) is False:
            return [0.0] * 3, [1 / scale] * 3
        if "image_mean" not in tree and "image_std" not in tree:
            usual = next((v for name, v in _USUAL.items() if self._kind.startswith(name)), None)
            return None if usual is None else NORMALIZATIONS[usual]
        mean, std = _three(tree.get("image_mean")), _three(tree.get("image_std"))
        if mean is None or std is None:
            return None
        return [each / scale for each in mean], [each / scale for each in std]

    def sides(self) -> tuple[float | None, float | None]:
        """The shorter side after resizing, and the side after cropping."""
        edge = _edge(self._tree.get("size"))
        if (share := _number(self._tree.get("crop_pct"))) and edge:
            return edge / share, edge
        return edge, _edge(self._tree.get("crop_size")) if self._crops else edge

    def differences(self) -> list[str]:
        """What it does differently from here."""
        tree, lines = self._tree, []
        if tree.get("do_resize", True) is False:
            lines.append("do_resize: false, but Polyad resizes images")
        size = tree.get("size")
        if (isinstance(size, dict) and "height" in size) or (
            isinstance(size, int) and self._kind.startswith("vit")
        ):
            lines.append("images are squeezed to a square, but Polyad crops the middle")
        if tree.get("resample", BICUBIC) != BICUBIC:
            lines.append(f"resample: {tree['resample']!r:.20}, but Polyad uses {BICUBIC}, bicubic")
        return lines


class _Timm:
    """The `pretrained_cfg` of timm's config.json."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._tree = tree

    def statistics(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Mean and standard deviation of pixels from 0 to 1; None if not given."""
        mean, std = _three(self._tree.get("mean")), _three(self._tree.get("std"))
        return None if mean is None or std is None else (mean, std)

    def sides(self) -> tuple[float | None, float | None]:
        """The shorter side after resizing, and the side after cropping."""
        size, share = self._tree.get("input_size"), _number(self._tree.get("crop_pct"))
        side = _number(size[-1]) if isinstance(size, list) and size else None
        return (math.floor(side / share) if side and share else None), side

    def differences(self) -> list[str]:
        """What it does differently from here."""
        usual = {"interpolation": "bicubic", "crop_mode": "center"}
        return [
            f"{key}: {self._tree[key]!r:.20}, but Polyad uses {only}"
            for key, only in usual.items()
            if self._tree.get(key, only) != only
        ]


def _read(said: _Transformers | _Timm, file: str, image_size: int) -> Pixels:
    keys: dict[str, Any] = {}
    notes = said.differences()
    statistics = said.statistics()
    if statistics is not None:
        named = next(
            (name for name, e in NORMALIZATIONS.items() if _are_close(statistics, e)), None
        )
        if named is not None:
            keys["normalization"] = named
        else:
            mean, std = ([round(each, 4) for each in numbers] for numbers in statistics)
            notes.append(
                f"mean {mean} and std {std} (of pixels from 0 to 1) match no data.normalization: "
                f"{', '.join(NORMALIZATIONS)}"
            )
    shorter, side = said.sides()
    if side is not None and side != image_size:
        notes.append(f"image size {side:g}, but the model reads {image_size}")
    if shorter is not None and side:
        resize = min(MOST_RESIZE, max(1.0, shorter / side))
        keys["evaluation_resize"] = resize
        if resize != shorter / side:
            notes.append(f"resizes to {shorter:g} before cropping {side:g}, more than Polyad can")
    return Pixels(keys, [f"{file}: {note}" for note in notes])


def _are_close(
    given: tuple[Sequence[float], Sequence[float]], known: tuple[Sequence[float], Sequence[float]]
) -> bool:
    return all(
        abs(a - b) < 1e-3
        for theirs, ours in zip(given, known, strict=True)
        for a, b in zip(theirs, ours, strict=True)
    )


def _three(value: object) -> list[float] | None:
    numbers = [_number(each) for each in value] if isinstance(value, list) else []
    values = [each for each in numbers if each is not None]
    return values if len(values) == len(numbers) == 3 else None


def _edge(size: object) -> float | None:
    """The shorter side of a size, which is a number or has sides by name."""
    if isinstance(size, dict):
        size = next((size[key] for key in ("shortest_edge", "height") if key in size), None)
    return _number(size)


def _number(value: object) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None  # type: ignore[arg-type]
