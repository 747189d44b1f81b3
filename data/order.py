"""The order of an epoch, computed when its first sample is read."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

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
