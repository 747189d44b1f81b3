"""Measures of how experts divide the work: entropies and information in bits, with intervals.

    H_s      the mean entropy of the gate's probabilities of single tokens: low if it is decided
    H_u      the entropy of their mean over all data: high if all experts are used
    I(E; Y)  what the expert of a token tells about its label

Source: Krishnamurthy et al. 2023, "Improving expert specialization in mixture of experts", section
3. Their code takes H_u of the last batch and I of what the experts predict; here both are of all
that was read, and of labels.

Shapes: N tokens, E experts of a level, S experts of all levels side by side, L levels, Y classes, G
groups of samples, D draws. All measures take further axes in front.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyad.model.output import entropy
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import Decision, RoutedLayer

Matrix = npt.NDArray[np.float64]
DRAWS = 200
"""How often groups of samples are drawn anew for an interval."""
GROUPS, FEWEST_GROUPS = 200, 20
"""Groups that samples are put into at random, at most; and where each takes much memory."""
MOST_NUMBERS = 1 << 21
"""Numbers that the groups of a layer take, unless the fewest take more."""
OUTSIDE = (0.025, 0.975)
"""Quantiles that bound an interval."""
Summed = Callable[[Tensor], Tensor]
"""Sums a tensor over processes that have read different samples."""


def entropy_bits(counts: Matrix) -> Matrix:
    """The entropy in bits of counts, or shares, over the last axis; 0 where there are none."""
    total = counts.sum(-1)
    some = np.where(total > 0, total, 1.0)
    inner = (counts * np.log2(np.where(counts > 0, counts, 1.0))).sum(-1)
    found: Matrix = np.maximum(0.0, np.log2(some) - inner / some)
    return found


def information_bits(counts_SY: Matrix) -> Matrix:
    """I(E; Y) of experts and classes: what the expert of a token tells about its class.

    Args:
        counts_SY: tokens of each class that every expert gets, or shares of tokens.

    Returns:
        Bits, from 0 to the smaller entropy of both; 0 where nothing was counted.
    """
    apart = entropy_bits(counts_SY.sum(-1)) + entropy_bits(counts_SY.sum(-2))
    joint = entropy_bits(counts_SY.reshape(*counts_SY.shape[:-2], -1))
    found: Matrix = np.maximum(0.0, apart - joint)
    return found


def normalized_information(counts_SY: Matrix) -> Matrix:
    """I(E; Y) over the mean of the entropies of both, from 0 to 1.

    As `sklearn.metrics.normalized_mutual_info_score` by default, but 0 where both entropies are.

    Args:
        counts_SY: as of `information_bits`.
    """
    mean = (entropy_bits(counts_SY.sum(-1)) + entropy_bits(counts_SY.sum(-2))) / 2
    found: Matrix = np.where(mean > 0, information_bits(counts_SY) / np.where(mean > 0, mean, 1), 0)
    return found


def purity(counts_SY: Matrix) -> Matrix:
    """The share of tokens that are of the most frequent class of their expert.

    Args:
        counts_SY: as of `information_bits`.
    """
    total = counts_SY.sum((-2, -1))
    found: Matrix = counts_SY.max(-1).sum(-1) / np.where(total > 0, total, 1.0)
    return found


class Measured(NamedTuple):
    """A measure and its interval."""

    value: float
    low: float | None
    """None of a single sample."""
    high: float | None
    samples: int
    """Sequences, images or windows that were read."""

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        known = bool(np.isfinite(self.value))
        interval = None if self.low is None or not known else [self.low, self.high]
        value = self.value if known else None
        return {"value": value, "interval": interval, "samples": self.samples}

    def shown(self, unknown: str = "none") -> str:
        """The value for people, and its interval in brackets.

        Args:
            unknown: what stands for a value that is not finite.
        """
        if not math.isfinite(self.value):
            return unknown
        if self.low is None:
            return f"{self.value:.4f}"
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def intervals(
    measure: Callable[[Matrix], Matrix], sums_G: Matrix, samples: int, *, at_once: int = 10
) -> tuple[Matrix, Matrix | None, Matrix | None]:
    """Measures of all samples, each with the ends of a bootstrap interval over groups of them.

    Groups are drawn with replacement. Draws hold fewer different samples than there are, and by
    that overstate information, so the interval is that of the draws around their own mean, put
    around the value.

    Args:
        measure: of sums over samples, of any shape; further axes in front are draws.
        sums_G: of each group, [G, ...].
        samples: in all groups together.
        at_once: draws that are held at a time.

    Returns:
        The values and both ends, which a single sample does not have; NaN where a draw has NaN.
    """
    value = measure(sums_G.sum(0))
    groups = len(sums_G)
    if samples < 2:
        return value, None, None
    drawn_DG = np.random.default_rng(0).multinomial(groups, np.full(groups, 1 / groups), DRAWS)
    found = [
        measure(np.tensordot(drawn_DG[first : first + at_once].astype(np.float64), sums_G, 1))
        for first in range(0, DRAWS, at_once)
    ]
    draws_D = np.concatenate(found)
    low, high = value + np.quantile(draws_D - draws_D.mean(0), OUTSIDE, axis=0)
    return value, low, high


def measured(
    measure: Callable[[Matrix], Matrix],
    sums_G: Matrix,
    samples: int,
    *,
    at_once: int = 10,
    lowest: float = 0.0,
    highest: float = math.inf,
) -> Measured:
    """One measure that is never outside two numbers; see `intervals`.

    Args:
        measure: of sums over samples; further axes in front are draws.
        sums_G: of each group, [G, ...].
        samples: in all groups together.
        at_once: draws that are held at a time.
        lowest: the lower number.
        highest: the other.

    Returns:
        Without an interval where an end is not finite, as where no draw has enough to go by.
    """
    value, low, high = intervals(measure, sums_G, samples, at_once=at_once)
    if low is None or high is None or not np.isfinite([low, high]).all():
        return Measured(float(value), None, None, samples)
    return Measured(float(value), max(lowest, float(low)), min(highest, float(high)), samples)


def groups_of_samples(samples: int, numbers: int) -> tuple[int, Tensor]:
    """Puts samples into groups of equal size at random, the same on every process.

    Args:
        samples: how many there are.
        numbers: that each group takes.

    Returns:
        How many groups, and of each sample its own.
    """
    wanted = min(GROUPS, max(FEWEST_GROUPS, MOST_NUMBERS // max(1, numbers)))
    groups = max(1, min(samples, wanted))
    generator = torch.Generator().manual_seed(0)
    return groups, torch.randperm(samples, generator=generator) % groups


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
