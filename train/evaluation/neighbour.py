"""A baseline for classifiers of images: the class of the nearest training image.

Shapes: N training images, B held-out images of a part, P numbers of an image.
"""

import torch
from torch import Tensor

from polyad.data.images.augmentation import evaluation_image
from polyad.data.images.samples import Images

PART = 512
"""Held-out images whose distances are held together."""


def nearest_neighbour_accuracy(train: Images, held_out: Images, size: int) -> float:
    """Share of the held-out images whose nearest training image has their class.

    Args:
        train: Training images.
        held_out: Held-out images.
        size: Side that all are resized to, in pixels; distances are Euclidean, over the pixels.

    Returns:
        From 0 to 1.
    """
    known_NP, labels_N = _pixels(train, size)
    right = 0
    asked_MP, labels_M = _pixels(held_out, size)
    parts = (torch.split(each, PART) for each in (asked_MP, labels_M))
    for asked_BP, labels_B in zip(*parts, strict=True):
        nearest_B = torch.cdist(asked_BP, known_NP).argmin(-1)
        right += int((labels_N[nearest_B] == labels_B).sum())
    return right / len(labels_M)


def _pixels(images: Images, size: int) -> tuple[Tensor, Tensor]:
    rows = [evaluation_image(images.decode(n), size, 1.0).flatten() for n in range(len(images))]
    return torch.stack(rows).float(), torch.as_tensor(images.labels, dtype=torch.int64)
