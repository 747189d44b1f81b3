"""Which experts serve which class: of the tokens of each class how many every expert gets.

A class may be any group of sequences or images: also the right choices and the wrong ones, or rows
with low, middle and high numbers.

Shapes: N tokens, R sequences or images of a batch, A all that are read, Y classes, S experts of all
levels side by side, P labels: the right ones first, then shuffled ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from train.errors import ConfigError
from train.experts.probing import Decision, RoutedLayer

Matrix = npt.NDArray[np.float64]
SHUFFLES = 8
"""How often labels are shuffled for what chance alone gives."""
MOST_LEANING = 10
"""Experts that are named as those that lean most to a class."""
LEAST_EXPECTED = 5.0
"""Tokens that an expert has to be expected to get of a class before its lift says anything."""


def mutual_information(counts_SY: Matrix) -> float:
    """I(E; Y) of experts and classes, in bits: what the expert of a token tells about its class.

    Args:
        counts_SY: tokens of each class that every expert gets, or shares of tokens.

    Returns:
        From 0 to the smaller entropy of both; 0 where nothing was counted.
    """
    total = counts_SY.sum()
    if total <= 0:
        return 0.0
    joint_SY = counts_SY / total
    apart_SY = joint_SY.sum(1, keepdims=True) * joint_SY.sum(0, keepdims=True)
    some = joint_SY > 0
    return max(0.0, float((joint_SY[some] * np.log2(joint_SY[some] / apart_SY[some])).sum()))


class Lean(NamedTuple):
    """An expert that gets more of a class than of all."""

    expert: str
    group: str
    """The class."""
    tokens: float
    """Tokens of the class that the expert gets; of a muMoE the sum of their coefficients."""
    share: float
    """Of what experts get of the class, this one's part."""
    share_of_all: float
    """Its part of what experts get of all classes."""
    lift: float
    """share / share_of_all."""

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {"class" if key == "group" else key: v for key, v in self._asdict().items()}


@dataclass(frozen=True, kw_only=True)
class LevelByClass:
    """The experts of one level of a layer, and the classes."""

    experts: list[str]
    """Their names; see `RoutedLayer.expert_name`."""
    groups: list[str]
    """Names of the classes."""
    counts_SY: Matrix
    """Tokens of each class that every expert gets; of a muMoE sums of coefficients."""
    by_chance: float
    """The mean of `information` over labels that were shuffled among the sequences or images."""

    @property
    def information(self) -> float:
        """I(E; Y) in bits."""
        return mutual_information(self.counts_SY)

    @property
    def share_S(self) -> Matrix:
        """The part of each expert in what all get."""
        share_S: Matrix = self.counts_SY.sum(1) / max(self.counts_SY.sum(), 1e-30)
        return share_S

    @property
    def share_SY(self) -> Matrix:
        """The part of each expert in what all get of a class; NaN of a class without a token."""
        with np.errstate(invalid="ignore"):
            share_SY: Matrix = self.counts_SY / self.counts_SY.sum(0)
        return share_SY

    def leaning(self, most: int) -> list[Lean]:
        """The experts that lean most to a class, the highest lift first.

        Args:
            most: how many; of pairs of which `LEAST_EXPECTED` tokens are expected.
        """
        share_S, share_SY = self.share_S, self.share_SY
        expected_SY = share_S[:, None] * self.counts_SY.sum(0)
        found = [
            Lean(
                expert=self.experts[s],
                group=self.groups[y],
                tokens=float(self.counts_SY[s, y]),
                share=float(share_SY[s, y]),
                share_of_all=float(share_S[s]),
                lift=float(share_SY[s, y] / share_S[s]),
            )
            for s, y in zip(*np.nonzero(expected_SY >= LEAST_EXPECTED), strict=True)
        ]
        return sorted(found, key=lambda lean: -lean.lift)[:most]

    def of_each_group(self) -> list[Lean]:
        """The expert that leans most to each class, the highest lift first."""
        found: dict[str, Lean] = {}
        for lean in self.leaning(self.counts_SY.size):
            found.setdefault(lean.group, lean)
        return list(found.values())

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "information_bits": self.information,
            "information_bits_by_chance": self.by_chance,
            "experts": self.experts,
            "share": self.share_S.tolist(),
            "counts": self.counts_SY.tolist(),
            "leaning": [lean.to_json() for lean in self.leaning(MOST_LEANING)],
            "of_each_class": [lean.to_json() for lean in self.of_each_group()],
        }


