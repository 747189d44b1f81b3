"""Which experts serve which class: how many tokens of each class every expert gets.

A class may be any group of sequences or images, such as right and wrong choices, or rows with low,
middle and high numbers.

Shapes: N tokens, A all samples read, Y classes, S experts of all levels side by side, P labels: the
true ones first, then shuffled ones, G groups of samples.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyad.train.experts.information import (
    GroupedSums,
    Matrix,
    Summed,
    information_bits,
    intervals,
    measured,
    normalized_information,
    purity,
)
from polyad.train.experts.probing import Decision, RoutedLayer

SHUFFLES = 8
"""Number of shuffles of the labels that estimate the chance level."""
LEAST_EXPECTED = 5.0
"""Minimum expected number of tokens of a class for an expert's lift to be meaningful."""


@dataclass(frozen=True, kw_only=True)
class LevelByClass:
    """The experts of one level of a layer, and the classes."""

    groups: list[str]
    """Names of the classes."""
    counts_GSY: Matrix
    """Number of tokens of each class that every expert gets, per group of sequences or images; for
    shares their sums."""
    samples: int
    """Number of sequences, images or windows in all groups."""
    by_chance: float
    """Mean `information` over labels shuffled among the sequences or images."""
    highest: "LevelByClass | None" = None
    """If tokens weight every expert: the same of tokens for which each has the highest share."""

    @functools.cached_property
    def counts_SY(self) -> Matrix:
        """The counts of all groups together."""
        counts_SY: Matrix = self.counts_GSY.sum(0)
        return counts_SY

    def columns(self) -> dict[str, float]:
        """Columns of a table: how much an expert reveals about the class, with intervals.

        Information in bits, the same divided by the mean entropy, and purity; with shares also the
        information of the expert with the highest share, since Krishnamurthy et al. 2023 count each
        sample for one expert.
        """
        counts_GSY, samples = self.counts_GSY, self.samples
        columns = measured("information_bits", information_bits, counts_GSY, samples)
        columns["information_bits_by_chance"] = self.by_chance
        columns |= measured("normalized_information", normalized_information, counts_GSY, samples)
        columns |= measured("purity", purity, counts_GSY, samples)
        if self.highest is not None:
            name = "information_bits_of_highest"
            columns |= measured(name, information_bits, self.highest.counts_GSY, samples)
            columns[f"{name}_by_chance"] = self.highest.by_chance
        return columns

    @property
    def share_S(self) -> Matrix:
        """Each expert's share of all tokens."""
        share_S: Matrix = self.counts_SY.sum(1) / max(self.counts_SY.sum(), 1e-30)
        return share_S

    def highest_lifts(self) -> tuple[list[int], list[list[float]]]:
        """The class with the highest lift for each expert.

        Returns:
            The class number, and the lift with the ends of its interval: NaN for an expert without
            a class of `LEAST_EXPECTED` expected tokens.
        """
        expected_SY = self.share_S[:, None] * self.counts_SY.sum(0)
        lift_SY = np.where(
            expected_SY >= LEAST_EXPECTED, self.counts_SY / np.maximum(expected_SY, 1e-30), -1.0
        )
        best_S = lift_SY.argmax(1)
        experts = np.arange(len(best_S))

        def lift(counts_SY: Matrix) -> Matrix:
            """The share of a class divided by that of all."""
            with np.errstate(invalid="ignore", divide="ignore"):
                of_class_S = counts_SY[..., experts, best_S] / counts_SY.sum(-2)[..., best_S]
                of_all_S = counts_SY.sum(-1) / counts_SY.sum((-2, -1))[..., None]
                lift_S: Matrix = of_class_S / of_all_S
            return lift_S

        lift_3S = intervals(lift, self.counts_GSY, self.samples)
        lift_3S[:, lift_SY[experts, best_S] < 0] = np.nan
        return best_S.tolist(), lift_3S.T.tolist()


