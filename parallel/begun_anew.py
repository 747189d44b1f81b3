"""Weights of another model as the start of a run that has parameters which it lacks, as a head."""

from collections.abc import Sequence

import torch

from polyad.parallel.fragments import Source


class BegunAnew:
    """A source of which some parameters come from another one, as initial values.

    Args:
        weights: of all others.
        fresh: of those whose names begin as one of `prefixes` says.
        prefixes: with their dot, as `head.`.
    """

    def __init__(self, weights: Source, fresh: Source, prefixes: Sequence[str]) -> None:
        self._weights, self._fresh, self._prefixes = weights, fresh, tuple(prefixes)

    def _of(self, name: str) -> Source:
        return self._fresh if name.startswith(self._prefixes) else self._weights

    def read(
        self,
        name: str,
        field: str,
        global_shape: tuple[int, ...],
        offset: tuple[int, ...],
        size: tuple[int, ...],
    ) -> torch.Tensor:
        """A box of a weight, or zeros for optimizer state; see `Source.read`."""
        return self._of(name).read(name, field, global_shape, offset, size)

    def step(self, name: str) -> float:
        """Optimizer steps that the parameter has seen."""
        return self._of(name).step(name)

    def buffer(self, name: str) -> torch.Tensor:
        """A persistent buffer, whole."""
        return self._of(name).buffer(name)
