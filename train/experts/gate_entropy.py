"""The entropies H_s and H_u of gates, added up in a pass over data; see `information.py`.

Shapes: N tokens, E experts of a level, S experts of all levels side by side, L levels, G groups of
samples.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyad.model.output import entropy
from polyad.train.errors import ConfigError
from polyad.train.experts.information import (
    Matrix,
    Measured,
    entropy_bits,
    groups_of_samples,
    measured,
)
from polyad.train.experts.probing import Decision, RoutedLayer

Summed = Callable[[Tensor], Tensor]
"""Sums a tensor over processes that have read different samples."""


@dataclass(frozen=True, kw_only=True)
class LevelEntropy:
    """The entropies of one level of a layer, in bits."""

    experts: int
    of_token: Measured
    """H_s: the mean over tokens of the entropy of a token's probabilities."""
    of_usage: Measured
    """H_u: the entropy of their mean over all tokens."""

    @property
    def highest(self) -> float:
        """The entropy of even probabilities."""
        return math.log2(self.experts)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "entropy_bits": self.of_token.to_json(),
            "usage_entropy_bits": self.of_usage.to_json(),
            "highest_entropy_bits": self.highest,
        }


class GateEntropies:
    """Adds up the probabilities of gates and their entropies.

    Probabilities are the scores that top-K sees, or the coefficients of a muMoE.

    Args:
        layers: those that are looked at.
        samples: how many are read, over all processes.
        device: where decisions are.
    """

    def __init__(
        self, layers: Sequence[RoutedLayer], samples: int, device: torch.device | str = "cpu"
    ) -> None:
        self._layers, self._samples = layers, samples
        self._sums: dict[str, Tensor] = {}
        self._group_A: dict[str, Tensor] = {}
        for layer in layers:
            width = layer.num_experts + len(layer.levels) + 1
            groups, group_A = groups_of_samples(samples, width)
            self._group_A[layer.name] = group_A.to(device)
            self._sums[layer.name] = torch.zeros(groups, width, dtype=torch.float64, device=device)

    def add(self, name: str, decision: Decision, number_N: Tensor) -> None:
        """Adds what a layer decided for a batch.

        Args:
            name: of the layer.
            decision: for tokens.
            number_N: of each token that of its sample; -1: it does not count.
        """
        counted_N = number_N >= 0
        levels = [p_NE[counted_N].double() for p_NE in decision.levels]
        bits = [entropy(p_NE).unsqueeze(-1) / math.log(2) for p_NE in levels]
        rows = torch.cat([*levels, *bits, torch.ones_like(bits[0])], dim=-1)
        self._sums[name].index_add_(0, self._group_A[name][number_N[counted_N]], rows)

    def result(self, summed: Summed = lambda sums: sums) -> dict[str, list[LevelEntropy]]:
        """The levels of each layer, by the layer's name.

        Args:
            summed: over processes.

        Raises:
            ConfigError: probabilities are not finite.
        """
        found: dict[str, list[LevelEntropy]] = {}
        for layer in self._layers:
            sums = summed(self._sums[layer.name])
            if not sums.isfinite().all():
                raise ConfigError(
                    f"the coefficients of {layer.name} are not finite: its weights hold NaN or "
                    f"inf, or are too large"
                )
            widths = [*layer.levels, len(layer.levels), 1]
            *levels, bits_GL, tokens_G1 = sums.cpu().split_with_sizes(widths, dim=1)
            found[layer.name] = [
                LevelEntropy(
                    experts=size,
                    of_token=measured(
                        _mean, torch.cat([bits_GL[:, [n]], tokens_G1], 1).numpy(), self._samples
                    ),
                    of_usage=measured(entropy_bits, p_GE.numpy(), self._samples),
                )
                for n, (size, p_GE) in enumerate(zip(layer.levels, levels, strict=True))
            ]
        return found


def _mean(sums_2: Matrix) -> Matrix:
    """The first over the second."""
    mean: Matrix = sums_2[..., 0] / np.maximum(sums_2[..., 1], 1e-30)
    return mean
