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

from dataclasses import dataclass

import torch
from torch import Tensor

from polyad.train.errors import ConfigError
from polyad.train.experts.information import Summed
from polyad.train.experts.probing import Decision, RoutedLayer

STATISTICS = ("frequency", "mean_weight", "mean_norm", "sum_norm", "reap", "mone")
"""The statistics of an expert, by their names in JSON."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Accumulated moments of a layer's experts, on the CPU in float64."""

    tokens: int
    """Number of tokens read."""
    sums_SX: Tensor
    """[S, 5 + 2 D]: the sum of each expert's scores over all tokens, whether or not they use it;
    and over those that use it their number, and the sums of its weights, of the norms of its
    outputs, of weighted norms, of its outputs and of their squares."""

    @property
    def mean_SD(self) -> Tensor:
        """The mean output of each expert; 0 for unused experts."""
        return self._means_SD()[0]

    def statistics(self) -> dict[str, Tensor]:
        """The statistics of each expert [S]; 0 for unused experts."""
        counts_S, (mean_SD, square_SD) = self._counts_S(), self._means_SD()
        probability_S, used_S, weight_S, norm_S, weighted_S = self.sums_SX[:, :5].unbind(-1)
        spread_S = (square_SD - mean_SD.square()).clamp_min(0).sum(-1).sqrt()
        return {
            "frequency": used_S / max(1, self.tokens),
            "mean_weight": weight_S / counts_S,
            "mean_norm": norm_S / counts_S,
            "sum_norm": norm_S,
            "reap": weighted_S / counts_S,
            "mone": spread_S * weight_S / counts_S,
            "probability": probability_S / max(1, self.tokens),
        }

    def _counts_S(self) -> Tensor:
        return self.sums_SX[:, 1].clamp_min(1)

    def _means_SD(self) -> tuple[Tensor, ...]:
        """The means of outputs and of their squares."""
        return (self.sums_SX[:, 5:] / self._counts_S().unsqueeze(-1)).chunk(2, -1)


class ExpertMoments:
    """Accumulates moments of a layer's experts.

    Args:
        layer: the layer to read.
    """

    def __init__(self, layer: RoutedLayer) -> None:
        self._layer, self._tokens = layer, 0
        self._probability_S = torch.zeros(layer.num_experts).double()
        self._sums_SX = torch.zeros(layer.num_experts, 0).double()

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

    def result(self, summed: Summed = lambda counts: counts) -> Moments:
        """What was found.

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
        sums_SX = torch.cat([self._probability_S.to(sums_SX).unsqueeze(-1), sums_SX], -1)
        tokens, sums_SX = (
            summed(each).cpu() for each in (sums_SX.new_tensor([self._tokens]), sums_SX)
        )
        if not sums_SX.isfinite().all():
            raise ConfigError(
                f"the outputs of experts of {self._layer.name} are not finite: its weights hold "
                "NaN or inf, or are too large"
            )
        return Moments(tokens=int(tokens), sums_SX=sums_SX)
