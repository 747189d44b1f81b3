"""Preprocessing of pixels, here and as transformers' preprocessor_config.json describes it.

Here the shorter side of an image is resized by `data.evaluation_resize` (bicubic), the center is
cropped, and pixels from 0 to 1 are normalized by `data.normalization`. In training, image b of a
micro-batch may be mixed with its neighbour b xor 1. Share and box are drawn with the sample, from
the run's seed and the sample's number, so mixed images do not depend on the number of processes.

Shapes: B images of a micro-batch, C channels, H x W pixels, K classes.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from polyad.data.images.config import NORMALIZATIONS, ImageDataConfig
from polyad.model.config import load_yaml
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
FIXED = {
    "do_resize": True,
    "resample": 3,  # Pillow's code for bicubic
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
}
"""Keys of this file that can have only one value here."""
MOST_RESIZE = 4.0
"""Upper limit of `data.evaluation_resize`."""


def read_pixels(folder: Path, image_size: int) -> tuple[dict[str, Any], list[str]]:
    """Reads a folder's preprocessing of pixels.

    Args:
        folder: Of a model of transformers, or one that Polyad wrote.
        image_size: The side that the model reads, in pixels.

    Returns:
        The keys of `data:` that it sets; and what these cannot express, in at most one line.

    Raises:
        WeightsError: Its file is not JSON.
    """
    keys, notes = dict[str, Any](), list[str]()
    if not (folder / PREPROCESSOR_FILE).is_file():
        return keys, notes
    tree = read_json(folder / PREPROCESSOR_FILE)
    others = [name for name, ours in FIXED.items() if tree.get(name, ours) != ours]
    try:
        statistics = np.array([tree["image_mean"], tree["image_std"]], dtype=float)
        known = (n for n, e in NORMALIZATIONS.items() if np.allclose(statistics, e, atol=1e-3))
        keys["normalization"] = next(known)
    except (KeyError, TypeError, ValueError, StopIteration):
        others += [name for name in ("image_mean", "image_std") if name in tree]
    if {"do_rescale", "rescale_factor", "do_normalize"} & {*others}:
        keys = {}
    shorter, crops = _edge(tree.get("size")), tree.get("do_center_crop", "crop_size" in tree)
    side = _edge(tree.get("crop_size")) if crops else shorter
    if shorter and side:
        keys["evaluation_resize"] = min(MOST_RESIZE, max(1.0, shorter / side))
        if side != image_size or not crops:
            others.append("size")
    if others:
        values = ", ".join(f"{name}: {tree[name]!r:.60}" for name in others)
        notes.append(
            f"{PREPROCESSOR_FILE}: {values}, but Polyad resizes the shorter side (bicubic), crops "
            f"{image_size} pixels in the middle, and knows data.normalization: "
            f"{', '.join(NORMALIZATIONS)}"
        )
    return keys, notes


def _edge(size: Any) -> int | None:
    """The shorter side of a size, which is a number or has sides by name; None if neither."""
    edge = size.get("shortest_edge", size.get("height")) if isinstance(size, dict) else size
    return edge if isinstance(edge, int) else None


def normalization_of(weights: Weights, image_size: int) -> str | None:
    """The `data.normalization` that weights were trained with; None if they do not record it."""
    if isinstance(weights, Checkpoint):
        data = load_yaml(weights.config_yaml).get("data")
        normalization = data.get("normalization") if isinstance(data, dict) else None
        return normalization if isinstance(normalization, str) else None
    keys, _ = read_pixels(weights.folder, image_size)
    return keys.get("normalization")


def transformers_file(settings: ImageDataConfig, image_size: int) -> dict[str, Any]:
    """Returns the content of preprocessor_config.json."""
    shorter = max(image_size, round(image_size * settings.evaluation_resize))
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        **FIXED,
        "size": {"shortest_edge": shorter},
        "do_center_crop": True,
        "crop_size": {"height": image_size, "width": image_size},
        "image_mean": list(settings.mean),
        "image_std": list(settings.std),
    }