class ExpertsByClass:
    """Adds up what experts get of each class, in one pass.

    The shuffled labels are those of whole sequences, since tokens of one sequence are alike: labels
    of single tokens would make chance look smaller than it is.

    Args:
        layers: those that are counted.
        groups: names of the classes.
        group_A: the class of each sequence or image, in the order in which they are read.
        device: where decisions are.
    """

    def __init__(
        self,
        layers: Sequence[RoutedLayer],
        groups: Sequence[str],
        group_A: Tensor,
        device: torch.device | str = "cpu",
    ) -> None:
        self._layers, self._groups = layers, list(groups)
        generator = torch.Generator().manual_seed(0)
        shuffled = [
            group_A[torch.randperm(len(group_A), generator=generator)] for _ in range(SHUFFLES)
        ]
        self._group_PA = torch.stack([group_A, *shuffled]).to(device)
        self._counts_PYS = {
            layer.name: torch.zeros(
                *(1 + SHUFFLES, len(groups), layer.num_experts), dtype=torch.float64, device=device
            )
            for layer in layers
        }

    def add(self, name: str, decision: Decision, row_N: Tensor, first: int) -> None:
        """Adds what a layer decided for a batch.

        Args:
            name: of the layer.
            decision: for tokens that are real.
            row_N: of each of them the row of the batch that it belongs to.
            first: the number of the batch's first row among all that are read.
        """
        given_NS = given(decision)
        rows = int(row_N[-1]) + 1  # ascending, and no row is without a token
        given_RS = given_NS.new_zeros(rows, given_NS.shape[1]).index_add_(0, row_N, given_NS)
        for counts_YS, group_A in zip(self._counts_PYS[name], self._group_PA, strict=True):
            counts_YS.index_add_(0, group_A[first : first + rows], given_RS)

    def result(self) -> dict[str, list[LevelByClass]]:
        """The levels of each layer, by the layer's name.

        Raises:
            ConfigError: coefficients are not finite.
        """
        found: dict[str, list[LevelByClass]] = {}
        for layer in self._layers:
            counts_PSY = self._counts_PYS[layer.name].mT.cpu().numpy()
            if not np.isfinite(counts_PSY).all():
                raise ConfigError(
                    f"the coefficients of {layer.name} are not finite: its weights hold NaN or "
                    f"inf, or are too large"
                )
            first, levels = 0, []
            for size in layer.levels:
                columns = range(first, first + size)
                of_level_PSY = counts_PSY[:, first : first + size]
                levels.append(
                    LevelByClass(
                        experts=[layer.expert_name(column) for column in columns],
                        groups=self._groups,
                        counts_SY=of_level_PSY[0],
                        by_chance=float(np.mean([mutual_information(c) for c in of_level_PSY[1:]])),
                    )
                )
                first += size
            found[layer.name] = levels
        return found


def given(decision: Decision) -> Tensor:
    """What every token gives to each expert, [N, S], in fp64.

    Of sparse experts 1 for each that is selected, whatever its weight, before a capacity drops any;
    of a muMoE the coefficient.

    Args:
        decision: of a layer.
    """
    if decision.selected is None:
        return torch.cat(decision.levels, dim=-1).double()
    ids_NK = decision.selected.expert_ids_NK
    ones_NK = torch.ones_like(ids_NK, dtype=torch.float64)
    return ones_NK.new_zeros(len(ids_NK), decision.levels[0].shape[-1]).scatter(1, ids_NK, ones_NK)
