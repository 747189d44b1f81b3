"""Similarity of experts: their outputs on the same inputs, wherever the gate sends them.

    cosine   the mean over tokens of cos(f_e(x), f_d(x))
    CKA      HSIC(e, d) / sqrt(HSIC(e, e) HSIC(d, d)), of kernels F_e F_e^T, F_e = f_e(N tokens)

Centered kernel alignment is invariant to rotating and scaling outputs, cosines are not. HSIC is the
unbiased estimator of Song et al. 2012, "Feature selection via dependence maximization", summed over
groups of tokens as in Nguyen et al. 2021, "Do wide and deep networks learn the same things?": its
biased form approaches 1 for any two experts if outputs are wider than there are tokens.

Shapes: N tokens of a group, D width of an output, E experts of a level, G groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from polyad.train.experts.information import Matrix, Summed, measured
from polyad.train.experts.probing import Decision, RoutedLayer

GROUPS = 16
"""Number of batches to use, evenly spaced over the data."""
TOKENS = 128
"""Maximum number of tokens per batch, evenly spaced."""
FEWEST_TOKENS = 4
"""Minimum number of tokens for an estimate of HSIC."""
MOST_EXPERTS = 64
"""Maximum number of experts per level, evenly spaced."""


@dataclass(frozen=True, kw_only=True)
class LevelSimilarity:
    """Similarity of the experts of one level."""

    experts: list[str]
    """Names of the compared experts."""
    tokens: int
    """Number of tokens on which they were compared."""
    sums_GEE: Matrix
    """Sums of cosines, HSIC and number of tokens of all pairs, by group [G, 3, E, E]."""

    def columns(self) -> dict[str, float]:
        """Columns of a table: the means over pairs of two experts, with their intervals."""
        sums_G, bounds = self.sums_GEE, {"lowest": -1.0, "highest": 1.0}
        return {
            "compared_experts": len(self.experts),
            "compared_tokens": self.tokens,
            **measured("cosine", lambda s: _of_pairs(_cosine(s)), sums_G, len(sums_G), **bounds),
            **measured(
                "cka", lambda s: _of_pairs(_cka(s[..., 1, :, :])), sums_G, len(sums_G), **bounds
            ),
        }


class ExpertSimilarity:
    """Accumulates similarities of expert outputs over some batches.

    Args:
        layers: the layers to measure.
        samples: number of images, sequences or windows that all processes read together.
        batch_size: samples per forward pass.
        device: the decisions' device.
    """

    def __init__(
        self,
        layers: Sequence[RoutedLayer],
        samples: int,
        batch_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._layers, self._batch_size = layers, batch_size
        batches = -(-samples // batch_size)
        chosen = np.linspace(0, batches - 1, min(GROUPS, batches)).round().astype(int)
        self._group = {int(batch): group for group, batch in enumerate(chosen)}
        groups = len(self._group)

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.float64, device=device)

        self._tokens = {layer.name: zeros(groups) for layer in layers}
        self._levels: dict[str, list[tuple[Tensor, list[int]]]] = {}
        """The sums of each layer's levels, and the compared experts."""
        for layer in layers:
            compared = [_compared(size) for size in layer.levels]
            self._levels[layer.name] = [(zeros(groups, 3, len(e), len(e)), e) for e in compared]

    @torch.no_grad()
    def add(self, name: str, decision: Decision, number_N: Tensor) -> None:
        """Adds a layer's outputs for a batch, if it is one of the batches to use.

        Args:
            name: the layer's name.
            decision: decisions for tokens.
            number_N: the number of each token's sample.
        """
        count = len(number_N)
        if count < FEWEST_TOKENS:
            return
        group = self._group.get(int(number_N[0]) // self._batch_size)
        if group is None:
            return
        rows_N = torch.linspace(0, count - 1, min(TOKENS, count)).round().long()
        rows_N = rows_N.to(number_N.device)
        self._tokens[name][group] = len(rows_N)
        for level, (sums, experts) in enumerate(self._levels[name]):
            outputs = [decision.output(level, expert, rows_N).double() for expert in experts]
            sums[group] = _sums(torch.stack(outputs))

    def result(self, summed: Summed = lambda sums: sums) -> dict[str, list[LevelSimilarity]]:
        """Returns the levels of each layer, by layer name.

        Args:
            summed: sums over processes, which have read different batches.
        """
        levels: dict[str, list[LevelSimilarity]] = {}
        for layer in self._layers:
            tokens = int(summed(self._tokens[layer.name]).sum())
            read_G = summed(self._tokens[layer.name]).cpu().numpy() > 0  # some groups are too small
            first = np.cumsum([0, *layer.levels])
            levels[layer.name] = [
                LevelSimilarity(
                    experts=[layer.expert_name(int(first[level]) + e) for e in experts],
                    tokens=tokens,
                    sums_GEE=summed(sums).cpu().numpy()[read_G],
                )
                for level, (sums, experts) in enumerate(self._levels[layer.name])
            ]
        return levels


def _sums(outputs_END: Tensor) -> Tensor:
    """Sum of cosines over tokens, HSIC, and number of tokens of each pair of experts [3, E, E]."""
    directions_ED = normalize(outputs_END, dim=-1).flatten(1)
    outputs_END = outputs_END - outputs_END.mean(1, keepdim=True)  # only against rounding
    kernels_ENN = outputs_END @ outputs_END.mT
    kernels_ENN.diagonal(dim1=1, dim2=2).zero_()
    tokens = outputs_END.shape[1]
    traces_EE = kernels_ENN.flatten(1) @ kernels_ENN.flatten(1).T
    rows_EN = kernels_ENN.sum(-1)
    totals_E = rows_EN.sum(-1)
    means_EE = totals_E.outer(totals_E) / ((tokens - 1) * (tokens - 2))
    hsic_EE = traces_EE + means_EE - 2 / (tokens - 2) * (rows_EN @ rows_EN.T)
    hsic_EE /= tokens * (tokens - 3)
    return torch.stack([directions_ED @ directions_ED.T, hsic_EE, torch.full_like(hsic_EE, tokens)])


def _cosine(sums_EE: Matrix) -> Matrix:
    """The mean cosine of each pair, from sums [..., 3, E, E]; NaN where nothing was read."""
    tokens_EE = np.where(sums_EE[..., 2, :, :] > 0, sums_EE[..., 2, :, :], np.nan)
    cosine_EE: Matrix = sums_EE[..., 0, :, :] / tokens_EE
    return cosine_EE


def _cka(hsic_EE: Matrix) -> Matrix:
    own_E = np.diagonal(hsic_EE, axis1=-2, axis2=-1)
    own_E = np.sqrt(np.where(own_E > 0, own_E, np.nan))
    cka_EE: Matrix = hsic_EE / (own_E[..., None] * own_E[..., None, :])
    return cka_EE


def _of_pairs(values_EE: Matrix) -> Matrix:
    """The mean over pairs of different experts that have a value; NaN if none has."""
    above = np.triu(np.isfinite(values_EE), 1)
    pairs = above.sum((-2, -1))
    total = np.where(above, values_EE, 0).sum((-2, -1))
    mean: Matrix = np.where(pairs > 0, total / np.maximum(pairs, 1), np.nan)
    return mean


def _compared(experts: int) -> list[int]:
    return [int(e) for e in np.linspace(0, experts - 1, min(MOST_EXPERTS, experts)).round()]
