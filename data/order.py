"""The order of the samples of an epoch."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

_ROUNDS = 4
_LEAST_HALF = 3
"""Bits of half a number: with fewer, four rounds favour some permutations."""


def shuffled(number: int, count: int, key: str) -> int:
    """Permutes the numbers below `count`, one at a time, in constant time and memory.

    A cycle-walking Feistel network (Black & Rogaway 2002, "Ciphers with arbitrary finite
    domains"): a permutation of the next larger power of four, repeated until the result is small
    enough.

    Args:
        number: At least 0 and below `count`.
        count: How many numbers are permuted.
        key: Names the permutation.

    Returns:
        The number at that place of the permutation.
    """
    half = max(_LEAST_HALF, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for round_ in range(_ROUNDS):
            mixed = xxh3_64_intdigest(f"{key}/{round_}/{right}".encode())
            left, right = right, left ^ (mixed & mask)
        number = left << half | right
        if number < count:
            return number


Arrays: TypeAlias = dict[str, npt.NDArray[np.integer]]

_EPOCHS_KEPT = 2  # a batch, and what workers fetch ahead, may straddle the end of an epoch


class EpochOrders:
    """Named arrays for each epoch.

    Args:
        build: Computes the arrays of an epoch.
        samples_per_epoch: Number of samples in each epoch.
    """

    def __init__(self, build: Callable[[int], Arrays], samples_per_epoch: int) -> None:
        self._build = build
        self._samples = samples_per_epoch
        self._epochs: dict[int, Arrays] = {}

    def __call__(self, sample: int) -> tuple[Arrays, int]:
        """Locates a sample.

        Returns:
            The arrays of its epoch, and its position in the epoch.
        """
        epoch, place = divmod(sample, self._samples)
        if epoch not in self._epochs:
            self._epochs[epoch] = self._build(epoch)
            for old in sorted(self._epochs)[:-_EPOCHS_KEPT]:
                if old != epoch:
                    del self._epochs[old]
        return self._epochs[epoch], place

    def __getstate__(self) -> dict[str, object]:
        # A worker computes its own arrays: sending them would take longer.
        return {**self.__dict__, "_epochs": {}}
