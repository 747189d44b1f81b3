"""Simple baselines for text and images.

Shapes: V vocabulary, N training images, B held-out images of a chunk, P numbers per image.
"""

import math

import numpy as np
import torch
from torch import Tensor

from polyad.data.images.augmentation import evaluation_image
from polyad.data.images.samples import Images
from polyad.data.text.dataset import TokenStream
from polyad.train.experts.token_classes import frequencies

PART = 512
"""Number of held-out images whose distances are in memory at a time."""


def unigram_perplexity(train: TokenStream, held_out: TokenStream, vocab_size: int) -> float:
    """Perplexity of a unigram model with add-one smoothing.

    Args:
        train: the split whose tokens are counted.
        held_out: the split that is scored, end-of-text tokens included.
        vocab_size: V.

    Returns:
        exp of the mean negative log-likelihood of a token of `held_out`.
    """
    counts_V = frequencies(train, vocab_size)
    log_probability_V = np.log(counts_V + 1.0) - math.log(int(counts_V.sum()) + vocab_size)
    scored_V = frequencies(held_out, vocab_size)
    return math.exp(-float(scored_V @ log_probability_V) / int(scored_V.sum()))


def nearest_neighbour_accuracy(train: Images, held_out: Images, size: int) -> float:
    """Share of the held-out images whose nearest training image has their class.

    Args:
        train: training images.
        held_out: held-out images.
        size: side that all are resized to, in pixels; distances are Euclidean, over the pixels.

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