class ExpertCounts:
    """Accumulates what a layer's experts get of each class in one pass, by labels of single tokens.

    Args:
        layer: the layer to count.
        groups: class names.
        samples: number of sequences, images or windows read, over all processes.
        device: the decisions' device.
    """

    def __init__(
        self,
        layer: RoutedLayer,
        groups: Sequence[str],
        samples: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._layer, self._groups, self._samples = layer, list(groups), samples
        shape = (len(groups), layer.num_experts * (2 if layer.shares else 1))
        self._counts = GroupedSums(samples, shape, device)
        """What the experts get of each class [G, Y, S], or 2 S, as `assigned`."""
        self._shuffled_PYS = self._counts.sums_G.new_zeros(SHUFFLES, *shape)
        """The same with shuffled labels, over all samples."""

    def count(self, assigned_NS: Tensor, label_PN: Tensor, number_N: Tensor) -> None:
        """Adds tokens.

        Args:
            assigned_NS: each token's counts per expert, fp64, [N, S] or 2 S; see `assigned`.
            label_PN: its class, and shuffled ones; -1: not counted.
            number_N: the number of its sample.
        """
        for shuffle, label_N in enumerate(label_PN):
            counted_N = label_N >= 0
            label_C, assigned_CS = label_N[counted_N], assigned_NS[counted_N]
            if shuffle:
                self._shuffled_PYS[shuffle - 1].index_add_(0, label_C, assigned_CS)
                continue
            row_C = self._counts.group_of(number_N[counted_N]) * len(self._groups) + label_C
            self._counts.sums_G.flatten(0, 1).index_add_(0, row_C, assigned_CS)

    def result(self, summed: Summed = lambda counts: counts) -> list[LevelByClass]:
        """Returns the levels of the layer.

        Args:
            summed: sums over processes.

        Raises:
            ConfigError: coefficients are not finite.
        """
        layer = self._layer
        counts_GYS = self._counts.result(summed, f"the coefficients of {layer.name}")
        counts_GSY = counts_GYS.swapaxes(1, 2)
        shuffled_PSY = summed(self._shuffled_PYS).cpu().numpy().swapaxes(1, 2)

        def level(own: slice, highest: LevelByClass | None = None) -> LevelByClass:
            return LevelByClass(
                groups=self._groups,
                counts_GSY=counts_GSY[:, own],
                samples=self._samples,
                by_chance=float(information_bits(shuffled_PSY[:, own]).mean()),
                highest=highest,
            )

        levels = []
        for own in layer.columns:
            beside = slice(own.start + layer.num_experts, own.stop + layer.num_experts)
            levels.append(level(own, level(beside) if layer.shares else None))
        return levels


def shuffled_classes(class_A: Tensor) -> Tensor:
    """Returns the classes of whole sequences or images, and shuffled ones [P, A].

    Labels of whole sequences are shuffled, since tokens of one sequence are similar: shuffling
    labels of single tokens would underestimate chance.

    Args:
        class_A: the class of each sequence or image, in reading order.
    """
    generator = torch.Generator().manual_seed(0)
    shuffles = [torch.randperm(len(class_A), generator=generator) for _ in range(SHUFFLES)]
    return torch.stack([class_A, *(class_A[order_A] for order_A in shuffles)])


def assigned(decision: Decision) -> Tensor:
    """Returns each token's counts per expert, in fp64.

    Args:
        decision: a layer's decision.

    Returns:
        For sparse experts [N, S]: 1 for each selected expert, whatever its weight, before a
        capacity drops any. For shares [N, 2 S]: the shares, then 1 for the highest of each level.
    """
    if decision.selected is None:
        highest = [
            torch.zeros_like(a_NS).scatter(1, a_NS.argmax(-1, keepdim=True), 1.0)
            for a_NS in decision.levels
        ]
        return torch.cat([*decision.levels, *highest], dim=-1).double()
    ids_NK = decision.selected.expert_ids_NK
    ones_NK = torch.ones_like(ids_NK, dtype=torch.float64)
    return ones_NK.new_zeros(len(ids_NK), decision.levels[0].shape[-1]).scatter(1, ids_NK, ones_NK)
