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
AT_ONCE = 10
"""Draws that are held at a time."""
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


def intervals(measure: Callable[[Matrix], Matrix], sums_G: Matrix, samples: int) -> Matrix:
    """Measures of all samples, each with the ends of a bootstrap interval over groups of them.

    Groups are drawn with replacement. Draws hold fewer different samples than there are, and by
    that overstate information, so the interval is that of the draws around their own mean, put
    around the value.

    Args:
        measure: of sums over samples, of any shape; further axes in front are draws.
        sums_G: of each group, [G, ...].
        samples: in all groups together.

    Returns:
        The values, the lower and the upper ends [3, ...]; ends of a single sample are NaN, as are
        those where a draw has NaN.
    """
    value = measure(sums_G.sum(0))
    groups = len(sums_G)
    if samples < 2:
        unknown = np.full_like(value, np.nan)
        return np.stack([value, unknown, unknown])
    drawn_DG = np.random.default_rng(0).multinomial(groups, np.full(groups, 1 / groups), DRAWS)
    found = [
        measure(np.tensordot(drawn_DG[first : first + AT_ONCE].astype(np.float64), sums_G, 1))
        for first in range(0, DRAWS, AT_ONCE)
    ]
    draws_D = np.concatenate(found)
    low, high = value + np.quantile(draws_D - draws_D.mean(0), OUTSIDE, axis=0)
    return np.stack([value, low, high])


def measured(
    measure: Callable[[Matrix], Matrix],
    sums_G: Matrix,
    samples: int,
    *,
    lowest: float = 0.0,
    highest: float = math.inf,
) -> Measured:
    """One measure that is never outside two numbers; see `intervals`.

    Args:
        measure: of sums over samples; further axes in front are draws.
        sums_G: of each group, [G, ...].
        samples: in all groups together.
        lowest: the lower number.
        highest: the other.

    Returns:
        Without an interval where an end is not finite, as where no draw has enough to go by.
    """
    value, low, high = intervals(measure, sums_G, samples).tolist()
    if not (math.isfinite(low) and math.isfinite(high)):
        return Measured(value, None, None, samples)
    return Measured(value, max(lowest, low), min(highest, high), samples)


class GroupedSums:
    """Sums over groups of samples, which intervals follow from.

    Samples are put into groups of equal size at random, the same on every process.

    Args:
        samples: images, sequences or windows that all processes read.
        shape: of the sums of a group.
        device: where what is added up is.
        numbers: that each group takes, which limits how many there are; None: as many as `shape`.
    """

    def __init__(
        self,
        samples: int,
        shape: Sequence[int],
        device: torch.device | str,
        numbers: int | None = None,
    ) -> None:
        numbers = max(1, math.prod(shape) if numbers is None else numbers)
        wanted = min(GROUPS, max(FEWEST_GROUPS, MOST_NUMBERS // numbers))
        groups = max(1, min(samples, wanted))
        generator = torch.Generator().manual_seed(0)
        self._group_A = (torch.randperm(samples, generator=generator) % groups).to(device)
        self.sums_G = torch.zeros(groups, *shape, dtype=torch.float64, device=device)
        """What is added up, by group."""

    def group_of(self, number_N: Tensor) -> Tensor:
        """The groups of samples, by their numbers."""
        return self._group_A[number_N.to(self._group_A.device)]

    def result(self, summed: Summed, wrong: str) -> Matrix:
        """The sums over all processes.

        Args:
            summed: over processes.
            wrong: says what is not finite, if the sums are not.

        Raises:
            ConfigError: they are not.
        """
        sums_G = summed(self.sums_G)
        if not sums_G.isfinite().all():
            raise ConfigError(wrong)
        found: Matrix = sums_G.cpu().numpy()
        return found


def not_finite(layer: RoutedLayer) -> str:
    """What is wrong with a layer whose coefficients are not finite."""
    return (
        f"the coefficients of {layer.name} are not finite: its weights hold NaN or inf, or are too "
        f"large"
    )


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

    Probabilities are the scores that top-K sees, divided by their sum, or the coefficients of a
    muMoE.

    Args:
        layers: those that are looked at.
        samples: how many are read, over all processes.
        device: where decisions are.
    """

    def __init__(
        self, layers: Sequence[RoutedLayer], samples: int, device: torch.device | str = "cpu"
    ) -> None:
        self._layers, self._samples = layers, samples
        self._sums = {
            layer.name: GroupedSums(samples, [layer.num_experts + len(layer.levels) + 1], device)
            for layer in layers
        }

    def sums(self) -> dict[str, Tensor]:
        """What is added up; see `polyad.train.reading.Lasting`."""
        return {name: each.sums_G for name, each in self._sums.items()}

    def add(self, name: str, decision: Decision, number_N: Tensor) -> None:
        """Adds what a layer decided for a batch.

        Args:
            name: of the layer.
            decision: for tokens.
            number_N: of each token that of its sample; -1: it does not count.
        """
        counted_N = number_N >= 0
        levels = [p_NE[counted_N] for p_NE in decision.probabilities()]
        bits = [entropy(p_NE).unsqueeze(-1) / math.log(2) for p_NE in levels]
        rows = torch.cat([*levels, *bits, torch.ones_like(bits[0])], dim=-1)
        sums = self._sums[name]
        sums.sums_G.index_add_(0, sums.group_of(number_N[counted_N]), rows)

    def result(self, summed: Summed = lambda sums: sums) -> dict[str, list[LevelEntropy]]:
        """The levels of each layer, by the layer's name.

        Args:
            summed: over processes.

        Raises:
            ConfigError: probabilities are not finite.
        """
        found: dict[str, list[LevelEntropy]] = {}
        for layer in self._layers:
            sums_G = self._sums[layer.name].result(summed, not_finite(layer))
            ends = np.cumsum([*layer.levels, len(layer.levels)])
            *levels, bits_GL, tokens_G1 = np.split(sums_G, ends, axis=1)
            found[layer.name] = [
                LevelEntropy(
                    experts=size,
                    of_token=measured(
                        _mean, np.concatenate([bits_GL[:, [n]], tokens_G1], 1), self._samples
                    ),
                    of_usage=measured(entropy_bits, p_GE, self._samples),
                )
                for n, (size, p_GE) in enumerate(zip(layer.levels, levels, strict=True))
            ]
        return found


def _mean(sums_2: Matrix) -> Matrix:
    """The first over the second."""
    mean: Matrix = sums_2[..., 0] / np.maximum(sums_2[..., 1], 1e-30)
    return mean
