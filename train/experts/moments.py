"""Statistics of experts: how often they are used and how large their outputs are.

Such statistics are said to predict which experts matter, and are used for pruning.

With T_e the tokens that use expert e, g its weight, f its output before the weight:

    frequency            |T_e| / tokens
    mean weight          mean over T_e of g
    mean norm            mean over T_e of |f|          ("MAN"; its sum over T_e is "EAN")
    REAP                 mean over T_e of g |f|        Lasby et al. 2025
    probability          mean over all tokens of the expert's score, scores summing to 1     EMO
    MoNE                 |std over T_e of f| times mean weight       Zhang et al. 2025

The weight is the one that the layer uses, renormalized and scaled as in the model.

Shapes: M tokens, R of them that use an expert, S experts of a layer, D width.
"""

import torch
from torch import Tensor

from polyad.train.errors import ConfigError
from polyad.train.experts.information import Summed, not_finite
from polyad.train.experts.probing import Decision, RoutedLayer

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
