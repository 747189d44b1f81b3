"""Held-out samples, dealt out to processes that each run as many forward passes."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from polyad.data.errors import DataError
from polyad.data.sampler import loader_of


class Numbered(Dataset[tuple[Any, int]]):
    """Samples, each with the number that it was asked for by.

    Args:
        samples: The samples.
    """

    def __init__(self, samples: Dataset[Any]) -> None:
        self._samples = samples

    def __getitem__(self, number: int) -> tuple[Any, int]:
        """A sample and its number."""
        return self._samples[number], number


def evaluation_batches(
    samples: Dataset[Any],
    total: int,
    batch_size: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    num_workers: int = 0,
) -> Iterator[tuple[Any, Tensor]]:
    """Reads each sample once, in order over all ranks.

    Args:
        samples: The samples, which the loader stacks.
        total: How many there are.
        batch_size: B, samples of a batch.
        rank: This rank, from 0.
        ranks: The number of ranks that share the evaluation.
        num_workers: Loader processes; 0 reads in this one.

    Returns:
        Iterator over ceil(total / (B * ranks)) batches of one size on every rank, each with which
        of its samples count [B]: the last ones are filled up with the last sample.

    Raises:
        DataError: There is no sample, or a number is out of its range.
    """
    if total < 1:
        raise DataError("no samples to evaluate on")
    if batch_size < 1:
        raise DataError(f"batch_size {batch_size}: at least 1")
    size = min(batch_size, math.ceil(total / ranks))  # no more than one batch takes
    rounds = math.ceil(total / (size * ranks))
    firsts = [size * (ranks * number + rank) for number in range(rounds)]
    numbers = [list(range(first, first + size)) for first in firsts]
    filled = [[min(number, total - 1) for number in batch] for batch in numbers]
    batches = loader_of(samples, filled, num_workers)
    for batch, own in zip(batches, numbers, strict=True):
        yield batch, torch.tensor([number < total for number in own])
