"""Similarity of experts: their outputs on the same inputs, wherever the gate sends them.

    cosine   the mean over tokens of cos(f_e(x), f_d(x))
    CKA      HSIC(e, d) / sqrt(HSIC(e, e) HSIC(d, d)), of kernels F_e F_e^T, F_e = f_e(N tokens)

Centered kernel alignment is invariant to rotating and scaling outputs, cosines are not. HSIC is the
unbiased estimator of Song et al. 2012, "Feature selection via dependence maximization", summed over
groups of tokens as in Nguyen et al. 2021, "Do wide and deep networks learn the same things?": its
biased form approaches 1 for any two experts if outputs are wider than there are tokens.

Shapes: N tokens of a group, D width of an output, E experts of a level, G groups.
"""

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


class ExpertSimilarity:
    """Accumulates similarities of a layer's expert outputs over some batches.

    Args:
        layer: the layer to measure.
        samples: number of images, sequences or windows that all processes read together.
        batch_size: samples per forward pass.
        device: the decisions' device.
    """

    def __init__(
        self,
        layer: RoutedLayer,
        samples: int,
        batch_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._batch_size = batch_size
        batches = -(-samples // batch_size)
        chosen = np.linspace(0, batches - 1, min(GROUPS, batches)).round().astype(int)
        self._group = {int(batch): group for group, batch in enumerate(chosen)}
        sums_G = torch.zeros(len(chosen), dtype=torch.float64, device=device)
        self._tokens_G = sums_G
        """Number of tokens of each group."""
        self._compared = [_compared(size) for size in layer.levels]
        """Numbers of the compared experts of each level."""
        self._levels = [sums_G.new_zeros(len(chosen), 3, len(e), len(e)) for e in self._compared]
        """Sums of cosines, HSIC and number of tokens of all pairs of each level [G, 3, E, E]."""

    @torch.no_grad()
    def add(self, decision: Decision, number_N: Tensor) -> None:
        """Adds the layer's outputs for a batch, if it is one of the batches to use.

        Args:
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
        self._tokens_G[group] = len(rows_N)
        for level, experts in enumerate(self._compared):
            outputs = [decision.output(level, expert, rows_N).double() for expert in experts]
            self._levels[level][group] = _sums(torch.stack(outputs))

    def sums(self, summed: Summed = lambda sums: sums) -> list[Matrix]:
        """Returns the sums of each level, by group [G, 3, E, E].

        Args:
            summed: sums over processes, which have read different batches.
        """
        read_G = summed(self._tokens_G).cpu().numpy() > 0  # some groups are too small
        return [summed(sums).cpu().numpy()[read_G] for sums in self._levels]

    def result(self, summed: Summed = lambda sums: sums) -> list[dict[str, float]]:
        """Returns columns for each level: the means over pairs of two experts, with intervals.

        Args:
            summed: as for `sums`.
        """
        tokens = int(summed(self._tokens_G).sum())
        bounds = {"lowest": -1.0, "highest": 1.0}
        return [
            {
                "compared_experts": sums_GEE.shape[-1],
                "compared_tokens": tokens,
                **measured("cosine", _mean_cosine, sums_GEE, len(sums_GEE), **bounds),
                **measured("cka", _mean_cka, sums_GEE, len(sums_GEE), **bounds),
            }
            for sums_GEE in self.sums(summed)
        ]


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


def _mean_cosine(sums_EE: Matrix) -> Matrix:
    """The mean over pairs of the cosine, from sums [..., 3, E, E]."""
    return _of_pairs(_cosine(sums_EE))


def _mean_cka(sums_EE: Matrix) -> Matrix:
    """The mean over pairs of the alignment, from sums [..., 3, E, E]."""
    return _of_pairs(_cka(sums_EE))


def _cosine(sums_EE: Matrix) -> Matrix:
    """The mean cosine of each pair, from sums [..., 3, E, E]; NaN where nothing was read."""
    tokens_EE = np.where(sums_EE[..., 2, :, :] > 0, sums_EE[..., 2, :, :], np.nan)
    return sums_EE[..., 0, :, :] / tokens_EE


def _cka(sums_EE: Matrix) -> Matrix:
    """The alignment of each pair, from sums [..., 3, E, E]; NaN for constant outputs."""
    hsic_EE = sums_EE[..., 1, :, :]
    own_E = np.diagonal(hsic_EE, axis1=-2, axis2=-1)
    own_E = np.sqrt(np.where(own_E > 0, own_E, np.nan))
    return hsic_EE / (own_E[..., None] * own_E[..., None, :])


def _of_pairs(values_EE: Matrix) -> Matrix:
    """The mean over pairs of different experts that have a value; NaN if none has."""
    above = np.triu(np.isfinite(values_EE), 1)
    pairs = above.sum((-2, -1))
    total = np.where(above, values_EE, 0).sum((-2, -1))
    return np.where(pairs > 0, total / np.maximum(pairs, 1), np.nan)


def _compared(experts: int) -> list[int]:
    return [int(e) for e in np.linspace(0, experts - 1, min(MOST_EXPERTS, experts)).round()]
