"""Measures of expert specialization: entropies and information in bits, with intervals.

    H_s      mean entropy of the gate's probabilities for single tokens: low if decisive
    H_u      entropy of their mean over all data: high if all experts are used
    I(E; Y)  how much a token's expert reveals about its label

Source: Krishnamurthy et al. 2023, "Improving expert specialization in mixture of experts", section
3. Their code computes H_u on the last batch and I with the experts' predictions; here both use all
data read, and labels.

Statistics of experts, how often they are used and how large their outputs are, are said to predict
which experts matter, and are used for pruning. With T_e the tokens that use expert e, g its weight,
f its output before the weight:

    frequency            |T_e| / tokens
    mean weight          mean over T_e of g
    mean norm            mean over T_e of |f|          ("MAN"; its sum over T_e is "EAN")
    REAP                 mean over T_e of g |f|        Lasby et al. 2025
    probability          mean over all tokens of the expert's score, scores summing to 1     EMO
    MoNE                 |std over T_e of f| times mean weight       Zhang et al. 2025

The weight is the one that the layer uses, renormalized and scaled as in the model.

Shapes: N tokens, E experts of a level, S experts of all levels side by side, L levels, Y classes, G
groups of samples, D draws. All measures allow further leading axes. Of moments: M tokens, R of them
that use an expert, D width.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyad.model.output import entropy
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import Decision, RoutedLayer

Matrix = npt.NDArray[np.float64]
DRAWS = 200
"""Number of bootstrap draws for an interval."""
AT_ONCE = 10
"""Number of draws in memory at a time."""
GROUPS, FEWEST_GROUPS = 200, 20
"""Maximum number of random groups of samples; and the same if groups take much memory."""
MOST_NUMBERS = 1 << 21
"""Maximum number of values in all groups of a layer, unless the fewest groups have more."""
OUTSIDE = (0.025, 0.975)
"""Quantiles that bound an interval."""
Summed = Callable[[Tensor], Tensor]
"""Sums a tensor over processes that have read different samples."""


def entropy_bits(counts: Matrix) -> Matrix:
    """Entropy in bits of counts or shares over the last axis; 0 if all are 0."""
    total = counts.sum(-1)
    some = np.where(total > 0, total, 1.0)
    inner = (counts * np.log2(np.where(counts > 0, counts, 1.0))).sum(-1)
    bits: Matrix = np.maximum(0.0, np.log2(some) - inner / some)
    return bits


def information_bits(counts_SY: Matrix) -> Matrix:
    """I(E; Y) of experts and classes: how much a token's expert reveals about its class.

    Args:
        counts_SY: number of tokens of each class that every expert gets, or shares.

    Returns:
        Bits, from 0 to the smaller of both entropies; 0 where nothing was counted.
    """
    apart = entropy_bits(counts_SY.sum(-1)) + entropy_bits(counts_SY.sum(-2))
    joint = entropy_bits(counts_SY.reshape(*counts_SY.shape[:-2], -1))
    return np.maximum(0.0, apart - joint)


def normalized_information(counts_SY: Matrix) -> Matrix:
    """I(E; Y) divided by the mean of both entropies, from 0 to 1.

    Like `sklearn.metrics.normalized_mutual_info_score` by default, but 0 if both entropies are 0.

    Args:
        counts_SY: as in `information_bits`.
    """
    mean = (entropy_bits(counts_SY.sum(-1)) + entropy_bits(counts_SY.sum(-2))) / 2
    bits = information_bits(counts_SY)
    return np.where(mean > 0, bits / np.where(mean > 0, mean, 1), 0)


def purity(counts_SY: Matrix) -> Matrix:
    """Share of tokens that belong to their expert's most frequent class.

    Args:
        counts_SY: as in `information_bits`.
    """
    total = counts_SY.sum((-2, -1))
    share: Matrix = counts_SY.max(-1).sum(-1) / np.where(total > 0, total, 1.0)
    return share


def intervals(measure: Callable[[Matrix], Matrix], sums_G: Matrix, samples: int) -> Matrix:
    """Computes measures over all samples with bootstrap intervals over groups of them.

    Groups are drawn with replacement. Draws contain fewer distinct samples than the data and
    therefore overestimate information, so the interval of the draws around their own mean is
    shifted to the value.

    Args:
        measure: function of sums over samples, of any shape; further leading axes are draws.
        sums_G: sums of each group, [G, ...].
        samples: number of samples in all groups.

    Returns:
        The values, the lower and the upper ends [3, ...]; ends are NaN for a single sample, and
        where a draw has NaN.
    """
    value = measure(sums_G.sum(0))
    groups = len(sums_G)
    if samples < 2:
        return np.stack([value, np.full_like(value, np.nan), np.full_like(value, np.nan)])
    drawn_DG = np.random.default_rng(0).multinomial(groups, np.full(groups, 1 / groups), DRAWS)
    draws_D = np.concatenate(
        [
            measure(np.tensordot(drawn_DG[first : first + AT_ONCE].astype(np.float64), sums_G, 1))
            for first in range(0, DRAWS, AT_ONCE)
        ]
    )
    low, high = value + np.quantile(draws_D - draws_D.mean(0), OUTSIDE, axis=0)
    return np.stack([value, low, high])


def interval_columns(
    name: str, measure: Callable[[Matrix], Matrix], sums_G: Matrix, samples: int
) -> dict[str, Matrix]:
    """Returns flattened values and the ends of their intervals as columns of a table; see
    `intervals`."""
    ends = intervals(measure, sums_G, samples)
    named = zip(("", "_low", "_high"), ends, strict=True)
    return {f"{name}{end}": values.ravel() for end, values in named}


def measured(
    name: str,
    measure: Callable[[Matrix], Matrix],
    sums_G: Matrix,
    samples: int,
    *,
    lowest: float = 0.0,
    highest: float = math.inf,
) -> dict[str, float]:
    """Computes one bounded measure with its interval, as columns of a table; see `intervals`.

    Args:
        name: the column of the value; those of the ends are `NAME_low` and `NAME_high`.
        measure: function of sums over samples; further leading axes are draws.
        sums_G: sums of each group, [G, ...].
        samples: number of samples in all groups.
        lowest: lower bound.
        highest: upper bound.

    Returns:
        Values by column; both ends are NaN if one is not finite.
    """
    value, *ends = intervals(measure, sums_G, samples).tolist()
    low, high = np.clip(ends, lowest, highest) if np.isfinite(ends).all() else (np.nan, np.nan)
    return {name: value, f"{name}_low": float(low), f"{name}_high": float(high)}


class GroupedSums:
    """Sums over groups of samples, for intervals.

    Samples are divided into random groups of equal size, the same on every process.

    Args:
        samples: number of images, sequences or windows that all processes read together.
        shape: shape of a group's sums, whose size limits the number of groups.
        device: device of the accumulators.
    """

    def __init__(self, samples: int, shape: Sequence[int], device: torch.device | str) -> None:
        wanted = min(GROUPS, max(FEWEST_GROUPS, MOST_NUMBERS // max(1, math.prod(shape))))
        groups = max(1, min(samples, wanted))
        generator = torch.Generator().manual_seed(0)
        self._group_A = (torch.randperm(samples, generator=generator) % groups).to(device)
        self.sums_G = torch.zeros(groups, *shape, dtype=torch.float64, device=device)
        """The sums by group."""

    def group_of(self, number_N: Tensor) -> Tensor:
        """Returns the groups of samples, given by number."""
        return self._group_A[number_N.to(self._group_A.device)]

    def result(self, summed: Summed, what: str) -> Matrix:
        """Returns the sums over all processes.

        Args:
            summed: sums over processes.
            what: names the sums, for the error.

        Raises:
            ConfigError: the sums are not finite.
        """
        sums_G = summed(self.sums_G)
        if not sums_G.isfinite().all():
            raise ConfigError(not_finite(what))
        return sums_G.cpu().numpy()


def not_finite(what: str) -> str:
    """The error message for numbers that a model has computed and that are not finite."""
    return f"{what} are not finite: weights hold NaN or inf, or are too large"


class GateEntropies:
    """Accumulates the probabilities of a layer's gate and their entropies.

    Probabilities are the scores before top-K, divided by their sum, or the coefficients of a muMoE.

    Args:
        layer: the layer to measure.
        samples: number of samples read, over all processes.
        device: the decisions' device.
    """

    def __init__(
        self, layer: RoutedLayer, samples: int, device: torch.device | str = "cpu"
    ) -> None:
        self._layer, self._samples = layer, samples
        width = layer.num_experts + len(layer.levels) + 1
        self._sums = GroupedSums(samples, [width], device)

    def add(self, decision: Decision, number_N: Tensor) -> None:
        """Adds what the layer decided for a batch.

        Args:
            decision: decisions for tokens.
            number_N: the number of each token's sample.
        """
        levels = decision.probabilities()
        bits = [entropy(p_NE).unsqueeze(-1) / math.log(2) for p_NE in levels]
        rows = torch.cat([*levels, *bits, torch.ones_like(bits[0])], dim=-1)
        self._sums.sums_G.index_add_(0, self._sums.group_of(number_N), rows)

    def result(self, summed: Summed = lambda sums: sums) -> list[dict[str, float]]:
        """Returns columns for each level: `entropy_bits` (H_s) and `usage_entropy_bits` (H_u) with
        their intervals.

        Args:
            summed: sums over processes.

        Raises:
            ConfigError: probabilities are not finite.
        """
        sums_G = self._sums.result(summed, f"the coefficients of {self._layer.name}")
        sizes = self._layer.levels
        *levels, bits_GL, tokens_G1 = np.split(sums_G, np.cumsum([*sizes, len(sizes)]), axis=1)
        own = [np.concatenate([bits_G[:, None], tokens_G1], 1) for bits_G in bits_GL.T]
        return [
            measured("entropy_bits", _mean, bits_G2, self._samples)
            | measured("usage_entropy_bits", entropy_bits, p_GE, self._samples)
            for bits_G2, p_GE in zip(own, levels, strict=True)
        ]


def _mean(sums_2: Matrix) -> Matrix:
    """Divides the first by the second."""
    return sums_2[..., 0] / np.maximum(sums_2[..., 1], 1e-30)


STATISTICS = ("frequency", "mean_weight", "mean_norm", "sum_norm", "reap", "mone")
"""The statistics of an expert, by their names in JSON."""


class Moments:
    """Accumulates moments of a layer's experts.

    Args:
        layer: the layer to read.
    """

    def __init__(self, layer: RoutedLayer) -> None:
        self._layer = layer
        self._tokens = 0
        """Number of tokens read."""
        self._probability_S = torch.zeros(layer.num_experts).double()
        """Sum of each expert's scores over all tokens, whether or not they use it."""
        self._sums_SX = torch.zeros(layer.num_experts, 0).double()
        """[S, 4 + 2 D] over the tokens that use it, once there are any: their number, and the sums
        of its weights, of the norms of its outputs, of weighted norms, of its outputs and of their
        squares."""

    @torch.inference_mode()
    def add(self, decision: Decision) -> None:
        """Adds a batch: the layer's decision for tokens that count."""
        a_MS = decision.coefficients()
        self._tokens += len(a_MS)
        p_S = torch.cat(decision.probabilities(), dim=-1).sum(0)
        self._probability_S = self._probability_S.to(p_S) + p_S
        for column in range(self._layer.num_experts):
            rows_R = a_MS[:, column].nonzero().squeeze(-1)
            if len(rows_R):
                output_RD = decision.output(*self._layer.place(column), rows_R).double()
                self._add(column, a_MS[rows_R, column].double(), output_RD)

    def _add(self, column: int, weight_R: Tensor, output_RD: Tensor) -> None:
        norm_R = output_RD.norm(dim=-1)
        numbers = torch.stack(
            [torch.ones_like(norm_R), weight_R, norm_R, weight_R * norm_R], -1
        ).sum(0)
        row_X = torch.cat([numbers, output_RD.sum(0), output_RD.square().sum(0)])
        if not self._sums_SX.numel():
            self._sums_SX = row_X.new_zeros(len(self._sums_SX), len(row_X))
        self._sums_SX[column] += row_X

    def result(self, summed: Summed = lambda counts: counts) -> "Moments":
        """Sums over processes, and returns itself, on the CPU in float64.

        Args:
            summed: sums over processes.

        Raises:
            ConfigError: outputs are not finite.
        """
        # A process that has read nothing knows the width of no output, but the others do.
        sums_SX = self._sums_SX
        columns, processes = summed(sums_SX.new_tensor([sums_SX.shape[1], sums_SX.numel() > 0]))
        if not sums_SX.numel():
            size = max(4, round(float(columns / processes.clamp_min(1))))
            sums_SX = sums_SX.new_zeros(len(sums_SX), size)
        self._tokens = int(summed(sums_SX.new_tensor([self._tokens])))
        self._probability_S = summed(self._probability_S.to(sums_SX)).cpu()
        self._sums_SX = summed(sums_SX).cpu()
        if not (self._sums_SX.sum() + self._probability_S.sum()).isfinite():
            raise ConfigError(not_finite(f"the outputs of experts of {self._layer.name}"))
        return self

    @property
    def mean_SD(self) -> Tensor:
        """The mean output of each expert; 0 for unused experts."""
        return self._means_SD()[0]

    def statistics(self) -> dict[str, Tensor]:
        """The statistics of each expert [S]; 0 for unused experts."""
        counts_S, (mean_SD, square_SD) = self._counts_S(), self._means_SD()
        used_S, weight_S, norm_S, weighted_S = self._sums_SX[:, :4].unbind(-1)
        spread_S = (square_SD - mean_SD.square()).clamp_min(0).sum(-1).sqrt()
        return {
            "frequency": used_S / max(1, self._tokens),
            "mean_weight": weight_S / counts_S,
            "mean_norm": norm_S / counts_S,
            "sum_norm": norm_S,
            "reap": weighted_S / counts_S,
            "mone": spread_S * weight_S / counts_S,
            "probability": self._probability_S / max(1, self._tokens),
        }

    def _counts_S(self) -> Tensor:
        return self._sums_SX[:, 0].clamp_min(1)

    def _means_SD(self) -> tuple[Tensor, ...]:
        """The means of outputs and of their squares."""
        return (self._sums_SX[:, 4:] / self._counts_S().unsqueeze(-1)).tensor_split(2, -1)
